"""Short conversations in which one thing happens that a wrong product gets wrong."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from fake_stage import Pause
from session_kit import Terms, eventually
from support.histories import Lost, Member, Person, World, converse
from support.interrupters import Interrupter
from support.resp_proxy import Deed, Plan, Seen

UNITS = 14
MANY_UNITS = 10_000
TERMS = Terms("context")
LATE_SCENE_S = 12.0

Scene = Callable[[World, str], Awaitable[None]]


async def plain(world: World, session: str) -> None:
    """Nothing happens."""
    await converse(world, Person(world, session), TERMS, UNITS, first=await world.start())


async def _stopped_in_the_middle(world: World, session: str) -> tuple[Member, Person, Pause]:
    """An owner that stands still in unit 8, accepted and not committed; its client is gone."""
    here = await world.start()
    pause = here.replica.stages.thinker.pause(8)
    person = Person(world, session)
    await world.open_session(here, session, TERMS)
    talking = asyncio.create_task(person.talk(here, UNITS))
    await pause.reached.wait()
    world.sockets.hang_up(person.client)
    with suppress(Lost):
        await talking
    return here, person, pause


async def zombie(world: World, session: str) -> None:
    """An owner is wrongly declared dead; it goes on when its successor has answered the unit."""
    old, person, pause = await _stopped_in_the_middle(world, session)
    heir = await world.start()
    world.declare_dead(old, heir)
    talking = asyncio.create_task(person.talk(heir, UNITS))
    await eventually(lambda: 8 in person.units_done or talking.done())
    pause.go.set()
    await talking
    await eventually(lambda: not old.replica.registry.live)


async def broken_lease(world: World, session: str) -> None:
    """An owner's lease is broken and nobody has it when it goes on; then a successor comes."""
    old, person, pause = await _stopped_in_the_middle(world, session)
    heir = await world.start()
    await heir.replica.ledger.break_lease(session, replica=old.name)
    world.observer.happened("declared_dead", old.name)
    pause.go.set()
    await eventually(lambda: not old.replica.registry.live or _done(old, session) >= 8)
    world.declare_dead(old, heir)
    await person.talk(heir, UNITS)


def _done(member: Member, session: str) -> int:
    return member.replica.registry.live[session].conversation.seq


async def one_way(world: World, session: str) -> None:
    """From unit 5 on the client hears nothing, while the server hears it; then it dials again."""
    here = await world.start()
    person = Person(world, session)
    await world.open_session(here, session, TERMS)
    talking = asyncio.create_task(person.talk(here, UNITS))
    await eventually(lambda: 5 in person.units_done)
    world.sockets.deafen(person.client)
    await eventually(lambda: _done(here, session) >= person.sent_unit)
    world.sockets.hang_up(person.client)
    with suppress(Lost):
        await talking
    await person.talk(here, UNITS)


class Slow(Plan):
    """Each reply takes its time."""

    async def after(self, command: Seen) -> Deed:
        await asyncio.sleep(0.03)
        return Deed.PASS


async def slow_ledger(world: World, session: str) -> None:
    here = await world.start()
    here.proxy.plan = Slow()
    await converse(world, Person(world, session), TERMS, UNITS, first=here)


class LateAccept(Plan):
    """The first sending of the accept of unit 6 arrives when its commit has been confirmed."""

    def __init__(self, member: Member) -> None:
        self._member = member

    async def before(self, command: Seen) -> Deed:
        return Deed.LATE if (command.facts.name, command.nth) == ("accept", 6) else Deed.PASS

    async def after(self, command: Seen) -> Deed:
        if (command.facts.name, command.nth) == ("commit", 6):
            await self._member.proxy.send_late()
        return Deed.PASS


async def late_arrival(world: World, session: str) -> None:
    """The network delivers an old packet long after it was sent again."""
    here = await world.start()
    here.proxy.plan = LateAccept(here)
    person = Person(world, session)
    await world.open_session(here, session, TERMS)
    with suppress(Lost, TimeoutError):
        async with asyncio.timeout(LATE_SCENE_S):
            await person.talk(here, UNITS)


