"""Sessions that change hands while they speak: the same tokens, every event once, the next owner
ready before it owns anything; and whatever comes at the wrong moment."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.session_view import LoadedSession, Phase
from duplex_sidecar.protocol.commands import TruncateReply
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed, CommandApplied
from duplex_sidecar.session import standing_by
from duplex_sidecar.session.conversation import decode_conversation
from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.session.refusals import PlacementRefused, Refusal
from duplex_sidecar.stages.envelope import EncoderClose
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODEL,
    MODES,
    VOCABULARY,
    VOICE,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    claim,
    eventually,
    frames_of,
    png,
    replica,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.integration
UNITS = 30


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here", address="10.0.0.1:8765") as started:
        yield started


@pytest.fixture
async def there(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "there", address="10.0.0.2:8765") as started:
        yield started


async def prepare(target: Replica, session: str, terms: Terms, fence: int) -> int:
    return await target.registry.prepare(session, terms.manifest(), claim(fence=fence))


async def hand_over(
    source: Replica, target: Replica, session: str, fence: int, *, grace_s: float = 0.0
) -> None:
    order = HandOver(target.name, fence)
    await source.registry.departures.hand_over(session, order, grace_s=grace_s)


async def until_moved(caller: Caller) -> None:
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert closed == Closed(ErrorCode.LEASE_LOST, "the session moves to another replica")


async def called(here: Replica, session: str, terms: Terms, units: int = 0) -> Caller:
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    if units:
        await caller.talk(units)
    return caller


async def into_a_turn(here: Replica, caller: Caller, unit: int = 0) -> int:
    """Talk until the model is in the middle of a reply; the last unit."""
    actor = here.registry.live[caller.session]
    while True:
        unit += 1
        await caller.talk(unit)
        await eventually(lambda unit=unit: actor.speech.unit == unit)
        if actor.speech.turn_open:
            return unit


def sounding_units(caller: Caller, turn: int) -> set[int]:
    heard = [event.body for event in caller.sequenced if isinstance(event.body, Audio)]
    return {audio.unit for audio in heard if audio.turn == turn}


def refusal_of(error: pytest.ExceptionInfo[PlacementRefused]) -> Refusal:
    return error.value.refusal


# --- the way --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
async def test_a_conversation_that_moves_again_and_again(
    valkey: EmbeddedValkey, here: Replica, there: Replica, mode: Mode, camera: bool
) -> None:
    session = f"moves-{mode}-{camera}"
    terms = Terms(mode, greedy=True)
    frames = frames_of if camera else lambda _: ()
    terms = with_camera(terms) if camera else terms
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS, frames=frames)
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    at, to = here, there
    await caller.dial(at)
    for fence, unit in enumerate(range(5, UNITS, 5), 2):
        # Prepared in mid-conversation; the owner goes on for some units, and the target with it.
        await caller.talk(unit - 3)
        assert await prepare(to, session, terms, fence) == unit - 3
        assert to.registry.free_slots == 3
        await caller.talk(unit)
        await hand_over(at, to, session, fence)
        await until_moved(caller)
        await eventually(lambda to=to: session in to.registry.live)
        meta = await to.ledger.reader.meta(session)
        assert meta is not None
        assert (meta.fence, meta.replica, meta.phase) == (fence, to.name, Phase.OPEN)
        opened = await caller.dial(to)
        assert (opened.next_unit, opened.acknowledged_sample) == (unit + 1, 16_000 * unit)
        await caller.talk(unit + 1)
        # The first commit of the new owner ends what the old one kept.
        await eventually(lambda at=at: (at.stages.held(), at.registry.free_slots) == ([], 4))
        at, to = to, at
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    submissions = check_prompts([here.stages, there.stages], session, terms, calm, caller, frames)
    moved = [unit for unit in caller.units if unit.rebuild_cause == "move"]
    assert [unit.unit for unit in moved] == [6, 11, 16, 21, 26]
    ahead = {
        one.stream
        for one in (*here.stages.thinker.opened_ahead, *there.stages.thinker.opened_ahead)
    }
    used = [one for one in submissions if one.unit in {unit.unit for unit in moved}]
    # How much a slide drops in `basic` depends on its append, of which only the length is foreseen.
    assert len([one for one in used if one.stream in ahead]) >= (3 if mode == "basic" else 5)
    for each in (here, there):
        check_stage2(each.stages, session)


async def test_the_target_follows_unit_by_unit(here: Replica, there: Replica) -> None:
    """What it has is extended while nothing slides, and its encoder hears each second once."""
    terms = Terms("off", voice=VOICE)
    caller = await called(here, "follows", terms, 4)
    await prepare(there, "follows", terms, 2)
    assert there.stages.encoder.replayed_samples == [16_560 + 3 * 16_000]
    for unit in range(5, 9):
        await caller.talk(unit)
        await eventually(lambda unit=unit: _seq(there, "follows") == unit)
    assert there.stages.encoder.replayed_samples[1:] == [16_000] * 4
    assert len({one.stream for one in there.stages.thinker.opened_ahead}) == 1
    assert len(there.stages.thinker.opened_ahead) == 5
    await hand_over(here, there, "follows", 2)
    await caller.dial(there)
    await caller.talk(10)
    check_events(caller)
    assert there.stages.encoder.replayed_samples[5:] == []


def _seq(there: Replica, session: str) -> int:
    prepared = there.registry._standing_by.prepared(session)
    assert prepared is not None
    return prepared.warmer.seq


async def test_the_end_of_a_turn_is_waited_for(here: Replica, there: Replica) -> None:
    terms = Terms("context")
    caller = await called(here, "waits", terms)
    unit = await into_a_turn(here, caller)
    await prepare(there, "waits", terms, 2)
    moving = asyncio.create_task(hand_over(here, there, "waits", 2, grace_s=20))
    actor = here.registry.live["waits"]
    while actor.speech.turn_open:
        unit += 1
        await caller.say(unit)
        await eventually(lambda unit=unit: actor.speech.unit == unit or actor.ending is not None)
        assert not (moving.done() and actor.speech.turn_open)
    await moving
    await until_moved(caller)
    assert not actor.speech.turn_open


async def test_in_the_middle_of_a_turn_when_it_does_not_end(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    terms = Terms("context")
    calm, _ = await undisturbed(valkey.url, "calm-middle", terms, UNITS)
    caller = await called(here, "middle", terms)
    unit = await into_a_turn(here, caller)
    await prepare(there, "middle", terms, 2)
    await hand_over(here, there, "middle", 2, grace_s=0.05)
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, "middle") == calm
    assert caller.units[unit].rebuild_cause == "move"


async def test_without_a_unit(here: Replica, there: Replica) -> None:
    terms = Terms("context")
    caller = await called(here, "empty", terms)
    assert await prepare(there, "empty", terms, 2) == 0
    await hand_over(here, there, "empty", 2)
    assert (await caller.dial(there)).next_unit == 1
    await caller.talk(2)
    assert [unit.rebuild_cause for unit in caller.units] == [None, None]


async def test_what_waits_in_the_old_one_is_sent_again(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    terms = Terms("basic")
    calm, _ = await undisturbed(valkey.url, "calm-again", terms, 14)
    caller = await called(here, "again", terms, 3)
    await prepare(there, "again", terms, 2)
    moving = asyncio.create_task(hand_over(here, there, "again", 2))
    await caller.say(9)
    await moving
    opened = await caller.dial(there)
    assert opened.next_unit <= 10
    await caller.talk(14)
    assert await tokens(there.ledger, "again") == calm
    check_events(caller)


async def test_a_dial_is_enough_for_the_new_owner_to_look(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_by, "LOOK_S", 600.0)
    terms = Terms("context")
    caller = await called(here, "dialled", terms, 3)
    await prepare(there, "dialled", terms, 2)
    await hand_over(here, there, "dialled", 2)
    await caller.dial(there)
    await caller.talk(4)
    assert there.registry.live["dialled"].lease.fence == 2


async def test_a_target_that_still_reads_when_the_session_has_come_leaves_its_stream_alone(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read late holds units of the new owner's own."""
    terms = Terms("context")
    caller = await called(here, "reads", terms, 3)
    await prepare(there, "reads", terms, 2)
    ready = there.registry._standing_by.prepared("reads")
    assert ready is not None
    load, reads, go, read = there.ledger.load, asyncio.Event(), asyncio.Event(), asyncio.Event()
    follow = ready.warmer.follow

    async def slowly(session: str) -> LoadedSession:
        if not reads.is_set():
            reads.set()
            await go.wait()
        return await load(session)

    async def followed(loaded: LoadedSession) -> None:
        try:
            await follow(loaded)
        finally:
            if go.is_set():
                read.set()

    monkeypatch.setattr(there.ledger, "load", slowly)
    monkeypatch.setattr(ready.warmer, "follow", followed)
    await caller.talk(4)
    await reads.wait()
    await hand_over(here, there, "reads", 2)
    await until_moved(caller)
    await caller.dial(there)
    await caller.talk(6)
    go.set()
    await read.wait()
    await caller.talk(8)
    check_events(caller)
    assert {unit.rebuild_cause for unit in caller.units} <= {None, "slide", "move"}


