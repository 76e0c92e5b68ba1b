"""From answers to sound and its events, unit by unit: turns, positions, epochs, marks."""

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from fake_stage import rows
from session_kit import VOCABULARY, WORD_IDS, Stages

from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.model.minicpmo45.decode import answer_facts
from duplex_sidecar.model.minicpmo45.talker import TALKER_SAMPLING
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    OPENING_STEPS,
    Audio,
    Decision,
    Sequenced,
    Transcript,
    TurnMark,
    UnitDone,
    decode_sequenced,
)
from duplex_sidecar.session.announcing import announce
from duplex_sidecar.session.conversation import (
    Speech,
    decode_speech,
    encode_speech,
    first_speech,
)
from duplex_sidecar.session.speaking import Speaker, Voiced, VoiceSettings, rows_of
from duplex_sidecar.session.streams import talker_stream
from duplex_sidecar.session.watching import UnitWatch
from duplex_sidecar.stages.envelope import ElementType, Tensor, ThinkerAnswer
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import SegmentReason
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing

pytestmark = pytest.mark.unit
SETTINGS = TelemetrySettings(replica="r")
METRICS, TRACING = Metrics(SETTINGS), Tracing(SETTINGS)
V = VOCABULARY


@dataclass
class Voice:
    """One session's voice, and all that it has announced."""

    stages: Stages
    speaker: Speaker
    speech: Speech
    events: list[Sequenced]
    batches: list[JournalBatch]

    async def unit(self, number: int, ids: tuple[int, ...]) -> Voiced:
        trace = TRACING.session("s", None, SegmentReason.OPENED).unit(number, 0, 1000.0)
        names = [b"%d:%d" % (number, k) for k in range(len(ids) - 1)]
        hidden = rows(*names) if names else Tensor(ElementType.FLOAT32, (0, 4), b"")
        answer = ThinkerAnswer("s", "s/1", number, ids, ids, hidden, 0.0)
        voiced = await self.speaker.voice(self.speech, number, answer, UnitWatch(trace, METRICS))
        batch, events, after = announce(self.speech, voiced, number, done(number, voiced, ids))
        batch.check()
        assert [decode_sequenced(event) for event in batch.events] == events
        assert decode_speech(encode_speech(after)) == after
        assert batch.voice_state == encode_speech(after)
        self.batches.append(batch)
        self.events += events
        self.speech = after
        return voiced


def done(number: int, voiced: Voiced, ids: tuple[int, ...]) -> UnitDone:
    return UnitDone(
        unit=number,
        turn=voiced.speech.turn,
        decision=Decision(answer_facts(ids, V).decision),
        tokens=len(ids),
        window_tokens=0,
        rebuild_cause=None,
        rebuild_ms=None,
        dropped_units=0,
        head=0,
        epoch=voiced.speech.epoch,
        stage2_sequence=None,
        audio_samples=sum(chunk.samples for chunk in voiced.chunks),
        wall_ms=0.0,
        stage_ms={},
        replica="r",
    )


def new_voice(stages: Stages | None = None, fence: int = 1, limit: int = 4096) -> Voice:
    stages = stages or Stages()
    stage_set = stages.as_set()
    speaker = Speaker(
        stage_set,
        talker_stream(stage_set, "s", fence),
        VoiceSettings(
            session="s",
            voice="default",
            seed=42,
            sampling=TALKER_SAMPLING,
            talker_limit=limit,
            final_prompt_token=10,
        ),
        V,
        TRACING.session("s", None, SegmentReason.OPENED),
    )
    return Voice(stages, speaker, first_speech(), [], [])


def spoken(*words: int, turn_end: bool = False) -> tuple[int, ...]:
    ids = (V.speak, *(WORD_IDS[word] for word in words))
    return (*ids, V.turn_eos, V.listen) if turn_end else (*ids, V.chunk_eos)


LISTEN = (V.listen,)


