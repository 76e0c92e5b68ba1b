"""Stages that die, stall or refuse in mid-conversation: no token changes, nothing is said twice."""

import random
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.records import Redo
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed
from duplex_sidecar.session.catching_up import FULL_CHUNKS
from duplex_sidecar.stages.envelope import Condition, Ids, TalkerFeed
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    frames_of,
    replica,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.fault
UNITS = 60


def no_frames(_: int) -> tuple[bytes, ...]:
    return ()


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url) as here:
        yield here


async def through(
    here: Replica,
    session: str,
    terms: Terms,
    frames: Callable[[int], tuple[bytes, ...]] = no_frames,
    units: int = UNITS,
) -> Caller:
    """A whole conversation, whatever happens on the way."""
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    await caller.dial(here)
    await caller.talk(units)
    check_events(caller)
    return caller


# --- Thinker --------------------------------------------------------------------------------------

THINKER_LOSSES = (
    (StageFault.GONE, False),
    (StageFault.GONE, True),
    (StageFault.UNKNOWN_STREAM, False),
    (StageFault.TIMEOUT, True),
    (StageFault.ROWS_LOST, True),
)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
async def test_a_lost_thinker_costs_no_token(
    valkey: EmbeddedValkey, here: Replica, mode: Mode, camera: bool
) -> None:
    session = f"thinker-{mode}-{camera}"
    terms = with_camera(Terms(mode)) if camera else Terms(mode)
    frames = frames_of if camera else no_frames
    calm, undisturbed_call = await undisturbed(
        valkey.url, f"calm-{session}", terms, UNITS, frames=frames
    )
    chance = random.Random(session)
    lost = {unit: chance.choice(THINKER_LOSSES) for unit in chance.sample(range(1, UNITS + 1), 20)}
    for unit, (fault, after) in lost.items():
        here.stages.thinker.fail(unit, fault, after=after)
    caller = await through(here, session, terms, frames)
    assert await tokens(here.ledger, session) == calm
    check_prompts([here.stages], session, terms, calm, caller, frames)

    # A rebuild is none of the voice's business: the same sound, in the same epochs.
    assert sound_of(caller) == sound_of(undisturbed_call)
    for unit in caller.units:
        if unit.unit in lost and unit.unit > 1:
            assert unit.rebuild_cause in ("slide", "engine_restart")
            assert unit.rebuild_cause == "engine_restart" or mode != "off"
    redone = [
        entry.record
        for entry in (await here.ledger.load(session)).entries
        if isinstance(entry.record, Redo)
    ]
    assert sorted({redo.seq for redo in redone}) == sorted(lost)
    assert {redo.attempt for redo in redone} == {2}


def sound_of(caller: Caller) -> list[object]:
    return [event.body for event in caller.sequenced if isinstance(event.body, Audio)]