class LostReplies(Plan):
    """The replies to one write are lost, again and again."""

    def __init__(self, times: int, name: str, nth: int) -> None:
        self._times = times
        self._write = (name, nth)
        self._operation: str | None = None

    async def after(self, command: Seen) -> Deed:
        if (command.facts.name, command.nth) == self._write:
            self._operation = command.facts.operation
        if command.facts.operation is None or command.facts.operation != self._operation:
            return Deed.PASS
        self._times -= 1
        return Deed.CUT if self._times >= 0 else Deed.PASS


async def lost_replies(world: World, session: str) -> None:
    here = await world.start()
    here.proxy.plan = LostReplies(5, "accept", 6)
    await converse(world, Person(world, session), TERMS, UNITS, first=here)


class DyingAtCommit(Plan):
    def __init__(self, world: World, member: Member) -> None:
        self._world = world
        self._member = member

    async def before(self, command: Seen) -> Deed:
        if (command.facts.name, command.nth) != ("commit", 8):
            return Deed.PASS
        self._world.kill(self._member)
        return Deed.CUT


async def death(world: World, session: str) -> None:
    """The owner dies with a unit accepted and not committed; a successor redoes it."""
    here = await world.start()
    here.proxy.plan = DyingAtCommit(world, here)
    await converse(world, Person(world, session), TERMS, UNITS, first=here)


class SlowThenNoRenewals(Plan):
    """One renewal is answered late, and none after it gets through for a while. over: that is
    past."""

    SLOW_S = 2.5
    AWAY_S = 5.2

    def __init__(self) -> None:
        self._since: float | None = None
        self.over = asyncio.Event()

    async def before(self, command: Seen) -> Deed:
        if command.facts.name != "renew" or command.nth <= 3:
            return Deed.PASS
        now = asyncio.get_running_loop().time()
        if now - (self._since or now) < self.AWAY_S:
            return Deed.CUT
        self.over.set()
        return Deed.PASS

    async def after(self, command: Seen) -> Deed:
        if (command.facts.name, command.nth) == ("renew", 3):
            self._since = asyncio.get_running_loop().time()
            await asyncio.sleep(self.SLOW_S)
        return Deed.PASS


async def slow_renewal(world: World, session: str) -> None:
    """Leases of this world last 4 s, with a margin of 2 s, and are renewed each 0.1 s. The client
    speaks on all the while. A machine that stands still for less than the margin is no reason for
    another verdict."""
    here = await world.start()
    plan = SlowThenNoRenewals()
    here.proxy.plan = plan
    person = Person(world, session)
    await world.open_session(here, session, TERMS)
    talking = asyncio.create_task(person.talk(here, MANY_UNITS))
    await plan.over.wait()
    world.sockets.hang_up(person.client)
    with suppress(Lost):
        await talking


async def interrupted(world: World, session: str) -> None:
    """The client stops replies, takes back what it has not heard, says what it has played."""
    await converse(world, Interrupter(world, session), TERMS, UNITS, first=await world.start())


class DyingAtCut(Plan):
    """The first truncation is in the ledger, and nobody is told of it."""

    def __init__(self, world: World, member: Member) -> None:
        self._world = world
        self._member = member

    async def after(self, command: Seen) -> Deed:
        if (command.facts.name, command.nth) != ("cut", 1):
            return Deed.PASS
        self._world.kill(self._member)
        return Deed.CUT


async def interrupted_death(world: World, session: str) -> None:
    """The owner dies with a command applied that nobody was told of; the client says it again."""
    here = await world.start()
    here.proxy.plan = DyingAtCut(world, here)
    await converse(world, Interrupter(world, session), TERMS, UNITS, first=here)


async def lost_replies_to_a_cut(world: World, session: str) -> None:
    """A truncation is done, and the owner does not know for a while."""
    here = await world.start()
    here.proxy.plan = LostReplies(5, "cut", 1)
    await converse(world, Interrupter(world, session), TERMS, UNITS, first=here)
