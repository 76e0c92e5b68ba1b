"""Whole conversations over fake stages and a real Valkey: what is fed, said, recorded and heard."""

import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.commands import AppendInput, ClearInput
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Closed, InputCleared
from duplex_sidecar.session.actor import SessionActor
from duplex_sidecar.session.rows import RetainedUnits

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_encoder import BROKEN_FRAME
from fake_thinker import FakeThinker
from session_kit import (
    MODEL,
    MODES,
    RATE_HZ,
    VOCABULARY,
    WORD_IDS,
    Caller,
    Mode,
    Replica,
    Stages,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    eventually,
    frames_of,
    png,
    replica,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.integration
UNITS = 60
Frames = Callable[[int], tuple[bytes, ...]]


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url) as here:
        yield here


def no_frames(_: int) -> tuple[bytes, ...]:
    return ()


def large_frames(number: int) -> tuple[bytes, ...]:
    return frames_of(number, large=number % 5 == 0)


async def called(here: Replica, session: str, terms: Terms, frames: Frames = no_frames) -> Caller:
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    await caller.dial(here)
    return caller


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
async def test_a_conversation_of_a_minute(
    here: Replica, mode: Mode, camera: bool, greedy: bool
) -> None:
    session = f"minute-{mode}-{camera}-{greedy}"
    terms = Terms(mode, greedy=greedy)
    frames = large_frames if camera else no_frames
    caller = await called(here, session, with_camera(terms) if camera else terms, frames)
    terms = with_camera(terms) if camera else terms
    await caller.talk(UNITS)
    check_events(caller)
    said = await tokens(here.ledger, session)
    assert len(said) == len(caller.units) == UNITS
    submissions = check_prompts([here.stages], session, terms, said, caller, frames)

    assert caller.failures == []
    assert [one.unit for one in submissions] == list(range(1, UNITS + 1)), "one submission a unit"
    slides = [unit for unit in caller.units if unit.rebuild_cause is not None]
    assert {unit.rebuild_cause for unit in slides} == (set() if mode == "off" else {"slide"})
    assert [one.unit for one in submissions if one.opened] == [1, *(unit.unit for unit in slides)]
    assert len(slides) >= {"off": 0, "basic": 4, "context": UNITS - terms.max_units - 1}[mode]
    assert len({one.decision for one in caller.units}) == 2, "it listens and it speaks"
    assert caller.units[-1].turn >= 4

    # A window slide never begins an epoch; the end of a turn always does.
    epochs = check_stage2(here.stages, session)
    assert epochs == list(range(len(epochs)))
    assert len(epochs) in (caller.units[-1].turn, caller.units[-1].turn + 1)
    assert (await caller.close()).code is ErrorCode.SESSION_ENDED
    assert here.stages.held() == []


@pytest.mark.parametrize("mode", ["basic", "context"])
@pytest.mark.parametrize(
    ("hysteresis", "boundary"), [(1, "turn"), (3, "unit"), (2, "sentence"), (4, "turn")]
)
async def test_windows_that_slide_rarely_or_at_boundaries(
    here: Replica, mode: Mode, hysteresis: int, boundary: Literal["unit", "sentence", "turn"]
) -> None:
    session = f"slides-{mode}-{hysteresis}-{boundary}"
    terms = Terms(mode, max_units=9, hysteresis=hysteresis, boundary=boundary)
    caller = await called(here, session, terms)
    await caller.talk(2 * UNITS)
    check_events(caller)
    said = await tokens(here.ledger, session)
    check_prompts([here.stages], session, terms, said, caller)
    dropped = [unit.dropped_units for unit in caller.units if unit.dropped_units]
    assert min(dropped) >= hysteresis
    assert len(set(dropped)) > (0 if boundary == "unit" else 1)


async def test_what_a_session_leaves_behind_is_nothing_but_its_ledger(here: Replica) -> None:
    caller = await called(here, "leaves", Terms("context"))
    await caller.talk(10)
    await caller.close()
    await eventually(lambda: not here.registry.live)
    assert here.registry.free_slots == 4
    meta = await here.ledger.reader.meta("leaves")
    assert meta is not None
    assert (meta.phase, meta.reason, meta.nonce) == (Phase.ENDED, ErrorCode.SESSION_ENDED, "")
    loaded = await here.ledger.load("leaves")
    assert loaded.closed is not None


@pytest.mark.parametrize("mode", MODES)
async def test_memory_between_units(here: Replica, mode: Mode) -> None:
    """`off` keeps no rows and no history at all, the others what their window holds."""
    terms = Terms(mode)
    caller = await called(here, f"memory-{mode}", terms)
    actor = here.registry.live[f"memory-{mode}"]
    most = 0
    for unit in range(1, UNITS + 1):
        await caller.talk(unit)
        retained = retained_of(actor)
        kept = len(actor.conversation.window.units) + 1
        assert (len(retained), retained.held_bytes) == (
            (0, 0) if mode == "off" else (kept, 160 * kept)
        )
        most = max(most, kept)
    assert most <= {"off": 1, "basic": 25, "context": terms.max_units + 1}[mode]


def retained_of(actor: SessionActor) -> RetainedUnits:
    return actor.runner._retained