async def test_a_stream_lost_between_units_is_rebuilt_and_said_so(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-between", Terms("context"), 12)
    await here.open("between", Terms("context"))
    caller = Caller("between")
    await caller.dial(here)
    await caller.talk(3)
    here.stages.thinker.kill()
    await here.stages.thinker.health()
    await caller.talk(5)
    assert [unit.rebuild_cause for unit in caller.units] == [None] * 3 + ["engine_restart", None]
    await caller.talk(12)
    assert await tokens(here.ledger, "between") == calm


async def test_a_stream_lost_between_plan_and_submission_is_planned_anew(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-plan", Terms("off"), 10)
    await here.open("plan", Terms("off"))
    caller = Caller("plan")
    await caller.dial(here)
    await caller.talk(4)
    accept = here.ledger.accept

    async def lose_the_thinker(*args: Any, **rest: Any) -> Any:
        here.stages.thinker.kill()
        await here.stages.thinker.health()
        return await accept(*args, **rest)

    monkeypatch.setattr(here.ledger, "accept", lose_the_thinker)
    await caller.talk(5)
    monkeypatch.undo()
    await caller.talk(10)
    assert await tokens(here.ledger, "plan") == calm
    assert [unit.rebuild_cause for unit in caller.units] == [None] * 4 + ["engine_restart"] + (
        [None] * 5
    )
    fifth = (await here.ledger.load("plan")).committed[4]
    assert (fifth.plan.action, fifth.plan.cause) == ("rebuild", "engine_restart")


async def test_a_unit_that_no_thinker_survives_ends_its_session_alone(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-beside", Terms("basic"), 30, voice=5)
    await here.open("doomed", Terms("context"))
    await here.open("beside", Terms("basic"))
    doomed, beside = Caller("doomed"), Caller("beside", voice=5)
    await doomed.dial(here)
    await beside.dial(here)
    await beside.talk(12)
    here.stages.thinker.fail(10, StageFault.GONE, times=2)
    await doomed.say(12)
    closed = await doomed.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.UNIT_FAILED
    assert len(doomed.units) == 9
    loaded = await here.ledger.load("doomed")
    assert (loaded.head.committed_seq, loaded.head.open_seq) == (9, 10)
    assert loaded.meta.reason == ErrorCode.UNIT_FAILED
    await beside.talk(30)
    check_events(beside)
    assert await tokens(here.ledger, "beside") == calm


# --- encoder --------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_lost_encoder_is_restored_wherever_it_was(
    valkey: EmbeddedValkey, here: Replica, after: bool
) -> None:
    """At every second of the first 40; a restore replays no more than the mel buffer and the cache
    hold."""
    session = f"encoder-{after}"
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", Terms("context"), 40)
    for unit in range(1, 41):
        here.stages.encoder.fail(unit, StageFault.GONE, after=after)
    caller = await through(here, session, Terms("context"), units=40)
    assert await tokens(here.ledger, session) == calm
    check_prompts([here.stages], session, Terms("context"), calm, caller)
    replayed = here.stages.encoder.replayed_samples
    assert len(replayed) == 39
    assert max(replayed) <= 16_560 + 16_000 * 9


@pytest.mark.parametrize("fault", [StageFault.TIMEOUT, StageFault.UNKNOWN_STREAM])
async def test_an_encoder_that_answers_nothing_is_restored(
    valkey: EmbeddedValkey, here: Replica, fault: StageFault
) -> None:
    session = f"silent-{fault}"
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", Terms("off"), 20)
    for unit in (1, 7, 8, 9, 15):
        here.stages.encoder.fail(unit, fault, after=True)
    await through(here, session, Terms("off"), units=20)
    assert await tokens(here.ledger, session) == calm


async def test_an_encoder_that_refuses_ends_the_session(here: Replica) -> None:
    await here.open("refused", Terms("context"))
    caller = Caller("refused")
    await caller.dial(here)
    here.stages.encoder.fail(4, StageFault.INTERNAL)
    await caller.say(5)
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert (closed.code, closed.detail) == (ErrorCode.UNIT_FAILED, "encoder: internal")
    assert (await here.ledger.load("refused")).head.committed_seq == 3


# --- Talker ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_lost_talker_goes_on_from_the_condition_before(
    valkey: EmbeddedValkey, here: Replica, after: bool
) -> None:
    session = f"talker-{after}"
    terms = Terms("context")
    calm, calm_call = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS)
    for unit in range(2, UNITS, 3):
        here.stages.talker.fail(unit, StageFault.GONE, after=after)
    caller = await through(here, session, terms)
    assert await tokens(here.ledger, session) == calm
    assert [unit.rebuild_cause for unit in caller.units] == [
        unit.rebuild_cause for unit in calm_call.units
    ]
    assert [unit.epoch for unit in caller.units] == [unit.epoch for unit in calm_call.units]
    check_stage2(here.stages, session)
    recomputed = [feed for feed in here.stages.talker.feeds if feed.opens and len(feed.parts) == 3]
    assert recomputed, "some of the losses were in mid-turn"
    for feed in recomputed:
        assert recomputes(feed, here.stages.talker.feeds)


def recomputes(feed: TalkerFeed, feeds: list[TalkerFeed]) -> bool:
    """Its prompt is the last condition, the codes it got, the present one."""
    before, codes, _ = feed.parts
    earlier = [one for one in feeds if one.unit < feed.unit]
    return (
        isinstance(before, Condition) and isinstance(codes, Ids) and earlier[-1].parts[-1] == before
    )


