"""A hand-over in which a replica dies before or after each step, or a reply gets lost: the session
goes on with whoever may have it, with the tokens of a conversation in which nothing happened. The
dead come back at the end of each test and change nothing."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.ledger_kit import LossyProxy, Writer
from support.patience import PATIENCE_S, PATIENT, leases_run_out, unhurried

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    LeaseHeld,
    LeaseLost,
    NotOffered,
    SessionEnded,
    SessionErased,
    SessionUnknown,
    StaleFence,
)
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.moving import Offer
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Closed
from duplex_sidecar.session import passing_on, standing_by
from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    claim,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
UNITS = 16
BEFORE = 6


# --- a replica that dies --------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        unhurried(patch)
        yield


CALLS = ("acquire", "renew", "load", "accept", "commit", "journal", "release", "note")
MOVES = ("offer", "withdraw", "hand_over")


@dataclass
class Mortal:
    """Every call to the ledger and to the Thinker passes here: once dead, none comes back."""

    replica: Replica
    step: str
    number: int
    after: bool
    dead: asyncio.Event = field(default_factory=asyncio.Event)
    back: asyncio.Event = field(default_factory=asyncio.Event)
    seen: int = 0

    def bind(self, monkeypatch: pytest.MonkeyPatch) -> None:
        here = self.replica
        for name in CALLS:
            self._wrap(monkeypatch, here.ledger, name)
        for name in MOVES:
            self._wrap(monkeypatch, here.ledger.moves, name)
        self._wrap(monkeypatch, here.ledger.reader, "meta")
        self._wrap(monkeypatch, here.stages.thinker, "feed")
        self._wrap(monkeypatch, here.stages.encoder, "feed", "hear")

    def _wrap(self, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, step: str = "") -> None:
        real: Callable[..., Awaitable[Any]] = getattr(owner, name)
        step = step or name

        async def call(*args: Any, **more: Any) -> Any:
            await self._alive()
            self.seen += step == self.step
            chosen = step == self.step and self.seen == self.number
            if chosen and not self.after:
                self.dead.set()
                await self._alive()
            answer = await real(*args, **more)
            if chosen and self.after:
                self.dead.set()
            await self._alive()
            return answer

        monkeypatch.setattr(owner, name, call)

    async def _alive(self) -> None:
        if self.dead.is_set():
            await self.back.wait()


class Yard:
    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self.url = url
        self._stack = stack

    async def build(self, name: str) -> Replica:
        return await self._stack.enter_async_context(replica(self.url, name))

    def come_back(self, mortal: Mortal) -> None:
        self._stack.callback(mortal.back.set)


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with AsyncExitStack() as stack:
        yield Yard(valkey.url, stack)


_calm: dict[Mode, list[tuple[int, ...]]] = {}


async def calm_tokens(valkey: EmbeddedValkey, mode: Mode) -> list[tuple[int, ...]]:
    """Of a conversation in which nothing happens."""
    if mode not in _calm:
        _calm[mode], _ = await undisturbed(valkey.url, f"calm-{mode}", Terms(mode), UNITS)
    return _calm[mode]


async def owner_of(ledger: Ledger, session: str) -> str:
    meta = await ledger.reader.meta(session)
    assert meta is not None
    return meta.replica


async def move(here: Replica, there: Replica, session: str, terms: Terms, fence: int = 2) -> None:
    await there.registry.prepare(session, terms.manifest(), claim(fence=fence))
    order = HandOver(there.name, fence)
    await here.registry.departures.hand_over(session, order, grace_s=0.05)


# --- a death before and after each step -----------------------------------------------------------

TARGET_STEPS = (
    ("offer", 1),
    ("load", 1),
    ("feed", 1),
    ("hear", 1),
    ("acquire", 1),
    ("renew", 1),
    ("load", 2),
    ("hear", 2),
    ("accept", 1),
    ("feed", 2),
    ("commit", 1),
    ("journal", 1),
)
"""In the order in which the target goes through them: making ready, its lease, its first unit."""
SOURCE_STEPS = ("accept", "feed", "commit", "journal", "renew")
"""Of the owner while the target is ready already; its last write is a test of its own."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", TARGET_STEPS, ids=lambda step: f"{step[0]}-{step[1]}")
@pytest.mark.parametrize("back", [True, False], ids=["source", "third"])
async def test_the_target_dies(
    valkey: EmbeddedValkey,
    ground: Yard,
    monkeypatch: pytest.MonkeyPatch,
    step: tuple[str, int],
    after: bool,
    back: bool,
) -> None:
    session, terms = f"t-{step[0]}-{step[1]}-{after}-{back}", Terms("context")
    calm = await calm_tokens(valkey, terms.mode)
    here, there, third = [await ground.build(f"{name}-{session}") for name in ("a", "b", "c")]
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(BEFORE)
    mortal = Mortal(there, *step, after)
    mortal.bind(monkeypatch)
    ground.come_back(mortal)

    async def on_the_way() -> None:
        await move(here, there, session, terms)
        await caller.dial(there)
        await caller.talk(UNITS)

    way = asyncio.create_task(on_the_way())
    try:
        async with asyncio.timeout(PATIENCE_S):
            await mortal.dead.wait()
    finally:
        way.cancel()
        await asyncio.gather(way, return_exceptions=True)

    if await owner_of(third.ledger, session) == here.name:
        await caller.talk(BEFORE + 2)  # it never stopped
        assert here.registry.live[session].lease.fence == 1
    else:
        heir = here if back else third
        heir.registry.declare_dead(there.name)
        await caller.dial(heir)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(third.ledger, session) == calm
    # The dead one comes back to itself and touches nothing.
    mortal.back.set()
    await eventually(lambda: session not in there.registry.live)
    await caller.talk(UNITS + 1)
    check_events(caller)
    await eventually(lambda: not there.stages.held())


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("mode", MODES)
async def test_the_source_dies(
    valkey: EmbeddedValkey,
    ground: Yard,
    monkeypatch: pytest.MonkeyPatch,
    after: bool,
    mode: Mode,
) -> None:
    """With its last write; the target was prepared, so it goes on at once in any case."""
    session, terms = f"s-{after}-{mode}", Terms(mode)
    calm = await calm_tokens(valkey, terms.mode)
    here, there = [await ground.build(f"{name}-{session}") for name in ("a", "b")]
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(BEFORE)
    mortal = Mortal(here, "hand_over", 1, after)
    mortal.bind(monkeypatch)
    ground.come_back(mortal)
    way = asyncio.create_task(move(here, there, session, terms))
    await mortal.dead.wait()
    there.registry.declare_dead(here.name)
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, session) == calm
    ahead = {one.stream for one in there.stages.thinker.opened_ahead}
    first = next(one for one in there.stages.thinker.submissions if one.unit == BEFORE + 1)
    assert first.stream in ahead  # what was made ready serves however the lease came
    mortal.back.set()
    await asyncio.gather(way, return_exceptions=True)
    await eventually(lambda: session not in here.registry.live)
    await caller.talk(UNITS + 1)
    check_events(caller)


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("step", SOURCE_STEPS)
async def test_the_source_dies_when_the_target_is_ready(
    valkey: EmbeddedValkey, ground: Yard, monkeypatch: pytest.MonkeyPatch, step: str, after: bool
) -> None:
    """In a unit that nobody will hand over: what it left unfinished is done by the target."""
    session, terms = f"r-{step}-{after}", Terms("context")
    calm = await calm_tokens(valkey, terms.mode)
    here, there = [await ground.build(f"{name}-{session}") for name in ("a", "b")]
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(BEFORE)
    assert await there.registry.prepare(session, terms.manifest(), claim(fence=2)) == BEFORE
    mortal = Mortal(here, step, 1, after)
    mortal.bind(monkeypatch)
    ground.come_back(mortal)
    await caller.say(BEFORE + 1)
    async with asyncio.timeout(PATIENCE_S):
        await mortal.dead.wait()
    there.registry.declare_dead(here.name)
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, session) == calm
    mortal.back.set()
    await eventually(lambda: session not in here.registry.live)
    await caller.talk(UNITS + 1)
    check_events(caller)
    await eventually(lambda: not here.stages.held())