async def test_an_order_to_run_it_does_no_harm(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the old one has it still, and after it was handed over."""
    monkeypatch.setattr(standing_by, "LOOK_S", 600.0)
    terms = Terms("context")
    caller = await called(here, "ordered", terms, 3)
    await prepare(there, "ordered", terms, 2)
    early = asyncio.create_task(there.open("ordered", terms, fence=2))
    await caller.talk(4)
    await hand_over(here, there, "ordered", 2)
    await early
    await there.open("ordered", terms, fence=2)
    await caller.dial(there)
    await caller.talk(6)
    check_events(caller)
    assert await prepare(there, "ordered", terms, 2) == 6  # it has come: the same answer
    assert there.registry.live["ordered"].lease.fence == 2


async def test_a_rebuild_ahead_is_under_way_in_the_old_one(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    terms = Terms("context", max_units=3)
    calm, _ = await undisturbed(valkey.url, "calm-ahead", terms, 12)
    caller = await called(here, "ahead", terms, 4)
    await prepare(there, "ahead", terms, 2)
    pause = here.stages.thinker.pause(6)
    await caller.talk(5)
    await hand_over(here, there, "ahead", 2)
    await caller.dial(there)
    await caller.talk(12)
    pause.go.set()
    check_events(caller)
    assert await tokens(there.ledger, "ahead") == calm
    await eventually(lambda: here.stages.held() == [])


async def test_streams_that_are_just_being_closed_take_no_new_ones_with_them(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Encoder and vocoder know a session by its name: it comes back while what was kept of it
    goes."""
    terms = Terms("context")
    closing, go, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    caller = await called(here, "returns", terms, 4)
    await prepare(there, "returns", terms, 2)
    await hand_over(here, there, "returns", 2)
    await until_moved(caller)
    close = here.stages.encoder.close

    async def slowly(request: EncoderClose) -> None:
        closing.set()
        await go.wait()
        await close(request)
        closed.set()

    monkeypatch.setattr(here.stages.encoder, "close", slowly)
    await caller.dial(there)
    await caller.talk(5)
    await closing.wait()
    back = asyncio.create_task(prepare(here, "returns", terms, 3))
    await asyncio.wait({back}, timeout=0.2)
    go.set()
    await closed.wait()
    await back
    assert "returns" in here.stages.encoder.sessions
    await hand_over(there, here, "returns", 3)
    await until_moved(caller)
    await caller.dial(here)
    await caller.talk(8)
    check_events(caller)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("follows", [True, False], ids=["before", "just-before"])
async def test_a_reply_is_cut_when_the_target_is_ready(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch, mode: Mode, follows: bool
) -> None:
    """What the client takes back of a committed unit is not in the prompt that goes on."""
    session, terms = f"cut-{mode}-{follows}", Terms(mode)
    caller = await called(here, session, terms)
    last = await into_a_turn(here, caller)
    while not sounding_units(caller, here.registry.live[session].speech.turn):
        last = await into_a_turn(here, caller, last)
    turn = here.registry.live[session].speech.turn
    assert await prepare(there, session, terms, 2) == last
    ready = there.registry._standing_by.prepared(session)
    assert ready is not None
    if not follows:
        monkeypatch.setattr(ready.warmer, "behind", lambda _: False)
    assert await caller.ask(TruncateReply(turn, 0, client_sequence=1)) == CommandApplied(1, None)
    head = (await here.ledger.load(session)).head
    await eventually(lambda: not ready.warmer.behind(head))
    await hand_over(here, there, session, 2)
    await until_moved(caller)
    await caller.dial(there)
    await caller.talk(last + 3)
    check_events(caller)
    said = await tokens(there.ledger, session)
    cut = dict.fromkeys(sounding_units(caller, turn), (VOCABULARY.listen,))
    stages = [here.stages, there.stages]
    check_prompts(stages, session, terms, said, caller, cuts={last + 1: cut})


@pytest.mark.parametrize("then", ["goes-on", "stops", "fails"])
async def test_the_vocoder_hears_the_turn_again_before_its_next_sound_is_due(
    here: Replica, there: Replica, then: str
) -> None:
    session, terms = f"hears-{then}", Terms("context")
    caller = await called(here, session, terms)
    last = await into_a_turn(here, caller)
    while not sounding_units(caller, here.registry.live[session].speech.turn):
        last = await into_a_turn(here, caller, last)
    turn = here.registry.live[session].speech.turn
    await prepare(there, session, terms, 2)
    vocoder = there.stages.code2wav
    if then == "fails":
        vocoder.fail(here.registry.live[session].speech.unit, StageFault.TIMEOUT)
    await hand_over(here, there, session, 2)
    await until_moved(caller)
    await caller.dial(there)
    if then != "fails":
        await eventually(lambda: any(chunk.session == session for chunk in vocoder.fed))
    if then == "stops":
        await caller.ask(TruncateReply(turn, 0, client_sequence=1))
    await caller.talk(last + 8)
    check_events(caller)
    check_stage2(there.stages, session)


@pytest.mark.parametrize("kept", [False, True], ids=["target", "source"])
async def test_a_stream_that_holds_something_else_costs_a_rebuild(
    valkey: EmbeddedValkey, here: Replica, there: Replica, kept: bool
) -> None:
    """One more position than anybody knows of, on the target or in what the source has kept."""
    session, terms = f"other-{kept}", Terms("context")
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, 8)
    caller = await called(here, session, terms, 4)
    await prepare(there, session, terms, 2)
    home = here if kept else there
    held = next(iter(home.stages.thinker.streams.values()))
    if kept:
        there.registry._standing_by._take_over = AsyncMock()
        await hand_over(here, there, session, 2)
        held.take(0)
        here.registry.declare_dead(there.name)
    else:
        held.take(0)
        await hand_over(here, there, session, 2)
    await until_moved(caller)
    await caller.dial(home)
    await caller.talk(8)
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    causes = [unit.rebuild_cause for unit in caller.units]
    assert causes.count("move") + causes.count("replica_restart") == 1