async def test_two_sessions_side_by_side_say_what_each_says_alone(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    calls = [("left", Terms("context"), 1), ("right", Terms("basic"), 2)]
    alone = [
        (await undisturbed(valkey.url, f"alone-{session}", terms, UNITS, voice=voice))[0]
        for session, terms, voice in calls
    ]
    callers = [Caller(session, voice=voice) for session, _, voice in calls]
    for (session, terms, _), caller in zip(calls, callers, strict=True):
        await here.open(session, terms)
        await caller.dial(here)
    for unit in range(1, UNITS + 1):
        for caller in callers:
            await caller.say(unit)
    for caller in callers:
        await caller.until_unit(UNITS)
        check_events(caller)
    assert [await tokens(here.ledger, session) for session, _, _ in calls] == alone
    assert alone[0] != alone[1]


async def test_an_overflow_ends_that_session_and_no_other(valkey: EmbeddedValkey) -> None:
    other, _ = await undisturbed(valkey.url, "calm-other", Terms("context"), UNITS, voice=3)
    small = replace(MODEL, max_model_tokens=400)
    async with replica(valkey.url, model=small) as here:
        await here.open("full", Terms("off"))
        await here.open("other", Terms("context"))
        full, beside = Caller("full"), Caller("other", voice=3)
        await full.dial(here)
        await beside.dial(here)
        for unit in range(1, UNITS + 1):
            await beside.talk(unit)
            if here.registry.live.get("full") is not None:
                await full.say(unit)
        closed = await full.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        assert full.failures[-1].code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
        check_events(full)
        done = len(full.units)
        assert full.units[-1].window_tokens + full.units[-1].tokens - 1 + 13 + 1 > 400
        assert max(unit.window_tokens for unit in full.units) + 1 <= 400
        # The refused append has entered nothing: the ledger ends with the last unit.
        loaded = await here.ledger.load("full")
        assert (loaded.head.committed_seq, loaded.head.open_seq) == (done, None)
        assert loaded.meta.reason == ErrorCode.CONTEXT_LENGTH_EXCEEDED
        check_events(beside)
        assert await tokens(here.ledger, "other") == other
        await eventually(lambda: here.registry.free_slots == 3)


async def test_limits_of_the_context_are_met_exactly(valkey: EmbeddedValkey) -> None:
    """limit - 1, limit, limit + 1: a prompt of so many positions needs one more for a token."""
    _, calm = await undisturbed(valkey.url, "calm-limit", Terms("off"), 30)
    at = calm.units[-1].window_tokens
    for limit, units in ((at, 29), (at + 1, 30), (at + 2, 30)):
        async with replica(valkey.url, model=replace(MODEL, max_model_tokens=limit)) as here:
            session = f"limit-{limit}"
            caller = await called(here, session, Terms("off"))
            await caller.say(40)
            await caller.until(lambda event: isinstance(event, Closed))
            assert len(caller.units) == units


async def test_a_frame_that_cannot_be_decoded_costs_itself_alone(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    broken = {3, 4, 9}

    def frames(number: int) -> tuple[bytes, ...]:
        good = (png(96, number),) if number % 2 else ()
        return (*good, png(96, 7) + BROKEN_FRAME) if number in broken else good

    def whole(number: int) -> tuple[bytes, ...]:
        return () if number in broken else frames(number)

    terms = with_camera(Terms("context"))
    calm, _ = await undisturbed(valkey.url, "calm-frames", terms, 20, frames=whole)
    caller = await called(here, "frames", terms, frames)
    await caller.talk(20)
    check_events(caller)
    assert [failure.code for failure in caller.failures] == [ErrorCode.INVALID_FRAME] * 3
    assert await tokens(here.ledger, "frames") == calm, "the sound of those seconds was kept"
    check_prompts([here.stages], "frames", terms, calm, caller, whole)


async def test_input_that_waits_is_bounded(here: Replica) -> None:
    """Frames of 3 MiB each second: what does not fit is refused whole and can be sent again."""

    def frames(number: int) -> tuple[bytes, ...]:
        return (png(96, number) + bytes(3 * 1024 * 1024),)

    terms = with_camera(Terms("context"))
    caller = await called(here, "floods", terms, frames)
    pause = here.stages.encoder.pause(1)
    await caller.say(1)
    await pause.reached.wait()
    await caller.say(8)
    await caller.attachment_takes_mail()
    assert [failure.code for failure in caller.failures] == [
        ErrorCode.INPUT_OVERFLOW,
        ErrorCode.OUT_OF_ORDER_EVENT,
    ]
    pause.go.set()
    await caller.until_unit(6)
    caller.next_second = 7
    await caller.talk(10)
    check_events(caller)
    said = await tokens(here.ledger, "floods")
    check_prompts([here.stages], "floods", terms, said, caller, frames)


async def test_a_commit_closes_the_tail_and_the_next_unit_follows(here: Replica) -> None:
    caller = await called(here, "tail", Terms("context"))
    await caller.talk(2)
    assert caller.attachment is not None
    await caller.attachment.submit(AppendInput(bytes(2 * 5000), from_sample=2 * RATE_HZ))
    await caller.commit()
    await caller.until_unit(3)
    assert caller.accepted[-1].to_sample == 2 * RATE_HZ + 5000
    await caller.attachment.submit(AppendInput(bytes(2 * 700)))
    await caller.attachment.submit(ClearInput())
    await caller.until(lambda event: isinstance(event, InputCleared))
    await caller.attachment.submit(AppendInput(bytes(2 * RATE_HZ)))
    await caller.until_unit(4)
    assert caller.accepted[-1].from_sample == 2 * RATE_HZ + 5700
    check_events(caller)


async def test_the_longest_prompt_a_stage_can_hold_is_never_passed(valkey: EmbeddedValkey) -> None:
    """The engine holds the contract's limit and 32 positions more: a unit admitted at the limit
    ends there."""
    stages = Stages(thinker=FakeThinker(VOCABULARY, WORD_IDS, max_model_len=300 + 32))
    model = replace(MODEL, max_model_tokens=300)
    async with replica(valkey.url, model=model, stages=stages) as here:
        terms = Terms("off", basic_high=200, basic_low=100)
        caller = await called(here, "longest", terms)
        await caller.say(40)
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.CONTEXT_LENGTH_EXCEEDED
