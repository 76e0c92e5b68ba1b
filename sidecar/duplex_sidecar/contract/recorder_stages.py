"""Writes tapes: stages that note every call of a session and its answer, and pass both on.

They stand between a session and its stages, where nothing of the session's planning is known. The
session does not notice them, also when a tape cannot be written any more.
"""

import logging
import os
from pathlib import Path

import msgspec

from duplex_sidecar.contract.recorder_tape import (
    MAX_TAPE_BYTES,
    SCHEMA,
    TAPE_SUFFIX,
    ConditionOf,
    Cut,
    EncoderFed,
    Entry,
    Fault,
    Opening,
    RowsOf,
    TalkerFed,
    TalkerPart,
    ThinkerAnswered,
    ThinkerFed,
    ThinkerPart,
    WaveFed,
    WindowTerms,
    digest,
    encode_entry,
    row_digests,
)
from duplex_sidecar.contract.vocabulary_file import VOCABULARY_NAME, encode_vocabulary
from duplex_sidecar.framing.errors import FramingError
from duplex_sidecar.framing.frames import read_frame
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.model.minicpmo45.constants import (
    AUDIO_POSITIONS_PER_CHUNK,
    FIRST_CHUNK_SAMPLES,
    UNIT_SAMPLES,
)
from duplex_sidecar.model.minicpmo45.talker import decode_rules
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.stages import envelope
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.stages.interface import (
    Code2WavStage,
    EncoderStage,
    TalkerStage,
    ThinkerStage,
)

log = logging.getLogger(__name__)

SAMPLE_BYTES = 2
FIRST_PADDING_SAMPLES = FIRST_CHUNK_SAMPLES - UNIT_SAMPLES


class Recorder:
    """One folder of tapes, with the vocabulary that their ids are of."""

    def __init__(self, folder: Path, vocabulary: Vocabulary, max_talker_tokens: int) -> None:
        """Makes the folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        (folder / VOCABULARY_NAME).write_bytes(encode_vocabulary(vocabulary))
        self._folder = folder
        self._max_talker_tokens = max_talker_tokens

    def stages_of(self, facts: SessionFacts, lease: Lease, stages: StageSet) -> StageSet:
        """The session's stages with a tape before them."""
        opening = Opening(
            schema=SCHEMA,
            session=facts.session,
            replica=lease.replica,
            fence=lease.fence,
            prefix_ids=facts.prompt.prefix_ids,
            suffix_ids=facts.prompt.suffix_ids,
            marker_ids=facts.prompt.marker_ids,
            reference_positions=facts.prompt.reference_positions,
            window=WindowTerms(
                mode=facts.policy.mode,
                basic_high=facts.policy.basic_high_tokens,
                basic_low=facts.policy.basic_low_tokens,
                context_previous_max=facts.policy.context_previous_max_tokens,
                context_max_units=facts.policy.context_max_units,
                hysteresis_units=facts.hysteresis_units,
                boundary=facts.boundary,
            ),
            max_model_tokens=facts.limits.max_model_tokens,
            max_talker_tokens=self._max_talker_tokens,
        )
        tape = _Tape(self._folder / f"{facts.session}.{lease.fence}{TAPE_SUFFIX}", opening)
        return StageSet(
            encoder=_Encoder(stages.encoder, tape),
            thinker=_Thinker(stages.thinker, tape),
            talker=_Talker(stages.talker, tape),
            code2wav=_Code2Wav(stages.code2wav, tape),
            thinker_spare=stages.thinker_spare,
            talker_spare=stages.talker_spare,
            redo_gates=stages.redo_gates,
        )


class _Tape:
    """Appends entries, each at once: a killed sidecar leaves what has passed, and an ended session
    no open file."""

    def __init__(self, path: Path, opening: Opening) -> None:
        self._path = path
        self._bytes = 0
        self._writes = True
        try:
            os.close(os.open(path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600))
        except OSError as error:
            self._give_up(error)
        self.note(opening)

    def note(self, entry: Entry) -> None:
        if not self._writes:
            return
        if self._bytes >= MAX_TAPE_BYTES:
            self._writes, entry = False, Cut(self._bytes)
        line = encode_entry(entry) + b"\n"
        try:
            with self._path.open("ab", buffering=0) as file:
                file.write(line)
        except OSError as error:
            self._give_up(error)
        self._bytes += len(line)

    def _give_up(self, error: OSError) -> None:
        self._writes = False
        log.error("the tape of this session ends here: %s", error.strerror)


class _Encoder:
    def __init__(self, stage: EncoderStage, tape: _Tape) -> None:
        self._stage = stage
        self._tape = tape

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> envelope.HealthReport:
        return await self._stage.health()

    async def open(self, request: envelope.EncoderOpen) -> None:
        await self._stage.open(request)

    async def feed(self, request: envelope.EncoderFeed) -> envelope.EncoderRows:
        samples = len(request.pcm_s16le) // SAMPLE_BYTES
        entry = EncoderFed(
            unit=request.unit,
            samples=samples,
            padding_samples=_padding(request.pcm_s16le) if samples == FIRST_CHUNK_SAMPLES else 0,
            frames=tuple(_size(frame) for frame in request.frames),
            high_resolution=request.high_resolution,
            discard=request.discard,
            generation=self._stage.generation,
            rows=(),
            fault=None,
        )
        try:
            rows = await self._stage.feed(request)
        except StageError as error:
            self._tape.note(msgspec.structs.replace(entry, fault=_fault(error)))
            raise
        self._tape.note(msgspec.structs.replace(entry, rows=_encoded(rows)))
        return rows

    async def reference(self, request: envelope.EncoderReference) -> envelope.ReferenceRows:
        return await self._stage.reference(request)

    async def close(self, request: envelope.EncoderClose) -> None:
        await self._stage.close(request)