async def test_no_room_for_a_unit_like_the_last_one(valkey: EmbeddedValkey) -> None:
    """What the target would open ahead does not fit, what comes then does: the target must not go
    on from a stream that it had filled before."""
    session = "no-room"
    terms = Terms("off", camera=True, basic_high=200, basic_low=100, high_resolution=False)

    def frames(second: int) -> tuple[bytes, ...]:
        return (png(8, 1), png(8, 2)) if second == 5 else ()

    calm, _ = await undisturbed(valkey.url, "calm-no-room", terms, 9, frames=frames)
    async with replica(valkey.url, "large") as large:
        loaded = await large.ledger.load("calm-no-room")
    model = replace(MODEL, max_model_tokens=decode_conversation(loaded.state).window.prompt_tokens)
    async with (
        replica(valkey.url, "small", model=model) as here,
        replica(valkey.url, "too-small", model=model) as there,
    ):
        await here.open(session, terms)
        caller = Caller(session, frames=frames)
        await caller.dial(here)
        await caller.talk(4)
        assert await prepare(there, session, terms, 2) == 4
        await caller.talk(5)
        ready = there.registry._standing_by.prepared(session)
        await eventually(lambda: ready is not None and ready.warmer.seq == 5)
        await hand_over(here, there, session, 2)
        await until_moved(caller)
        await caller.dial(there)
        await caller.talk(8)
        check_events(caller)
        assert await tokens(there.ledger, session) == calm[:8]


