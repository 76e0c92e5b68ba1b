"""What passes between the sidecar and its stages: frozen structs without default header fields.

Every message names its session and what it belongs to (unit, epoch, sequence); nothing is implied,
so a lost header can never be read as "epoch 0, sequence 0". Tensors travel as raw bytes with their
type and shape. Pure: imports neither torch nor vllm.
"""

from enum import StrEnum

import msgspec


class ElementType(StrEnum):
    """Element types that cross a stage boundary."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT64 = "int64"


ELEMENT_BYTES = {ElementType.FLOAT32: 4, ElementType.BFLOAT16: 2, ElementType.INT64: 8}


class Tensor(msgspec.Struct, frozen=True):
    """A dense row-major tensor. `data` has exactly prod(shape) elements, little endian."""

    element_type: ElementType
    shape: tuple[int, ...]
    data: bytes

    def __post_init__(self) -> None:
        count = 1
        for size in self.shape:
            count *= size
        if count * ELEMENT_BYTES[self.element_type] != len(self.data):
            raise ValueError(f"tensor of shape {self.shape} with {len(self.data)} bytes")


# --- what a prompt is made of -------------------------------------------------------------------


class Ids(msgspec.Struct, frozen=True, tag="ids"):
    """Token ids of the stage's vocabulary (for the Talker: codec codes)."""

    ids: tuple[int, ...]


class Rows(msgspec.Struct, frozen=True, tag="rows"):
    """Rows [n, hidden] of the Thinker's embedding space, made by the encoder."""

    rows: Tensor


class Condition(msgspec.Struct, frozen=True, tag="condition"):
    """Talker input: text ids [n] and the Thinker's hidden rows [n, hidden] of those very tokens.

    Takes n + 1 positions of the Talker: one per token and the audio_bos row that closes it.
    """

    ids: tuple[int, ...]
    hidden: Tensor


ThinkerPart = Ids | Rows
TalkerPart = Ids | Condition


# --- encoder ------------------------------------------------------------------------------------


class EncoderOpen(msgspec.Struct, frozen=True, tag="encoder.open"):
    """Start (or replace) a session's streaming encoder state, empty.

    start_samples: offset, in samples of this session's encoder input, of the first PCM that will be
    fed: 0 for a new session, the last `EncoderRows.reset_mark_samples` for a restore (then PCM from
    there on is fed with `discard`, the first feed of 16,560 + 16,000 * n samples as in a new one).
    """

    session: str
    start_samples: int


class EncoderFeed(msgspec.Struct, frozen=True, tag="encoder.feed"):
    """One append. `pcm_s16le` is mono 16 kHz, whole samples; the first append of a session has been
    left-padded by framing to 16,560 samples. `frames` are JPEG or PNG images as received; the
    image blocks (source and slices) of each frame are decided by `model.minicpmo45.framing`, which
    cuts none into slices without `high_resolution`."""

    session: str
    unit: int
    pcm_s16le: bytes
    frames: tuple[bytes, ...]
    high_resolution: bool
    discard: bool
    """True while restoring from recorded PCM: state advances, no rows are returned."""


class EncoderRows(msgspec.Struct, frozen=True):
    """Rows in KV order. audio: [10 * chunks, hidden]; vision: [64, hidden] per image block.

    encoder_reset: the audio cache was dropped before this append (position table full).
    reset_mark_samples: offset, in samples of this session's encoder input, from which a restore has
    to replay PCM to reach the present state.
    """

    unit: int
    audio: Tensor
    vision: tuple[Tensor, ...]
    encoder_reset: bool
    reset_mark_samples: int


class EncoderReference(msgspec.Struct, frozen=True, tag="encoder.reference"):
    """Rows of a voice's reference clip for the context of a session that opens with it."""

    voice: str


class ReferenceRows(msgspec.Struct, frozen=True):
    """rows: [samples // 1,600, hidden]."""

    rows: Tensor


class EncoderClose(msgspec.Struct, frozen=True, tag="encoder.close"):
    session: str


# --- Thinker ------------------------------------------------------------------------------------


