"""A tape: what really passed between one session and its stages, as JSON lines, first the opening.

A tape holds what was fed and what was answered, never what was planned: `duplex contract record`
measures the plans out of it. Rows are there as digests, so that two of them can be told apart and
found again. It holds prompts, token ids and codes: treat it as content.
"""

from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import msgspec

from duplex_sidecar.stages.envelope import ELEMENT_BYTES, Tensor

SCHEMA = 1
TAPE_SUFFIX = ".tape.jsonl"
DIGEST_BYTES = 8
MAX_TAPE_BYTES = 1 << 30


class Fault(msgspec.Struct, frozen=True):
    """A call that failed, in the stage's words."""

    fault: str
    reason: str


class WindowTerms(msgspec.Struct, frozen=True):
    """The window that the session was opened with."""

    mode: str
    basic_high: int
    basic_low: int
    context_previous_max: int
    context_max_units: int
    hysteresis_units: int
    boundary: str


class Opening(msgspec.Struct, frozen=True, kw_only=True, tag="opening"):
    """The session on one replica. fence: of its lease; a later owner has a larger one.
    max_model_tokens, max_talker_tokens: the contract's limits there. reference_positions: rows of
    the reference voice behind the prefix."""

    schema: int
    session: str
    replica: str
    fence: int
    prefix_ids: tuple[int, ...]
    suffix_ids: tuple[int, ...]
    marker_ids: tuple[int, ...]
    window: WindowTerms
    max_model_tokens: int | None
    max_talker_tokens: int
    reference_positions: int = 0


class RowsOf(msgspec.Struct, frozen=True):
    """Rows in a prompt: how many, and the digest of their bytes."""

    rows: int
    digest: str


class EncoderFed(msgspec.Struct, frozen=True, kw_only=True, tag="encoder"):
    """One append at the encoder. samples: all that were fed. padding_samples: zeros that framing
    set before a session's first samples. frames: width and height. high_resolution: whether a frame
    could be cut into slices. rows: what was answered, image
    blocks before chunks of audio."""

    unit: int
    samples: int
    padding_samples: int
    frames: tuple[tuple[int, int], ...]
    discard: bool
    generation: int
    rows: tuple[RowsOf, ...]
    fault: Fault | None
    high_resolution: bool = True


ThinkerPart = tuple[int, ...] | RowsOf


class ThinkerAnswered(msgspec.Struct, frozen=True):
    """hidden: digests of the rows, one a token but the last."""

    emitted_ids: tuple[int, ...]
    sampled_ids: tuple[int, ...]
    hidden: tuple[str, ...]


class ThinkerFed(msgspec.Struct, frozen=True, kw_only=True, tag="thinker"):
    unit: int
    stream: str
    opens: bool
    position: int
    parts: tuple[ThinkerPart, ...]
    generation: int
    answer: ThinkerAnswered | None
    fault: Fault | None


class ConditionOf(msgspec.Struct, frozen=True):
    """Tokens to speak and the digests of their hidden rows."""

    ids: tuple[int, ...]
    rows: tuple[str, ...]


TalkerPart = tuple[int, ...] | ConditionOf


class TalkerFed(msgspec.Struct, frozen=True, kw_only=True, tag="talker"):
    """kind: start, mid, end. codes: what was answered, None after a fault."""

    unit: int
    stream: str
    opens: bool
    position: int
    parts: tuple[TalkerPart, ...]
    kind: str
    recent_codes: tuple[int, ...]
    generation: int
    codes: tuple[int, ...] | None
    fault: Fault | None


class WaveFed(msgspec.Struct, frozen=True, kw_only=True, tag="wave"):
    """One chunk at the vocoder. samples: what it gave, None after a fault."""

    unit: int
    turn: int
    epoch: int
    sequence: int
    codes: tuple[int, ...]
    code_count: int
    last_chunk: bool
    generation: int
    samples: int | None
    fault: Fault | None


class Cut(msgspec.Struct, frozen=True, tag="cut"):
    """The tape ends here, the session does not: it had reached its greatest size."""

    at_bytes: int


Entry = Opening | EncoderFed | ThinkerFed | TalkerFed | WaveFed | Cut

encode_entry = msgspec.json.Encoder().encode
_decode_entry = msgspec.json.Decoder(Entry).decode


class TapeError(ValueError):
    """A file that is no tape, or tapes that do not go together."""


def read_tape(path: Path) -> list[Entry]:
    """The entries of a tape; a last line that was cut off by a killed process is left out."""
    try:
        if path.stat().st_size > 2 * MAX_TAPE_BYTES:
            raise TapeError(f"{path}: too large for a tape")
        lines = path.read_bytes().splitlines(keepends=True)
    except OSError as error:
        raise TapeError(f"{path}: {error.strerror or error}") from error
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
    entries: list[Entry] = []
    for number, line in enumerate(lines, start=1):
        try:
            entries.append(_decode_entry(line))
        except msgspec.MsgspecError as error:
            raise TapeError(f"{path}: line {number}: {error}") from error
    if not entries or not isinstance(entries[0], Opening):
        raise TapeError(f"{path}: not a tape: it does not begin with an opening")
    if entries[0].schema > SCHEMA:
        raise TapeError(f"{path}: of a newer release (schema {entries[0].schema})")
    return entries


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=DIGEST_BYTES).hexdigest()


def row_digests(tensor: Tensor) -> tuple[str, ...]:
    """One digest per row of a [n, width] tensor."""
    count, width = tensor.shape
    size = width * ELEMENT_BYTES[tensor.element_type]
    return tuple(digest(tensor.data[row * size : (row + 1) * size]) for row in range(count))


def parts_tokens(parts: Iterable[ThinkerPart]) -> int:
    """Positions of Thinker parts."""
    return sum(part.rows if isinstance(part, RowsOf) else len(part) for part in parts)