# --- at the wrong moment --------------------------------------------------------------------------


async def test_nobody_is_given_what_he_has_not_offered_to_take(
    here: Replica, there: Replica
) -> None:
    terms = Terms("context")
    caller = await called(here, "unoffered", terms, 2)
    for _ in range(2):
        with pytest.raises(PlacementRefused) as error:
            await hand_over(here, there, "unoffered", 2)
        assert refusal_of(error) is Refusal.NOT_PREPARED
    await prepare(there, "unoffered", terms, 5)
    for fence in (2, 4, 6):
        with pytest.raises(PlacementRefused) as error:
            await hand_over(here, there, "unoffered", fence)
        assert refusal_of(error) is Refusal.NOT_PREPARED
    await caller.talk(5)  # it goes on
    check_events(caller)
    await hand_over(here, there, "unoffered", 5)


async def test_an_offer_runs_out(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_by, "STAND_BY_S", 0.3)
    terms = Terms("context")
    caller = await called(here, "late", terms, 2)
    await prepare(there, "late", terms, 2)
    await prepare(there, "late", terms, 2)
    await eventually(lambda: there.registry.free_slots == 4 and not there.stages.held())
    with pytest.raises(PlacementRefused) as error:
        await hand_over(here, there, "late", 2)
    assert refusal_of(error) is Refusal.NOT_PREPARED
    await caller.talk(4)


