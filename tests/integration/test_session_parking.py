"""Sessions that park and wake: the same tokens, one rebuild, in every window mode; and whatever
comes at the wrong moment."""

import asyncio
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.patience import PATIENCE_S

from duplex_sidecar.ledger import store
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LeaseHeld, LeaseLost, LedgerError, LedgerUnavailable
from duplex_sidecar.ledger.lease import LEASE_MS, Lease, boottime_ms
from duplex_sidecar.ledger.session_view import LoadedSession, Phase
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.protocol.commands import Heartbeat
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Closed
from duplex_sidecar.session import departures, ending
from duplex_sidecar.session.clients import ClientAttachment
from duplex_sidecar.session.owners import started_before
from duplex_sidecar.session.parking import PARK_SENTENCES, ParkReason
from duplex_sidecar.session.refusals import PlacementRefused, Refusal

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_stage import Pause
from session_kit import (
    MODES,
    TOKEN,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    claim,
    eventually,
    frames_of,
    replica,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.integration
UNITS = 30


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def here(valkey: EmbeddedValkey, clock: Clock) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here", clock_s=clock, address="10.0.0.1:8765") as started:
        yield started


@pytest.fixture
async def there(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "there", address="10.0.0.2:8765") as started:
        yield started


async def called(here: Replica, session: str, terms: Terms | None = None) -> Caller:
    await here.open(session, terms or Terms("context"))
    caller = Caller(session)
    await caller.dial(here)
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


async def until_told(caller: Caller, reason: ParkReason) -> None:
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert closed == Closed(ErrorCode.PARKED, PARK_SENTENCES[reason])


def refusal_of(error: pytest.ExceptionInfo[PlacementRefused]) -> Refusal:
    return error.value.refusal


# --- parking and waking ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
async def test_a_conversation_that_parks_again_and_again(
    valkey: EmbeddedValkey, here: Replica, there: Replica, mode: Mode, camera: bool
) -> None:
    session = f"parks-{mode}-{camera}"
    terms = Terms(mode, greedy=True)
    frames = frames_of if camera else lambda _: ()
    terms = with_camera(terms) if camera else terms
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS, frames=frames)
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    at = here
    for unit in range(5, UNITS + 1, 5):
        opened = await caller.dial(at)
        assert opened.next_unit == unit - 4
        assert opened.acknowledged_sample == 16_000 * (unit - 5)
        await caller.talk(unit)
        await at.registry.departures.park(session, grace_s=0.1)
        await until_told(caller, ParkReason.REQUESTED)
        assert (at.stages.held(), at.registry.free_slots) == ([], 4)
        meta = await at.ledger.reader.meta(session)
        assert meta is not None
        assert (meta.phase, meta.reason) == (Phase.PARKED, "requested")
        assert (meta.nonce, meta.replica, meta.address) == ("", "", "")
        at = there if at is here else here
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    check_prompts([here.stages, there.stages], session, terms, calm, caller, frames)
    causes = {unit.unit: unit.rebuild_cause for unit in caller.units}
    assert [causes[unit] for unit in range(6, UNITS, 5)] == ["move"] * 5