async def test_a_talker_that_dies_again_and_again_ends_the_session(here: Replica) -> None:
    await here.open("mute", Terms("context"))
    caller = Caller("mute")
    await caller.dial(here)
    for unit in range(1, UNITS):
        here.stages.talker.fail(unit, StageFault.GONE, times=2)
    await caller.say(UNITS)
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert (closed.code, closed.detail) == (ErrorCode.UNIT_FAILED, "talker: gone")
    loaded = await here.ledger.load("mute")
    assert loaded.head.open_seq is None, "the unit's answer is durable, though it is not spoken"
    assert loaded.head.committed_seq == len(caller.units) + 1


# --- Code2Wav -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "after"),
    [
        (StageFault.GONE, False),
        (StageFault.GONE, True),
        (StageFault.OUT_OF_ORDER, False),
        (StageFault.TIMEOUT, True),
        (StageFault.UNKNOWN_STREAM, False),
    ],
)
async def test_a_lost_vocoder_stream_begins_a_new_epoch(
    valkey: EmbeddedValkey, here: Replica, fault: StageFault, after: bool
) -> None:
    session = f"vocoder-{fault}-{after}"
    terms = Terms("context")
    calm, calm_call = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS)
    spoken = [unit.unit for unit in calm_call.units if unit.audio_samples]
    for unit in spoken[1::4]:
        here.stages.code2wav.fail(unit, fault, after=after)
    caller = await through(here, session, terms)
    assert await tokens(here.ledger, session) == calm
    check_stage2(here.stages, session)
    assert caller.units[-1].epoch >= calm_call.units[-1].epoch + len(spoken[1::4])
    assert [unit.unit for unit in caller.units if unit.audio_samples] == spoken
    same_sound(calm_call, caller)


def same_sound(calm: Caller, caller: Caller) -> None:
    """No syllable is missing and none repeated: of each turn all samples are there. Turns that are
    not too long to be caught up whole are the undisturbed ones, sample by sample."""
    expected, heard = turns_of(calm), turns_of(caller)
    assert {turn: len(b"".join(pcm)) for turn, pcm in heard.items()} == {
        turn: len(b"".join(pcm)) for turn, pcm in expected.items()
    }
    short = [turn for turn, pcm in heard.items() if len(pcm) <= FULL_CHUNKS]
    assert len(short) > 3
    for turn in short:
        assert heard[turn] == expected[turn], f"turn {turn}"


def turns_of(caller: Caller) -> dict[int, list[bytes]]:
    turns: dict[int, list[bytes]] = {}
    for event in caller.sequenced:
        if isinstance(event.body, Audio):
            turns.setdefault(event.body.turn, []).append(event.body.pcm_s16le)
    return turns


async def test_a_vocoder_lost_between_units(valkey: EmbeddedValkey, here: Replica) -> None:
    terms = Terms("context")
    calm, calm_call = await undisturbed(valkey.url, "calm-gone", terms, UNITS)
    await here.open("gone", terms)
    caller = Caller("gone")
    await caller.dial(here)
    for unit in range(1, UNITS + 1):
        await caller.talk(unit)
        if unit % 5 == 0:
            here.stages.code2wav.kill()
            await here.stages.code2wav.health()
    check_events(caller)
    assert await tokens(here.ledger, "gone") == calm
    check_stage2(here.stages, "gone")
    same_sound(calm_call, caller)
    assert caller.units[-1].epoch > calm_call.units[-1].epoch


# --- all at once ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
async def test_anything_may_be_lost_at_any_time(
    valkey: EmbeddedValkey, here: Replica, seed: int
) -> None:
    mode = MODES[seed % 3]
    session = f"storm-{seed}"
    terms, frames = with_camera(Terms(mode)), frames_of
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS, frames=frames)
    chance = random.Random(seed)
    stages = here.stages
    for unit in range(1, UNITS + 1):
        for stage in (stages.encoder, stages.thinker, stages.talker, stages.code2wav):
            if chance.random() < 0.3:
                fault = chance.choice([StageFault.GONE, StageFault.UNKNOWN_STREAM])
                stage.fail(unit, fault, after=chance.random() < 0.5)
    caller = await through(here, session, terms, frames)
    assert await tokens(here.ledger, session) == calm
    check_prompts([stages], session, terms, calm, caller, frames)
    check_stage2(stages, session)
    closed = await caller.close()
    assert closed.code is ErrorCode.SESSION_ENDED
    assert stages.held() == []