@pytest.mark.parametrize("what", ["unknown", "own", "stale", "full", "over", "parked"])
async def test_what_cannot_be_prepared(here: Replica, there: Replica, what: str) -> None:
    session, terms = f"cannot-{what}", Terms("context")
    target, fence = there, 7
    if what != "unknown":
        await here.open(session, terms, fence=7 if what == "stale" else 1)
    if what == "over":
        await here.registry.end(session)
    if what == "parked":
        await here.registry.departures.park(session)
    if what == "own":
        target = here
    if what == "full":
        for number in range(4):
            await there.open(f"full-{number}", terms)
    with pytest.raises(ClientError):
        await prepare(target, session, terms, fence)
    assert session not in target.registry.roster._held
    assert target.registry.free_slots == (0 if what == "full" else 3 if what == "own" else 4)


async def test_two_at_once(here: Replica, there: Replica, valkey: EmbeddedValkey) -> None:
    """Two targets: the larger fence is the order; two calls for the same one are one."""
    terms = Terms("context")
    async with replica(valkey.url, "third") as third:
        caller = await called(here, "two", terms)
        await into_a_turn(here, caller)
        await prepare(there, "two", terms, 2)
        await prepare(third, "two", terms, 3)
        with pytest.raises(PlacementRefused) as error:
            await prepare(there, "two", terms, 3)
        assert refusal_of(error) is Refusal.STALE_FENCE
        order = hand_over(here, third, "two", 3, grace_s=0.3)
        both = asyncio.gather(order, hand_over(here, third, "two", 3, grace_s=0.3))
        await asyncio.sleep(0)
        with pytest.raises(PlacementRefused) as error:
            await hand_over(here, there, "two", 2)
        assert refusal_of(error) is Refusal.SESSION_BUSY
        await both
        await hand_over(here, third, "two", 3)  # it is there already
        with pytest.raises(ClientError):
            await hand_over(here, there, "two", 2)
        opened = await caller.dial(third)
        await caller.talk(opened.next_unit + 2)
        check_events(caller)
        await eventually(lambda: "two" not in there.registry.roster._held)
        assert there.registry.live == {}
        await eventually(lambda: not there.stages.held())  # its streams are closed behind that


@pytest.mark.parametrize("what", ["end", "close", "park", "erase", "let_go"])
async def test_a_session_that_leaves_otherwise_meanwhile(
    here: Replica, there: Replica, what: str
) -> None:
    session, terms = f"leaves-{what}", Terms("context")
    caller = await called(here, session, terms)
    await into_a_turn(here, caller)
    await prepare(there, session, terms, 2)
    moving = asyncio.create_task(hand_over(here, there, session, 2, grace_s=20))
    await asyncio.sleep(0)
    match what:
        case "end":
            assert await here.registry.end(session)
        case "close":
            await caller.close()
        case "park":
            await here.registry.departures.park(session, grace_s=0.1)
        case "erase":
            await here.registry.departures.erase(session)
        case _:
            here.registry.live[session].wishes.let_go()
    with pytest.raises(ClientError) as error:
        await moving
    expected = {"park": ErrorCode.PARKED, "let_go": ErrorCode.LEASE_LOST}
    assert error.value.code is expected.get(what, ErrorCode.SESSION_ENDED)
    if what == "let_go":  # nobody has it: whoever is ready takes it by the normal way
        await caller.dial(there)
        await caller.talk(caller.next_second + 1)
        check_events(caller)
    else:
        await eventually(lambda: there.registry.free_slots == 4 and not there.stages.held())


async def test_the_next_turn_end_belongs_to_the_hand_over_not_to_the_drain(
    here: Replica, there: Replica
) -> None:
    terms = Terms("context")
    caller = await called(here, "drains", terms)
    await into_a_turn(here, caller)
    await prepare(there, "drains", terms, 2)
    here.registry.departures.drain(20)
    await hand_over(here, there, "drains", 2, grace_s=0.1)
    assert await here.registry.departures.drained()
    opened = await caller.dial(there)
    await caller.talk(opened.next_unit)
    check_events(caller)


async def test_a_unit_that_does_not_end(here: Replica, there: Replica) -> None:
    terms = Terms("context")
    caller = await called(here, "stuck", terms, 2)
    await prepare(there, "stuck", terms, 2)
    pause = here.stages.thinker.pause(3, after=True)
    await caller.say(3)
    await pause.reached.wait()
    order = HandOver(there.name, 2)
    with pytest.raises(PlacementRefused) as error:
        await here.registry.departures.hand_over("stuck", order, grace_s=0.05, unit_s=0.1)
    assert refusal_of(error) is Refusal.SESSION_BUSY
    pause.go.set()
    await caller.talk(5)
    check_events(caller)
    assert "stuck" in here.registry.live