async def test_a_turn_is_framed_by_its_marks() -> None:
    voice = new_voice()
    await voice.unit(1, LISTEN)
    assert [type(event.body) for event in voice.events] == [UnitDone]
    await voice.unit(2, spoken(1, 2))
    await voice.unit(3, spoken(3))
    await voice.unit(4, spoken(4, turn_end=True))
    await voice.unit(5, LISTEN)
    bodies = [event.body for event in voice.events]
    steps = [body.step for body in bodies if isinstance(body, TurnMark)]
    assert steps == [*OPENING_STEPS, *CLOSING_STEPS]
    texts = [body.text for body in bodies if isinstance(body, Transcript)]
    assert texts == [" no and", " then", " maybe"]
    closing = [b for b in bodies if isinstance(b, TurnMark) and b.step in CLOSING_STEPS]
    assert {body.text for body in closing} == {"".join(texts)}
    sound = [body for body in bodies if isinstance(body, Audio)]
    total = sum(len(body.pcm_s16le) // 2 for body in sound)
    assert {body.samples for body in closing} == {total}
    assert [event.sequence for event in voice.events] == list(range(1, len(voice.events) + 1))
    assert voice.speech.turn == 1
    assert not voice.speech.turn_open


async def test_a_turn_that_ends_without_a_word_is_closed() -> None:
    voice = new_voice()
    await voice.unit(1, spoken(1, 2))
    voiced = await voice.unit(2, (V.turn_eos, V.listen))
    assert voiced.turn_ended
    assert [chunk.chunk.last_chunk for chunk in voiced.chunks] == [True]
    bodies = [event.body for event in voice.events]
    assert [b.step for b in bodies if isinstance(b, TurnMark)][-1] == CLOSING_STEPS[-1]
    # One more of the kind is nobody's turn.
    voiced = await voice.unit(3, (V.turn_eos, V.listen))
    assert (voiced.chunks, voiced.turn_ended) == ((), False)


@pytest.mark.parametrize("seed", range(12))
async def test_marks_and_positions_follow_each_other(seed: int) -> None:
    """Random answers; at any unit the voice may go on elsewhere, or lose a stage."""
    chance = random.Random(seed)
    voice = new_voice()
    for number in range(1, 60):
        words = [chance.randrange(len(WORD_IDS)) for _ in range(chance.randrange(1, 5))]
        kind = chance.random()
        ids = LISTEN if kind < 0.2 else spoken(*words, turn_end=kind > 0.8)
        if kind > 0.97:
            ids = (V.turn_eos, V.listen)
        fate = chance.random()
        if fate < 0.1:
            moved = new_voice(fence=number + 1)
            moved.events, moved.batches = voice.events, voice.batches
            moved.speech = decode_speech(encode_speech(voice.speech))
            voice = moved
        elif fate < 0.2:
            voice.stages.talker.fail(number, StageFault.GONE)
        elif fate < 0.3:
            fault = chance.choice([StageFault.GONE, StageFault.OUT_OF_ORDER])
            voice.stages.code2wav.fail(number, fault, after=chance.random() < 0.5)
        await voice.unit(number, ids)
    check_marks(voice.batches)
    epochs = [e.body.epoch for e in voice.events if isinstance(e.body, Audio)]
    assert epochs == sorted(epochs)


def check_marks(batches: list[JournalBatch]) -> None:
    """What the ledger checks: the marks of a turn are gapless in codes and samples."""
    turn, samples, codes, event = 0, 0, 0, 0
    for batch in batches:
        assert batch.first_seq == event + 1
        event = batch.last_seq
        assert batch.voiced_through == batch.unit
        mark = batch.mark
        if mark is None:
            continue
        if mark.turn != turn:
            assert mark.turn > turn
            turn, samples, codes = mark.turn, 0, 0
        assert (mark.from_samples, mark.code_offset) == (samples, codes)
        samples, codes = mark.to_samples, codes + len(mark.codes)
        bodies = [decode_sequenced(each).body for each in batch.events]
        sound = [body for body in bodies if isinstance(body, Audio)]
        assert sum(len(body.pcm_s16le) // 2 for body in sound) == samples - mark.from_samples
        assert (sound[0].epoch, sound[0].stage2_sequence) == (mark.epoch, mark.sequence)


async def test_a_talker_prompt_at_its_limit_is_recomputed_once() -> None:
    voice = new_voice(limit=150)
    for number in range(1, 20):
        await voice.unit(number, spoken(1, 2, 3))
    opened = [feed for feed in voice.stages.talker.feeds if feed.opens]
    assert [len(feed.parts) for feed in opened] == [1, *[3] * (len(opened) - 1)]
    between = [after.unit - before.unit for before, after in pairwise(opened)]
    assert min(between) > 1, "never on every condition"


async def test_a_stale_vocoder_of_a_lost_owner_is_left_behind() -> None:
    """Same process, same session: the epochs of the lost owner are used up there."""
    lost = new_voice()
    await lost.unit(1, spoken(1, 2))
    journaled = lost.speech
    await lost.unit(2, spoken(3, turn_end=True))
    await lost.unit(3, spoken(4, 5))
    voice = new_voice(lost.stages, fence=2)
    voice.speech = journaled
    await voice.unit(2, spoken(3, turn_end=True))
    assert voice.speech.epoch == 2


async def test_a_vocoder_that_refuses_again_ends_the_unit() -> None:
    voice = new_voice()
    voice.stages.code2wav.fail(1, StageFault.OUT_OF_ORDER, times=2)
    with pytest.raises(StageError):
        await voice.unit(1, spoken(1, 2))
    voice = new_voice()
    voice.stages.code2wav.fail(1, StageFault.REFUSED)
    with pytest.raises(StageError):
        await voice.unit(1, spoken(1, 2))


async def test_close_leaves_nothing() -> None:
    voice = new_voice()
    await voice.speaker.close()
    await voice.unit(1, spoken(1, 2))
    await voice.speaker.close()
    assert voice.stages.held() == []
    voice = new_voice()
    await voice.unit(1, spoken(1, 2))
    voice.stages.talker.kill()
    voice.stages.code2wav.kill()
    await voice.speaker.close()


def test_rows_are_taken_by_index() -> None:
    hidden = rows(b"a", b"b", b"c")
    assert rows_of(hidden, (2, 0)).data == rows(b"c", b"a").data
    assert rows_of(hidden, ()).shape == (0, 4)