class _Thinker:
    def __init__(self, stage: ThinkerStage, tape: _Tape) -> None:
        self._stage = stage
        self._tape = tape

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> envelope.HealthReport:
        return await self._stage.health()

    async def feed(self, request: envelope.ThinkerFeed) -> envelope.ThinkerAnswer:
        entry = ThinkerFed(
            unit=request.unit,
            stream=request.stream,
            opens=request.opens,
            position=request.position,
            parts=tuple(map(_thinker_part, request.parts)),
            generation=self._stage.generation,
            answer=None,
            fault=None,
        )
        try:
            answer = await self._stage.feed(request)
        except StageError as error:
            self._tape.note(msgspec.structs.replace(entry, fault=_fault(error)))
            raise
        answered = ThinkerAnswered(
            answer.emitted_ids, answer.sampled_ids, row_digests(answer.hidden)
        )
        self._tape.note(msgspec.structs.replace(entry, answer=answered))
        return answer

    async def close(self, request: envelope.ThinkerClose) -> None:
        await self._stage.close(request)


class _Talker:
    def __init__(self, stage: TalkerStage, tape: _Tape) -> None:
        self._stage = stage
        self._tape = tape

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> envelope.HealthReport:
        return await self._stage.health()

    async def feed(self, request: envelope.TalkerFeed) -> envelope.TalkerAnswer:
        rules = decode_rules(request.rules)
        entry = TalkerFed(
            unit=request.unit,
            stream=request.stream,
            opens=request.opens,
            position=request.position,
            parts=tuple(map(_talker_part, request.parts)),
            kind=rules.kind,
            recent_codes=rules.recent_codes,
            generation=self._stage.generation,
            codes=None,
            fault=None,
        )
        try:
            answer = await self._stage.feed(request)
        except StageError as error:
            self._tape.note(msgspec.structs.replace(entry, fault=_fault(error)))
            raise
        self._tape.note(msgspec.structs.replace(entry, codes=answer.codes))
        return answer

    async def close(self, request: envelope.TalkerClose) -> None:
        await self._stage.close(request)


class _Code2Wav:
    def __init__(self, stage: Code2WavStage, tape: _Tape) -> None:
        self._stage = stage
        self._tape = tape

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> envelope.HealthReport:
        return await self._stage.health()

    async def open(self, request: envelope.WaveOpen) -> None:
        await self._stage.open(request)

    async def feed(self, request: envelope.WaveFeed) -> envelope.WaveSamples:
        entry = WaveFed(
            unit=request.unit,
            turn=request.turn,
            epoch=request.epoch,
            sequence=request.sequence,
            codes=request.codes,
            code_count=request.code_count,
            last_chunk=request.last_chunk,
            generation=self._stage.generation,
            samples=None,
            fault=None,
        )
        try:
            samples = await self._stage.feed(request)
        except StageError as error:
            self._tape.note(msgspec.structs.replace(entry, fault=_fault(error)))
            raise
        given = len(samples.pcm_s16le) // SAMPLE_BYTES
        self._tape.note(msgspec.structs.replace(entry, samples=given))
        return samples

    async def close(self, request: envelope.WaveClose) -> None:
        await self._stage.close(request)


def _fault(error: StageError) -> Fault:
    return Fault(error.fault, error.reason)


def _padding(pcm_s16le: bytes) -> int:
    """Zero samples at the head, as far as framing sets them there."""
    head = pcm_s16le[: SAMPLE_BYTES * FIRST_PADDING_SAMPLES]
    return (len(head) - len(head.lstrip(b"\0"))) // SAMPLE_BYTES


def _size(frame: bytes) -> tuple[int, int]:
    try:
        size = read_frame(frame).size
    except FramingError:
        return 0, 0
    return size.width, size.height


def _encoded(rows: envelope.EncoderRows) -> tuple[RowsOf, ...]:
    """Image blocks, then each chunk of audio, as they stand in a prompt."""
    count = rows.audio.shape[0] // AUDIO_POSITIONS_PER_CHUNK
    size = len(rows.audio.data) // max(1, count)
    chunks = [rows.audio.data[size * chunk : size * (chunk + 1)] for chunk in range(count)]
    return (
        *(RowsOf(block.shape[0], digest(block.data)) for block in rows.vision),
        *(RowsOf(AUDIO_POSITIONS_PER_CHUNK, digest(chunk)) for chunk in chunks),
    )


def _thinker_part(part: envelope.ThinkerPart) -> ThinkerPart:
    if isinstance(part, envelope.Ids):
        return part.ids
    return RowsOf(part.rows.shape[0], digest(part.rows.data))


def _talker_part(part: envelope.TalkerPart) -> TalkerPart:
    if isinstance(part, envelope.Ids):
        return part.ids
    return ConditionOf(part.ids, row_digests(part.hidden))
