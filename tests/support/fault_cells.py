"""One cell of the fault matrix: two people talk to two sessions on one replica; at a moment of the
first one's conversation something breaks, and both go on to their end wherever they can."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from session_kit import second
from support.histories import RETRY_S, Lost, Person, Street
from support.observing import Observer
from support.resp_proxy import Deed, Plan, RespProxy, Seen
from support.socket_proxy import SocketProxy
from websockets.asyncio.client import ClientConnection

from duplex_sidecar.ledger.errors import LedgerUnavailable
from duplex_sidecar.protocol.errors import ClientError, ErrorCode

SECOND_UNIT = 3
"""Nothing is struck before that unit, but an opening."""


class Watch(Plan):
    """Tells of the nth command of that name of that session, and holds it until the blow has begun.
    All commands meet `then`. unit_s: each unit of that session takes so long at least until then,
    since what leads up to the command takes its time, too."""

    def __init__(self, session: str, name: str, nth: int = 1, unit_s: float = 0.0) -> None:
        self._session = session
        self._name = name
        self._left = nth
        self._unit_s = unit_s
        self.reached = asyncio.Event()
        self.struck = asyncio.Event()
        self.then = Plan()

    async def before(self, command: Seen) -> Deed:
        ours = command.facts.session == self._session and not self.reached.is_set()
        if ours and command.facts.name == self._name:
            self._left -= 1
            if self._left == 0:
                await self.stand_still()
        elif ours and command.facts.name == "accept":
            await asyncio.sleep(self._unit_s)
        return await self.then.before(command)

    async def after(self, command: Seen) -> Deed:
        return await self.then.after(command)

    async def stand_still(self) -> None:
        self.reached.set()
        await self.struck.wait()


class Witness(Person):
    """A person that keeps what a cell asks about. silences: of the times between one unit done and
    the next, each with the time at which it ended."""

    def __init__(
        self, world: Street, session: str, client: str, says: Callable[[int], bytes] | None = None
    ) -> None:
        super().__init__(world, session, client=client, sound=says or second)
        self.dialled = 0
        self.sounding = False
        self.silent_unit = 0
        """The last unit that listened, with no turn open."""
        self.silences: list[tuple[float, float]] = []
        self._last_s = time.monotonic()
        self._came = asyncio.Condition()

    async def _hear(self, socket: ClientConnection) -> dict[str, Any]:
        try:
            event = await super()._hear(socket)
        except BaseException:
            self.sounding = False
            raise
        match event["type"]:
            case "session.created" | "session.resumed":
                self.dialled += 1
            case "response.output_audio.delta":
                self.sounding = max(self.units_done, default=0) >= SECOND_UNIT
            case "response.done":
                self.sounding = False
            case "duplex.unit":
                now = time.monotonic()
                self.silences.append((now, now - self._last_s))
                self._last_s = now
                if event["decision"] == "listen" and not self.sounding:
                    self.silent_unit = event["unit"]
            case _:
                pass
        async with self._came:
            self._came.notify_all()
        return event

    async def until(self, condition: Callable[[], bool]) -> None:
        async with self._came:
            await self._came.wait_for(condition)

    def longest_silence_s(self, since_s: float) -> float:
        return max((silence for end, silence in self.silences if end > since_s), default=0.0)


class Host(Protocol):
    """One replica, seen from outside."""

    name: str
    proxy: RespProxy
    killed: asyncio.Event


class Grounds(Protocol):
    """Where cells are held: replicas over fake stages in one loop, or whole sidecars. outage_s:
    how long an outage lasts, longer than a lease. stop_s: how long a process stands still.
    patience_s: of a client that hears nothing. units: of each conversation. says: what people say,
    a second each; None: noise."""

    outage_s: float
    stop_s: float
    slack_s: float
    patience_s: float
    units: int
    says: Callable[[int], bytes] | None

    @property
    def hosts(self) -> Sequence[Host]: ...
    @property
    def observer(self) -> Observer: ...
    @property
    def sockets(self) -> SocketProxy: ...
    def watch(self, session: str, what: str) -> Watch: ...
    def moved_to(self, url: str) -> None: ...
    async def start(self, plan: Plan) -> Host: ...
    async def bury(self, host: Host) -> None: ...
    async def open_session(self, host: Host, session: str) -> None: ...
    async def park(self, host: Host, session: str) -> None: ...
    async def hand_over(self, host: Host, to: Host, session: str) -> None: ...
    async def declare_dead(self, lost: Host, to: Host) -> None: ...
    async def runs(self, host: Host, session: str) -> bool: ...
    async def kill(self, host: Host) -> None: ...
    async def terminate(self, host: Host) -> None: ...
    async def freeze(self, host: Host, gate: asyncio.Event) -> None: ...
    async def thaw(self, host: Host) -> None: ...
    async def kill_stage(self, host: Host, which: int) -> None: ...
    async def kill_engines(self, host: Host) -> None: ...


@dataclass
class Server:
    """The ledger's server, as a fault may treat it. url: of the one that takes writes now."""

    url: str
    restart: Callable[[], None]
    configure: Callable[[str, str], None]
    fail_over: Callable[[], str] | None = None
    """Returns the new URL. None: there is no replica."""