async def test_a_lease_that_the_target_never_takes_goes_back_with_the_streams(
    ground: Yard, monkeypatch: pytest.MonkeyPatch, valkey: EmbeddedValkey
) -> None:
    """Nobody knows that the target is dead: its lease runs out. The source has kept what it had, so
    that no prompt is rebuilt."""
    leases_run_out(monkeypatch)
    terms = Terms("basic")
    calm = await calm_tokens(valkey, terms.mode)
    here, there = [await ground.build(f"{name}-never") for name in ("a", "b")]
    await here.open("never", terms)
    caller = Caller("never")
    await caller.dial(here)
    await caller.talk(BEFORE)
    mortal = Mortal(there, "acquire", 1, after=False)
    mortal.bind(monkeypatch)
    ground.come_back(mortal)
    await move(here, there, "never", terms)
    await mortal.dead.wait()
    assert (here.registry.free_slots, len(here.stages.thinker.streams)) == (3, 1)
    streams = set(here.stages.thinker.streams)
    await caller.dial(here)  # waits for the lease
    await caller.talk(BEFORE + 1)
    assert caller.units[-1].rebuild_cause in (None, "slide")
    if caller.units[-1].rebuild_cause is None:
        assert set(here.stages.thinker.streams) == streams
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(here.ledger, "never") == calm
    assert here.registry.free_slots == 3