class ThinkerFeed(msgspec.Struct, frozen=True, tag="thinker.feed"):
    """One append for a stream. A stream is one resumable engine request; a rebuild opens a new one.

    opens: this is the first append of `stream` and `parts` is the whole rendered prompt.
    position: number of positions the stream holds before `parts` (0 when it opens).
    rules: msgpack of `model.minicpmo45.decode.UnitRules`, opaque to the transport.
    """

    session: str
    stream: str
    unit: int
    opens: bool
    position: int
    parts: tuple[ThinkerPart, ...]
    rules: bytes


class ThinkerAnswer(msgspec.Struct, frozen=True):
    """What the Thinker answered to one append.

    emitted_ids: as fed back, terminator (if any) last. sampled_ids: what was sampled at each step
    before the 28-character rule and the listen rule replaced it; same length.
    hidden: [len(emitted_ids) - 1, hidden]; row k is the final hidden state after feeding
    emitted_ids[k] (the last token is not fed in its own unit).
    engine_ms: time from submission to the last token.
    decision_row: [1, hidden], the final hidden state of the prompt's last position, from which the
    unit's first token is decided; None unless the stage is told to hand it out.
    """

    session: str
    stream: str
    unit: int
    emitted_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    hidden: Tensor
    engine_ms: float
    decision_row: Tensor | None = None


class ThinkerClose(msgspec.Struct, frozen=True, tag="thinker.close"):
    stream: str


# --- Talker -------------------------------------------------------------------------------------


class TalkerFeed(msgspec.Struct, frozen=True, tag="talker.feed"):
    """One condition for a Talker stream; `parts` is [condition] to extend, or, when `opens`, the
    whole prompt: [condition] or [previous condition, its codes, condition].

    rules: msgpack of `model.minicpmo45.talker.UnitRules` (kind, recent codes, seed, sampling).
    """

    session: str
    stream: str
    unit: int
    opens: bool
    position: int
    parts: tuple[TalkerPart, ...]
    rules: bytes


class TalkerAnswer(msgspec.Struct, frozen=True):
    """Codec codes of the unit without the end code."""

    session: str
    stream: str
    unit: int
    codes: tuple[int, ...]
    engine_ms: float


class TalkerClose(msgspec.Struct, frozen=True, tag="talker.close"):
    stream: str


# --- Code2Wav -----------------------------------------------------------------------------------


class WaveOpen(msgspec.Struct, frozen=True, tag="wave.open"):
    """Start an epoch of a session's vocoder stream. Idempotent: the same (session, epoch) again is
    accepted while no chunk of it has been vocoded. An older epoch is refused."""

    session: str
    epoch: int
    voice: str


class WaveFeed(msgspec.Struct, frozen=True, tag="wave.feed"):
    """One chunk: `codes` = 3 codes of left context + new codes; `code_count` is authoritative
    (0 = a sequence number without sound). Sequences of an epoch are exactly 0, 1, 2, ..."""

    session: str
    epoch: int
    sequence: int
    turn: int
    unit: int
    codes: tuple[int, ...]
    code_count: int
    last_chunk: bool
    seed: str


class WaveSamples(msgspec.Struct, frozen=True):
    """24 kHz mono samples of one chunk, s16le."""

    session: str
    epoch: int
    sequence: int
    pcm_s16le: bytes
    engine_ms: float


class WaveClose(msgspec.Struct, frozen=True, tag="wave.close"):
    session: str


# --- every stage --------------------------------------------------------------------------------


class Health(msgspec.Struct, frozen=True, tag="health"):
    """Asks a stage whether it serves."""


class HealthReport(msgspec.Struct, frozen=True):
    """A stage answers only when its model is loaded and has run once.

    limits: numbers that the sidecar has to respect, for example max_model_len, hidden_size.
    streams: streams (Thinker, Talker) or sessions (encoder, Code2Wav) that it holds now.
    """

    stage: str
    limits: dict[str, int]
    streams: tuple[str, ...]


Request = (
    EncoderOpen
    | EncoderFeed
    | EncoderReference
    | EncoderClose
    | ThinkerFeed
    | ThinkerClose
    | TalkerFeed
    | TalkerClose
    | WaveOpen
    | WaveFeed
    | WaveClose
    | Health
)


class Done(msgspec.Struct, frozen=True):
    """Answer of verbs that return nothing."""