@dataclass
class Cell:
    """here: where both sessions begin. struck: the person at whom faults of one session aim. lost:
    nobody dials `here` any more. proof: a successor is told that `here` is dead. gate: what a fault
    keeps back goes on when it is set."""

    world: Grounds
    server: Server
    here: Host
    watch: Watch
    struck: Witness
    other: Witness
    seed: int
    lost: bool = False
    proof: bool = True
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    moving: "asyncio.Task[None] | None" = None
    heir: Host | None = None
    _buried: bool = False
    _asked: asyncio.Lock = field(default_factory=asyncio.Lock)

    @classmethod
    async def prepare(
        cls, world: Grounds, server: Server, name: str, watched: str, seed: int
    ) -> "Cell":
        """watched: name of a command, or `rebuild`, or "" for none."""
        struck = Witness(world, f"{name}-a", "a", world.says)
        other = Witness(world, f"{name}-b", "b", world.says)
        struck.wait_s = other.wait_s = world.patience_s
        watch = world.watch(struck.session, watched)
        here = await world.start(watch)
        cell = cls(world, server, here, watch, struck, other, seed)
        if watched == "hand_over":
            await cell._the_heir()  # it has to be there before the conversation is over
        return cell

    @property
    def people(self) -> tuple[Witness, Witness]:
        return self.struck, self.other

    async def goes_on(self) -> bool:
        """Whether each session is over or runs elsewhere."""
        for person in self.people:
            runs = self.heir and await self.world.runs(self.heir, person.session)
            if not person.ended and not runs:
                return False
        return True

    async def accompany(self, person: Witness) -> None:
        """From the opening to the end, as a client does that never gives up."""
        opened = False
        while person.ended is None:
            host = await self._place(person)
            with suppress(Lost, ConnectionError):
                opened = opened or await self._open(host, person)
                if opened:
                    await person.talk(host, self.world.units)
            await asyncio.sleep(RETRY_S)

    async def _place(self, person: Witness) -> Host:
        """Where a gateway would send that person."""
        if not self.lost and not await self._moved(person):
            return self.here
        if self.here.killed.is_set() and not self._buried:
            self._buried = True
            await self.world.bury(self.here)
        heir = await self._the_heir()
        if self.lost and self.proof:
            await self.world.declare_dead(self.here, heir)
        return heir

    async def _moved(self, person: Witness) -> bool:
        if person is not self.struck or self.moving is None:
            return False
        await asyncio.wait({self.moving})
        if not self.moving.cancelled() and self.moving.exception() is None:
            return True
        return self.heir is not None and await self.world.runs(self.heir, person.session)

    async def _the_heir(self) -> Host:
        """As a sidecar starts: it waits for a ledger that is not there yet."""
        async with self._asked:
            while self.heir is None:
                with suppress(LedgerUnavailable):
                    self.heir = await self.world.start(Plan())
                    break
                await asyncio.sleep(RETRY_S)
        return self.heir

    async def _open(self, host: Host, person: Witness) -> bool:
        try:
            await self.world.open_session(host, person.session)
        except ClientError as error:
            return error.code is ErrorCode.SESSION_ENDED
        return True

    def park(self) -> None:
        """As the operator moves a session whose new replica is not ready."""
        self.moving = asyncio.create_task(self.world.park(self.here, self.struck.session))

    def hand_over(self) -> None:
        """As the operator moves a session to a replica that is ready for it."""

        async def move() -> None:
            heir = await self._the_heir()
            await self.world.hand_over(self.here, heir, self.struck.session)

        self.moving = asyncio.create_task(move())