async def test_what_the_source_keeps_it_keeps_for_a_while(
    ground: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standing_by, "KEEP_S", 2.0)
    here, there = [await ground.build(f"{name}-while") for name in ("a", "b")]
    await here.open("while", Terms("context"))
    caller = Caller("while")
    await caller.dial(here)
    await caller.talk(3)
    await move(here, there, "while", Terms("context"))
    assert here.registry.free_slots == 3
    await eventually(lambda: (here.registry.free_slots, here.stages.held()) == (4, []))


@pytest.mark.parametrize("stage", ["thinker", "encoder", "talker", "code2wav"])
@pytest.mark.parametrize("moved", [False, True], ids=["ready", "moved"])
async def test_a_stage_of_the_target_dies(
    valkey: EmbeddedValkey, ground: Yard, stage: str, moved: bool
) -> None:
    session, terms = f"stage-{stage}-{moved}", Terms("context")
    calm = await calm_tokens(valkey, terms.mode)
    here, there = [await ground.build(f"{name}-{session}") for name in ("a", "b")]
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(BEFORE)
    await there.registry.prepare(session, terms.manifest(), claim(fence=2))
    dying: Any = getattr(there.stages, stage)
    if not moved:
        dying.kill()
        await dying.health()
        await caller.talk(BEFORE + 2)
    await here.registry.departures.hand_over(session, HandOver(there.name, 2), grace_s=0)
    await caller.dial(there)
    if moved:
        dying.kill()
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, session) == calm


async def test_stages_that_do_not_answer_refuse_to_prepare(ground: Yard) -> None:
    here, there = [await ground.build(f"{name}-refuses") for name in ("a", "b")]
    await here.open("refuses", Terms("context"))
    caller = Caller("refuses")
    await caller.dial(here)
    await caller.talk(3)
    there.stages.thinker.fail(3, StageFault.TIMEOUT)
    with pytest.raises(ClientError) as error:
        await there.registry.prepare("refuses", Terms("context").manifest(), claim(fence=2))
    assert error.value.code is ErrorCode.NOT_READY
    assert there.registry.free_slots == 4
    await eventually(lambda: there.stages.held() == [])
    await move(here, there, "refuses", Terms("context"), fence=2)


# --- lost replies ---------------------------------------------------------------------------------


@pytest.mark.parametrize("lost", [1, 2, 3])
async def test_replies_that_are_lost_hand_over_once(
    valkey: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: int
) -> None:
    session, terms = f"lossy-{lost}", Terms("context")
    calm = await calm_tokens(valkey, terms.mode)
    async with (
        LossyProxy(valkey.url, tmp_path) as proxy,
        replica(proxy.url, "lossy", call_timeout_ms=300) as here,
        replica(valkey.url, "other") as other,
    ):
        await here.open(session, terms)
        caller = Caller(session)
        await caller.dial(here)
        await caller.talk(BEFORE)
        real, tries = here.ledger.moves.hand_over, 0

        async def without_reply(lease: Lease, head: Head, *, replica: str, fence: int) -> None:
            nonlocal tries
            if not tries:
                proxy.lose_replies = lost
            tries += 1
            await real(lease, head, replica=replica, fence=fence)

        monkeypatch.setattr(here.ledger.moves, "hand_over", without_reply)
        await move(here, other, session, terms)
        assert proxy.lost == lost
        await caller.dial(other)
        await caller.talk(UNITS)
        check_events(caller)
        assert await tokens(other.ledger, session) == calm