@pytest.mark.parametrize("stage", ["thinker", "talker", "code2wav"])
async def test_nothing_is_held_any_more_once_the_ledger_says_parked(
    here: Replica, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    """A stage takes its time: until then the session counts as open, and its lease is renewed."""
    session = f"freed-{stage}"
    caller = await called(here, session)
    await into_a_turn(here, caller)
    fake = getattr(here.stages, stage)
    close, pause = fake.close, Pause()

    async def slowly(what: object) -> None:
        pause.reached.set()
        await pause.go.wait()
        await close(what)

    monkeypatch.setattr(fake, "close", slowly)
    monkeypatch.setattr(ending, "FREE_FIRST_S", 60.0)
    parking = asyncio.create_task(here.registry.departures.park(session, grace_s=0.0))
    await pause.reached.wait()
    await asyncio.wait({parking}, timeout=LEASE_MS / 1000 + 0.2)
    meta = await here.ledger.reader.meta(session)
    assert meta is not None
    assert (meta.phase, meta.replica) == (Phase.OPEN, "here")
    assert here.registry.live[session].lease.deadline_ms > boottime_ms()
    held: list[object] = []
    park = here.ledger.park

    async def park_and_look(*given: Any) -> None:
        held.append(here.stages.held())
        await park(*given)

    monkeypatch.setattr(here.ledger, "park", park_and_look)
    pause.go.set()
    await parking
    assert held == [[]]
    assert await here.ledger.phase(session) is Phase.PARKED


async def test_a_long_history_without_a_window_parks_too(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    terms = Terms("off")
    calm, _ = await undisturbed(valkey.url, "calm-long", terms, 122)
    caller = await called(here, "long", terms)
    await caller.talk(120)
    await here.registry.departures.park("long", grace_s=0.1)
    await caller.dial(there)
    await caller.talk(122)
    assert await tokens(there.ledger, "long") == calm
    check_events(caller)
    rebuilt = [unit.unit for unit in caller.units if unit.rebuild_cause]
    assert rebuilt == [121]


async def test_a_session_without_a_unit_parks_and_wakes(here: Replica, there: Replica) -> None:
    caller = await called(here, "empty")
    await here.registry.departures.park("empty")
    opened = await caller.dial(there)
    assert opened.next_unit == 1
    await caller.talk(2)
    assert [unit.rebuild_cause for unit in caller.units] == [None, None]


async def test_what_is_said_to_a_parked_session_is_refused(here: Replica) -> None:
    caller = await called(here, "deaf")
    await caller.talk(2)
    await here.registry.departures.park("deaf")
    await until_told(caller, ParkReason.REQUESTED)
    assert caller.attachment is not None
    assert await caller.attachment.next_event() is None
    with pytest.raises(ClientError) as error:
        await caller.attachment.submit(Heartbeat())
    assert error.value.code is ErrorCode.PARKED


async def test_input_that_nobody_acknowledged_is_sent_again(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-again", Terms("context"), 12)
    caller = await called(here, "again")
    await caller.talk(3)
    parking = asyncio.create_task(here.registry.departures.park("again"))
    await caller.say(9)
    await parking
    opened = await caller.dial(there)
    assert opened.next_unit <= 10
    await caller.talk(12)
    assert await tokens(there.ledger, "again") == calm
    check_events(caller)


# --- by the clock ---------------------------------------------------------------------------------


async def test_a_connected_client_that_says_nothing(here: Replica, clock: Clock) -> None:
    caller = await called(here, "quiet")
    await caller.talk(2)
    clock.now_s += 119
    await caller.attachment_takes_mail()  # a heartbeat is no input
    assert here.registry.live["quiet"].ending is None
    clock.now_s += 2
    await until_told(caller, ParkReason.PARK_AFTER)
    await caller.dial(here)
    await caller.talk(4)
    check_events(caller)


async def test_a_client_that_comes_back_in_time_finds_its_session_running(
    here: Replica, clock: Clock
) -> None:
    caller = await called(here, "back")
    await caller.talk(2)
    await caller.hang_up()
    clock.now_s += 29
    await caller.dial(here)
    clock.now_s += 29
    await caller.talk(3)
    assert caller.units[-1].rebuild_cause is None


async def test_a_turn_of_nobody_is_not_waited_for(here: Replica, clock: Clock) -> None:
    caller = await called(here, "away")
    await into_a_turn(here, caller)
    await caller.hang_up()
    clock.now_s += 31
    await eventually(lambda: not here.registry.live)
    meta = await here.ledger.reader.meta("away")
    assert meta is not None
    assert (meta.phase, meta.reason) == (Phase.PARKED, "disconnect_grace")


# --- at the wrong moment --------------------------------------------------------------------------


async def test_parking_twice_is_parking_once(here: Replica, there: Replica) -> None:
    caller = await called(here, "twice")
    await caller.talk(2)
    park = here.registry.departures.park
    await asyncio.gather(park("twice"), park("twice"), park("twice"))
    await park("twice")
    await there.registry.departures.park("twice")
    meta = await here.ledger.reader.meta("twice")
    assert meta is not None
    assert (meta.phase, meta.nonce) == ("parked", "")
    assert (here.registry.live, there.registry.live) == ({}, {})


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("unknown", ErrorCode.SESSION_NOT_FOUND),
        ("elsewhere", ErrorCode.SESSION_NOT_FOUND),
        ("over", ErrorCode.SESSION_ENDED),
        ("erased", ErrorCode.SESSION_NOT_FOUND),
    ],
)
async def test_what_does_not_run_here_cannot_park_here(
    here: Replica, there: Replica, what: str, code: ErrorCode
) -> None:
    session = f"cannot-{what}"
    if what != "unknown":
        await there.open(session, Terms("context"))
    if what == "over":
        await there.registry.end(session)
    if what == "erased":
        await there.registry.departures.erase(session)
    with pytest.raises(ClientError) as error:
        await here.registry.departures.park(session)
    assert error.value.code is code
    assert " " in error.value.detail  # a sentence, not the code again


@pytest.mark.parametrize("stage", ["encoder", "thinker", "talker"])
async def test_a_unit_under_way_keeps_a_session_from_parking(here: Replica, stage: str) -> None:
    """Not accepted; accepted and not committed; committed and not said."""
    session = f"busy-{stage}"
    caller = await called(here, session)
    unit = 2
    while True:
        pause: Pause = getattr(here.stages, stage).pause(unit, after=True)
        await caller.say(unit)
        reached = asyncio.create_task(pause.reached.wait())
        done = asyncio.create_task(caller.until_unit(unit))
        await asyncio.wait({reached, done}, return_when=asyncio.FIRST_COMPLETED)
        stands = reached.done()
        reached.cancel()
        done.cancel()
        await asyncio.gather(reached, done, return_exceptions=True)
        if stands:
            break
        unit += 1
    with pytest.raises(PlacementRefused) as error:
        await here.registry.departures.park(session, grace_s=0.1, unit_s=0.3)
    assert refusal_of(error) is Refusal.SESSION_BUSY
    assert await here.ledger.phase(session) is Phase.OPEN
    pause.go.set()
    await caller.talk(unit + 2)  # it goes on: the wish was taken back
    check_events(caller)
    await here.registry.departures.park(session)
    assert await here.ledger.phase(session) is Phase.PARKED


async def test_a_session_that_is_taken_up_while_it_parks(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    """Parking and dialling race; whoever wins, the conversation goes on whole."""
    calm, _ = await undisturbed(valkey.url, "calm-race", Terms("context"), 24)
    caller = await called(here, "race")
    for unit in range(2, 25, 2):
        await caller.talk(unit)
        parking = asyncio.create_task(here.registry.departures.park("race", grace_s=0.05))
        for _ in range(unit):
            await asyncio.sleep(0)
        await caller.dial(here)
        await asyncio.gather(parking, return_exceptions=True)
        if "race" not in here.registry.live:
            await caller.dial(here)
    assert await tokens(here.ledger, "race") == calm
    check_events(caller)


async def test_an_owner_that_lost_its_lease_parks_nothing(here: Replica, there: Replica) -> None:
    caller = await called(here, "stolen")
    await caller.talk(2)
    await here.registry.live["stolen"]._keeper.stop()
    await there.ledger.break_lease("stolen", replica="here")
    await caller.dial(there)
    with pytest.raises(ClientError) as error:
        await here.registry.departures.park("stolen")
    assert error.value.code is ErrorCode.LEASE_LOST
    assert await there.ledger.phase("stolen") is Phase.OPEN
    await caller.talk(4)
    check_events(caller)


async def test_a_park_that_the_ledger_refuses_lets_the_session_go(
    here: Replica, there: Replica
) -> None:
    caller = await called(here, "refused")
    await caller.talk(2)
    actor = here.registry.live["refused"]
    durable = actor._durable
    durable._head = msgspec.structs.replace(durable.head, hash="0" * 64)
    with pytest.raises(ClientError) as error:
        await here.registry.departures.park("refused")
    assert error.value.code is ErrorCode.LEASE_LOST
    await caller.dial(there)
    await caller.talk(4)
    check_events(caller)


# --- draining -------------------------------------------------------------------------------------


async def test_draining_four_sessions_in_the_middle_of_their_turns(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-drain", Terms("context"), UNITS)
    callers = [await called(here, f"drain-{number}") for number in range(4)]
    units = [await into_a_turn(here, caller) for caller in callers]
    here.registry.departures.drain(60.0)
    assert len(here.registry.live) == 4
    with pytest.raises(PlacementRefused) as error:
        await here.open("late", Terms("context"))
    assert refusal_of(error) is Refusal.DRAINING

    async def talk_on(caller: Caller, unit: int) -> None:
        """Until the turn is over and the session says that it has parked."""
        await caller.say(unit + 12)
        await until_told(caller, ParkReason.DRAIN)
        turns = [one for one in caller.units if one.turn]
        assert turns
        await caller.dial(there)
        await caller.talk(UNITS)

    await asyncio.gather(*(talk_on(*pair) for pair in zip(callers, units, strict=True)))
    assert await here.registry.departures.drained()
    for caller in callers:
        assert await tokens(there.ledger, caller.session) == calm
        check_events(caller)


async def test_a_turn_that_does_not_end_is_cut_at_the_end_of_the_grace(
    here: Replica, clock: Clock
) -> None:
    caller = await called(here, "endless")
    await into_a_turn(here, caller)
    here.registry.departures.drain(20.0)
    clock.now_s += 19
    await caller.attachment_takes_mail()
    assert "endless" in here.registry.live
    here.registry.departures.drain(3600.0)  # a repeat puts nothing off
    clock.now_s += 1.1
    await until_told(caller, ParkReason.DRAIN)
    assert await here.registry.departures.drained()


async def test_a_drained_replica_takes_nothing_up(here: Replica, there: Replica) -> None:
    caller = await called(there, "stays")
    await there.registry.departures.park("stays")
    here.registry.departures.drain(0.0)
    with pytest.raises(ClientError) as error:
        await caller.dial(here)
    assert error.value.code is ErrorCode.NOT_READY
    await caller.dial(there)


# --- an operator's orders -------------------------------------------------------------------------


async def test_a_fence_is_taken_only_if_it_is_larger(here: Replica, there: Replica) -> None:
    terms = Terms("context")
    await here.open("fenced", terms, fence=5)
    actor = here.registry.live["fenced"]
    assert actor.lease.fence == 5
    await here.open("fenced", terms, fence=5)
    assert here.registry.live["fenced"] is actor
    for fence in (1, 4):
        with pytest.raises(PlacementRefused) as error:
            await here.open("fenced", terms, fence=fence)
        assert refusal_of(error) is Refusal.STALE_FENCE
    for fence in (4, 5):
        with pytest.raises(PlacementRefused) as error:
            await there.open("fenced", terms, fence=fence)
        assert refusal_of(error) is Refusal.STALE_FENCE
    await here.open("fenced", terms, fence=9)
    assert here.registry.live["fenced"] is not actor
    assert here.registry.live["fenced"].lease.fence == 9
    await here.registry.departures.park("fenced")
    with pytest.raises(PlacementRefused):
        await there.open("fenced", terms, fence=9)
    await there.open("fenced", terms, fence=10)
    meta = await there.ledger.reader.meta("fenced")
    assert meta is not None
    assert (meta.fence, meta.replica, meta.address) == (10, "there", "10.0.0.2:8765")


async def test_an_order_whose_caller_gave_up_is_the_same_order_again(here: Replica) -> None:
    terms = Terms("context")
    await here.open("gave-up", terms, fence=3)
    await here.registry.departures.park("gave-up")
    first = await here.ledger.acquire("gave-up", "here", fence=4)
    await here.open("gave-up", terms, fence=4)
    with pytest.raises(LeaseLost):
        await here.ledger.renew(first)


async def test_with_an_operator_a_dial_takes_nothing_up(
    valkey: EmbeddedValkey, there: Replica
) -> None:
    caller = await called(there, "placed")
    await caller.talk(1)
    async with replica(valkey.url, "pod", placed=True) as pod:
        for token, code in ((TOKEN, ErrorCode.LEASE_LOST), ("wrong", ErrorCode.SESSION_NOT_FOUND)):
            with pytest.raises(ClientError) as error:
                await pod.registry.attach("placed", token, None)
            assert error.value.code is code
        await there.registry.departures.park("placed")
        for token, code in ((TOKEN, ErrorCode.PARKED), ("wrong", ErrorCode.SESSION_NOT_FOUND)):
            with pytest.raises(ClientError) as error:
                await pod.registry.attach("placed", token, None)
            assert error.value.code is code
        await pod.open("placed", Terms("context"), fence=7)
        await caller.dial(pod)
        await caller.talk(2)
        check_events(caller)


async def test_another_manifest_for_a_running_session(here: Replica) -> None:
    terms = Terms("context")
    await here.open("same", terms)
    for other in (replace(terms, max_units=7), Terms("off"), replace(terms, greedy=True)):
        with pytest.raises(PlacementRefused) as error:
            await here.open("same", other)
        assert refusal_of(error) is Refusal.MANIFEST_CONFLICT
    await here.open("same", replace(terms, idle="7m"))
    assert here.registry.live["same"].lifecycle.idle_timeout_ms == 7 * 60_000


async def test_another_manifest_for_a_session_that_a_dial_took_up(here: Replica) -> None:
    terms = Terms("context")
    caller = await called(here, "dialled", terms)
    await here.registry.departures.park("dialled")
    await caller.dial(here)
    actor = here.registry.live["dialled"]
    for other in (replace(terms, max_units=7), with_camera(terms), replace(terms, greedy=True)):
        with pytest.raises(PlacementRefused) as error:
            await here.open("dialled", other)
        assert refusal_of(error) is Refusal.MANIFEST_CONFLICT
    await here.open("dialled", terms)
    assert here.registry.live["dialled"] is actor


async def test_an_operator_may_give_another_token(here: Replica) -> None:
    """Both let in until the first message under the new one."""
    manifest = Terms("context").manifest()
    await here.registry.open("keys", manifest, claim("one", 1))
    with pytest.raises(ClientError) as error:
        await here.registry.open("keys", manifest, claim("two"))
    assert error.value.code is ErrorCode.UNAUTHORIZED
    for _ in range(2):
        await here.registry.open("keys", manifest, claim("two", 1))
    assert await keys_of(here, "keys") == ("one", "two")
    for good in ("one", "two", "one"):
        await attached(here, "keys", good)
    silent = await attached(here, "keys", "two")
    assert await keys_of(here, "keys") == ("one", "two"), "it has said nothing"
    await silent.submit(Heartbeat())
    await here_knows(here, "keys", "two", "")
    await refused(here, "keys", "one")
    await (await attached(here, "keys", "two")).submit(Heartbeat())
    assert await keys_of(here, "keys") == ("two", "")


async def test_a_client_that_resumes_has_said_its_first_message(here: Replica) -> None:
    manifest = Terms("context").manifest()
    await here.registry.open("says-resume", manifest, claim("one", 1))
    await here.registry.open("says-resume", manifest, claim("two", 1))
    await here.registry.attach("says-resume", "two", 0)
    await here_knows(here, "says-resume", "two", "")
    await refused(here, "says-resume", "one")


async def test_an_offered_token_is_good_on_any_replica(here: Replica, there: Replica) -> None:
    """Offered while it was parked, and while it ran; confirmed where it runs next."""
    manifest = Terms("context").manifest()
    await here.registry.open("keys-move", manifest, claim("one", 1))
    await here.registry.departures.park("keys-move")
    await there.registry.open("keys-move", manifest, claim("two", 2))
    for good in ("two", "one"):
        await attached(there, "keys-move", good)
    await there.registry.departures.park("keys-move")
    assert await keys_of(here, "keys-move") == ("one", "two")
    by_dial = await attached(here, "keys-move", "two")  # as on one machine
    await by_dial.submit(Heartbeat())
    await here_knows(here, "keys-move", "two", "")
    await refused(here, "keys-move", "one")


async def test_a_token_that_is_changed_twice_or_back(here: Replica) -> None:
    manifest = Terms("context").manifest()
    await here.registry.open("changed-again", manifest, claim("one", 1))
    await here.registry.open("changed-again", manifest, claim("two", 1))
    second = await attached(here, "changed-again", "two")
    await here.registry.open("changed-again", manifest, claim("three", 1))
    await second.submit(Heartbeat())
    assert await keys_of(here, "changed-again") == ("one", "three")
    await refused(here, "changed-again", "two")
    await here.registry.open("changed-again", manifest, claim("one", 1))
    assert await keys_of(here, "changed-again") == ("one", "")
    await refused(here, "changed-again", "three")
    await attached(here, "changed-again", "one")


async def test_a_token_that_was_in_use_before_it_was_changed_back(here: Replica) -> None:
    """One, two, one: the second opens until somebody talks under the first again."""
    manifest = Terms("context").manifest()
    for token in ("one", "two"):
        await here.registry.open("to-and-fro", manifest, claim(token, 1))
    await (await attached(here, "to-and-fro", "two")).submit(Heartbeat())
    await here_knows(here, "to-and-fro", "two", "")
    await refused(here, "to-and-fro", "one")
    await here.registry.open("to-and-fro", manifest, claim("one", 1))
    for good in ("two", "one"):
        client = await attached(here, "to-and-fro", good)
    await client.submit(Heartbeat())
    await here_knows(here, "to-and-fro", "one", "")
    await refused(here, "to-and-fro", "two")


async def test_a_message_under_a_token_that_is_being_taken_back(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes while the ledger is told, and does not lock out the token that is to let in."""
    manifest = Terms("context").manifest()
    for token in ("one", "two"):
        await here.registry.open("taken-back", manifest, claim(token, 1))
    client = await attached(here, "taken-back", "two")
    offer = here.ledger.offer_token

    async def behind_a_message(*given: Any) -> None:
        await client.submit(Heartbeat())
        await offer(*given)

    monkeypatch.setattr(here.ledger, "offer_token", behind_a_message)
    await here.registry.open("taken-back", manifest, claim("one", 1))
    await attached(here, "taken-back", "one")
    await refused(here, "taken-back", "two")
    assert await keys_of(here, "taken-back") == ("one", "")


async def test_a_token_that_the_ledger_could_not_take_back_is_told_again(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Terms("context").manifest()
    for token in ("one", "two"):
        await here.registry.open("told-again", manifest, claim(token, 1))

    async def away(*_: Any) -> None:
        raise LedgerUnavailable("told-again", "away")

    with monkeypatch.context() as outage:
        outage.setattr(here.ledger, "offer_token", away)
        with pytest.raises(ClientError) as error:
            await here.registry.open("told-again", manifest, claim("one", 1))
        assert error.value.code is ErrorCode.LEDGER_UNAVAILABLE
    assert await keys_of(here, "told-again") == ("one", "two")
    await attached(here, "told-again", "two")
    await here.registry.open("told-again", manifest, claim("one", 1))
    assert await keys_of(here, "told-again") == ("one", "")
    await refused(here, "told-again", "two")


async def test_a_token_that_is_replaced_while_its_dial_takes_the_session_up(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at the token and the lease somebody talks under the new one elsewhere."""
    manifest = Terms("context").manifest()
    for token in ("one", "two"):
        await here.registry.open("late-dial", manifest, claim(token, 1))
    await here.registry.departures.park("late-dial")
    acquire = there.ledger.acquire

    async def behind_the_new_one(*given: Any, **named: Any) -> Lease:
        monkeypatch.undo()
        await (await attached(here, "late-dial", "two")).submit(Heartbeat())
        await here_knows(here, "late-dial", "two", "")
        await here.registry.departures.park("late-dial")
        return await acquire(*given, **named)

    monkeypatch.setattr(there.ledger, "acquire", behind_the_new_one)
    await refused(there, "late-dial", "one")
    await attached(there, "late-dial", "two")


async def test_a_confirmation_that_the_ledger_misses_comes_with_the_next_message(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Terms("context").manifest()
    await here.registry.open("late-keys", manifest, claim("one", 1))
    await here.registry.open("late-keys", manifest, claim("two", 1))
    client = await attached(here, "late-keys", "two")
    confirm, tries = here.ledger.confirm_token, 0

    async def away_once(*given: Any) -> None:
        nonlocal tries
        tries += 1
        if tries == 1:
            raise LedgerUnavailable("late-keys", "away")
        await confirm(*given)

    monkeypatch.setattr(here.ledger, "confirm_token", away_once)
    await client.submit(Heartbeat())
    await eventually(lambda: tries == 1)
    await refused(here, "late-keys", "one")  # here it is known
    assert await keys_of(here, "late-keys") == ("one", "two")
    await client.submit(Heartbeat())
    await here_knows(here, "late-keys", "two", "")
    await client.submit(Heartbeat())
    assert tries == 2


async def test_a_confirmation_that_the_ledger_misses_comes_over_the_next_connection(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the replaced token would let in again wherever the session runs next."""
    manifest = Terms("context").manifest()
    await here.registry.open("keys-redial", manifest, claim("one", 1))
    await here.registry.open("keys-redial", manifest, claim("two", 1))
    client = await attached(here, "keys-redial", "two")
    tried = asyncio.Event()

    async def away(*_: Any) -> None:
        tried.set()
        raise LedgerUnavailable("keys-redial", "away")

    with monkeypatch.context() as outage:
        outage.setattr(here.ledger, "confirm_token", away)
        await client.submit(Heartbeat())
        await tried.wait()
    assert await keys_of(here, "keys-redial") == ("one", "two")
    again = await attached(here, "keys-redial", "two")
    await again.submit(Heartbeat())
    await here_knows(here, "keys-redial", "two", "")


async def test_a_confirmation_that_the_ledger_refuses_is_not_said_with_each_message(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Terms("context").manifest()
    await here.registry.open("keys-refused", manifest, claim("one", 1))
    await here.registry.open("keys-refused", manifest, claim("two", 1))
    client = await attached(here, "keys-refused", "two")
    tries = 0

    async def refuses(*_: Any) -> None:
        nonlocal tries
        tries += 1
        raise LedgerError("keys-refused", "that token was not offered")

    monkeypatch.setattr(here.ledger, "confirm_token", refuses)
    await client.submit(Heartbeat())
    await eventually(lambda: tries == 1)
    await client.submit(Heartbeat())
    await keys_of(here, "keys-refused")
    assert tries == 1


async def attached(here: Replica, session: str, token: str) -> ClientAttachment:
    return await here.registry.attach(session, token, None)


async def refused(here: Replica, session: str, token: str) -> None:
    with pytest.raises(ClientError) as error:
        await here.registry.attach(session, token, None)
    assert error.value.code is ErrorCode.SESSION_NOT_FOUND


async def keys_of(here: Replica, session: str) -> tuple[str, str]:
    """The tokens that the ledger lets in, current and offered."""
    names = {token_sha256(name): name for name in ("one", "two", "three")} | {"": ""}
    meta = await here.ledger.reader.meta(session)
    assert meta is not None
    return names[meta.token_sha256], names[meta.token_offered_sha256]


async def here_knows(here: Replica, session: str, current: str, offered: str) -> None:
    """The ledger is told in the background."""
    async with asyncio.timeout(5):
        while await keys_of(here, session) != (current, offered):
            pass


# --- ending and erasing ---------------------------------------------------------------------------


async def test_what_nobody_runs_can_be_ended(here: Replica, there: Replica) -> None:
    await there.open("waits", Terms("context"))
    assert not await here.registry.end("waits", "deleted"), "it runs elsewhere"
    await there.registry.departures.park("waits")
    assert await here.registry.end("waits", "deleted")
    meta = await here.ledger.reader.meta("waits")
    assert meta is not None
    assert (meta.phase, meta.reason, meta.nonce) == (Phase.ENDED, "deleted", "")
    assert (await here.ledger.load("waits")).closed is not None
    assert not await here.registry.end("waits")
    assert not await here.registry.end("never-was")


async def test_a_reason_comes_into_the_ledger(here: Replica) -> None:
    caller = await called(here, "why")
    assert await here.registry.end("why", "namespace_deleted")
    meta = await here.ledger.reader.meta("why")
    assert meta is not None
    assert meta.reason == "namespace_deleted"
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert closed == Closed(ErrorCode.SESSION_ENDED, "ended: namespace_deleted")


@pytest.mark.parametrize("how", ["live", "parked", "unknown"])
async def test_erasing(here: Replica, how: str) -> None:
    session = f"erase-{how}"
    caller: Caller | None = None
    if how != "unknown":
        caller = await called(here, session)
        await caller.talk(2)
    if how == "parked":
        await here.registry.departures.park(session)
    await here.registry.departures.erase(session)
    await here.registry.departures.erase(session)
    assert await here.ledger.phase(session) is Phase.ERASED
    assert session not in here.registry.live
    assert here.stages.held() == []
    with pytest.raises(ClientError):
        await here.open(session, Terms("context"))
    if how == "live":
        assert caller is not None
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert closed == Closed(ErrorCode.SESSION_ENDED, "the session was erased")


async def test_dead_pods_are_remembered_but_not_for_ever(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    dead = here.registry._owners.dead
    for number in range(5000):
        here.registry.declare_dead(f"pod-{number}")
    assert len(dead) == 4096
    assert "pod-4999-0badcafe" in dead
    assert "pod-4999" in dead
    assert "pod-1-0badcafe" not in dead
    async with replica(valkey.url, "uid-7-aaaa") as pod:
        caller = await called(pod, "orphan")
        await caller.talk(1)
        await pod.registry.live["orphan"]._keeper.stop()
        here.registry.declare_dead("uid-7")
        async with asyncio.timeout(PATIENCE_S):
            await caller.dial(here)


async def test_a_container_that_was_started_again_does_not_wait_for_its_own_old_lease(
    valkey: EmbeddedValkey,
) -> None:
    """By a dial and by an operator's order. The fence rises; what the old process still had on its
    way is refused."""
    async with (
        replica(valkey.url, "uid-9-0badcafe", pod_uid="uid-9") as old,
        replica(valkey.url, "uid-9-deadbeef", pod_uid="uid-9") as new,
        replica(valkey.url, "uid-9-12345678") as outside_a_pod,
        replica(valkey.url, "uid-8-0badcafe", pod_uid="uid-8") as other_pod,
    ):
        for session, fence in (("dialled-again", None), ("ordered-again", 7)):
            caller = await called(old, session)
            await caller.talk(2)
            lease = old.registry.live[session].lease
            await old.registry.live[session]._keeper.stop()
            for stranger in (outside_a_pod, other_pod):
                with pytest.raises(LeaseHeld):
                    await stranger.registry._owners.acquire_if_free(session)
            started_s = asyncio.get_running_loop().time()
            if fence is not None:
                await new.open(session, Terms("context"), fence=fence)
            await caller.dial(new)
            assert asyncio.get_running_loop().time() - started_s < 1.5, "a lease lasts 3 s"
            assert new.registry.live[session].lease.fence == (fence or lease.fence + 1)
            with pytest.raises(LeaseLost):
                await old.ledger.renew(lease)
            await caller.talk(4)
            check_events(caller)


@pytest.mark.parametrize(
    ("me", "other", "pod_uid", "before"),
    [
        ("uid-1-aaaa", "uid-1-bbbb", "uid-1", True),
        ("uid-1-aaaa", "uid-1-aaaa", "uid-1", False),
        ("uid-1-aaaa", "uid-2-bbbb", "uid-1", False),
        ("uid-1-aaaa", "uid-bbbb", "uid-1", False),
        ("uid-1-aaaa", "uid-1", "uid-1", False),
        ("uid-1-aaaa", "uid-1-0-bbbb", "uid-1", False),
        ("uid-1-aaaa", "uid-1-bbbb", "", False),
        ("host-aaaa", "host-bbbb", "", False),
        ("named", "uid-1-bbbb", "uid-1", False),
        ("-aaaa", "-bbbb", "", False),
    ],
)
def test_who_was_an_earlier_start_of_the_same_container(
    me: str, other: str, pod_uid: str, before: bool
) -> None:
    assert started_before(me, other, pod_uid) is before


def test_bounds_of_a_park_call() -> None:
    """An operator's call waits at least so long: docs/admin.md says five seconds."""
    assert departures.PARK_GRACE_S + departures.PARK_UNIT_S == 5.0


async def test_a_lease_is_kept_while_its_session_is_read(
    here: Replica, there: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long conversation over a slow line takes longer to read than a lease lasts: whoever asks
    elsewhere meanwhile would take it away, and then the other one's, without end."""
    await here.open("slow", Terms("context"))
    caller = Caller("slow")
    await caller.dial(here)
    await caller.talk(2)
    await here.registry.departures.park("slow")
    load, reader = there.ledger.load, there.ledger.reader

    async def slowly(session: str) -> LoadedSession:
        first = await reader.meta(session)
        assert first is not None
        while await reader.server_time_ms() <= first.lease_until_ms:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        with pytest.raises(LeaseHeld):
            await here.ledger.acquire(session, "replica-here")
        return await load(session)

    monkeypatch.setattr(there.ledger, "load", slowly)
    monkeypatch.setattr(store, "LEASE_MS", 3 * LEASE_MS)  # so long may the machine stand still
    await caller.dial(there)
    await eventually(lambda: there.registry.live["slow"].ledger_answers)
    await caller.talk(4)
    check_events(caller)