@pytest.mark.parametrize("arrives", [True, False], ids=["arrives-late", "times-out"])
async def test_a_ledger_that_is_away_for_the_call(
    valkey: EmbeddedValkey, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arrives: bool
) -> None:
    """The owner gives up waiting and goes on, unless what it sent moves the lease after all."""
    monkeypatch.setattr(passing_on, "HAND_OVER_S", 0.3)
    session, terms = f"away-{arrives}", Terms("context")
    calm = await calm_tokens(valkey, terms.mode)
    async with (
        LossyProxy(valkey.url, tmp_path) as proxy,
        replica(proxy.url, "cut-off", call_timeout_ms=300) as here,
        replica(valkey.url, "other") as other,
    ):
        await here.open(session, terms)
        caller = Caller(session)
        await caller.dial(here)
        await caller.talk(BEFORE)
        real = here.ledger.moves.hand_over

        async def into_nothing(lease: Lease, head: Head, *, replica: str, fence: int) -> None:
            proxy.open_gate.clear()
            if not arrives:
                await asyncio.Event().wait()
            await real(lease, head, replica=replica, fence=fence)

        monkeypatch.setattr(here.ledger.moves, "hand_over", into_nothing)
        with pytest.raises(ClientError) as error:
            await move(here, other, session, terms)
        assert error.value.code is ErrorCode.LEDGER_UNAVAILABLE
        proxy.open_gate.set()
        if arrives:
            closed = await caller.until(lambda event: isinstance(event, Closed))
            assert isinstance(closed, Closed)
            assert closed.code is ErrorCode.LEASE_LOST
            await caller.dial(other)
        await caller.talk(UNITS)
        check_events(caller)
        assert await tokens(other.ledger, session) == calm
        assert (session in here.registry.live) is not arrives


# --- the scripts alone ----------------------------------------------------------------------------


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    connected = await Ledger.connect(valkey.url, PATIENT)
    yield connected
    await connected.close()


def offer(session: str, fence: int, nonce: str = "n", replica: str = "replica-b") -> Offer:
    return Offer(session, replica, fence, nonce * 32, f"{replica}:1")


async def test_who_may_offer(ledger: Ledger) -> None:
    moves = ledger.moves
    with pytest.raises(SessionUnknown):
        await moves.offer(offer("nothing", 2))
    writer = await Writer.create(ledger, "offers")
    with pytest.raises(StaleFence):
        await moves.offer(offer("offers", writer.lease.fence))
    with pytest.raises(NotOffered):
        await moves.offer(offer("offers", 5, replica=writer.lease.replica))
    await moves.offer(offer("offers", 5))
    await moves.offer(offer("offers", 5, "m"))
    for other in (offer("offers", 5, replica="replica-c"), offer("offers", 4)):
        with pytest.raises(StaleFence):
            await moves.offer(other)
    await moves.offer(offer("offers", 6, "m", "replica-c"))
    with pytest.raises(StaleFence):
        await moves.withdraw(offer("offers", 5))
    await writer.unit(1)  # the owner is not concerned
    await ledger.release(writer.lease)
    with pytest.raises(NotOffered):
        await moves.offer(offer("offers", 7))
    await ledger.erase("offers")
    with pytest.raises(SessionErased):
        await moves.offer(offer("offers", 8))


async def test_what_is_handed_over(ledger: Ledger) -> None:
    writer = await Writer.create(ledger, "handed")
    lease = writer.lease

    async def give(fence: int = 5, replica: str = "replica-b") -> None:
        await ledger.moves.hand_over(lease, writer.head, replica=replica, fence=fence)

    await writer.unit(1)
    with pytest.raises(NotOffered):
        await give()
    await ledger.moves.offer(offer("handed", 5))
    for wrong in ({"fence": 4}, {"replica": "replica-c"}):
        with pytest.raises(NotOffered):
            await give(**wrong)
    await ledger.moves.withdraw(offer("handed", 5))
    with pytest.raises(NotOffered):
        await give()
    await ledger.moves.offer(offer("handed", 5))
    await writer.accept(2)
    with pytest.raises(HeadMismatch):
        await give()
    await writer.commit(2)
    with pytest.raises(LeaseHeld):
        await ledger.acquire("handed", "replica-b", fence=5, nonce="n" * 32)
    await give()
    await give()
    meta = await ledger.reader.meta("handed")
    assert meta is not None
    assert (meta.fence, meta.nonce, meta.replica) == (5, "n" * 32, "replica-b")
    assert meta.address == "replica-b:1"
    with pytest.raises(LeaseLost):
        await writer.accept(3)
    with pytest.raises(LeaseLost):
        await ledger.renew(lease)
    new = await ledger.acquire("handed", "replica-b", fence=5, nonce="n" * 32)
    assert (new.fence, new.nonce, new.woken) == (5, "n" * 32, True)
    await ledger.renew(new)
    await give()  # a repeat that comes late changes nothing
    await ledger.renew(new)
    await ledger.release(new, ended="over")
    with pytest.raises(SessionEnded):
        await ledger.moves.offer(offer("handed", 9))
