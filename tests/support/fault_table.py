"""The two tables of the fault matrix: what breaks, and when; and how a cell is held."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from support.fault_cells import SECOND_UNIT, Cell
from support.resp_proxy import Deed, Plan, Seen
from support.standstill import Standstill

SHORT_S = 0.5
POLL_S = 0.05

Act = Callable[[Cell], Awaitable[None]]


async def nothing(cell: Cell) -> None:
    """It heals by itself."""


@dataclass(frozen=True)
class Fault:
    """of_one: of one session alone; the other one in the replica notices nothing. It may cost an
    outage and a lease in silence, and nothing else."""

    name: str
    strike: Act
    heal: Act = nothing
    of_one: bool = False
    needs_replica: bool = False


@dataclass(frozen=True)
class Moment:
    """watched: the command whose sending is that moment (`rebuild`: an opening of a Thinker's
    stream), held until the blow has begun. Else `reached` waits for what the client heard."""

    name: str
    watched: str = ""
    reached: Act = nothing


# --- what breaks ----------------------------------------------------------------------------------


async def _kill(cell: Cell) -> None:
    cell.lost = True
    await cell.world.kill(cell.here)


async def _terminate(cell: Cell) -> None:
    cell.lost, cell.proof = True, False
    await cell.world.terminate(cell.here)


class _Held(Plan):
    """Nothing passes until `gate`, in either way: then in its old order, or not at all."""

    def __init__(self, gate: asyncio.Event, *, then: Deed = Deed.PASS, answers_only: bool) -> None:
        self._gate = gate
        self._then = then
        self._answers_only = answers_only

    async def before(self, command: Seen) -> Deed:
        if self._answers_only:
            return Deed.PASS
        await self._gate.wait()
        return self._then

    async def after(self, command: Seen) -> Deed:
        await self._gate.wait()
        return self._then


async def _freeze(cell: Cell) -> None:
    """Its clients give it up; nobody knows whether it is dead."""
    cell.lost, cell.proof = True, False
    cell.watch.then = _Held(cell.gate, answers_only=False)
    await cell.world.freeze(cell.here, cell.gate)
    for person in cell.people:
        cell.world.sockets.hang_up(person.client)
    if cell.moving is not None:
        cell.moving.cancel()  # nobody waits for its answer


async def _thaw(cell: Cell) -> None:
    """When its sessions are over or under way elsewhere. What it had under way arrives now."""
    await asyncio.sleep(cell.world.stop_s)
    while not await cell.goes_on():  # noqa: ASYNC110
        await asyncio.sleep(POLL_S)
    cell.gate.set()
    cell.watch.then = Plan()
    await cell.world.thaw(cell.here)


async def _kill_stage(cell: Cell) -> None:
    await cell.world.kill_stage(cell.here, cell.seed)


async def _kill_engines(cell: Cell) -> None:
    """The largest processes: what holds the weights and the caches."""
    await cell.world.kill_engines(cell.here)


async def _restart_server(cell: Cell) -> None:
    await asyncio.to_thread(cell.server.restart)


async def _fail_over(cell: Cell) -> None:
    assert cell.server.fail_over is not None
    cell.server.url = await asyncio.to_thread(cell.server.fail_over)
    cell.world.moved_to(cell.server.url)
    for host in cell.world.hosts:
        host.proxy.upstream = cell.server.url
        host.proxy.kill()
        host.proxy.shut = False


async def _cut_ledger(cell: Cell) -> None:
    cell.here.proxy.kill()


async def _join_ledger(cell: Cell) -> None:
    await asyncio.sleep(cell.world.outage_s)
    cell.here.proxy.shut = False


async def _mute_ledger(cell: Cell) -> None:
    """One way: commands arrive and are done, answers do not come back."""
    cell.watch.then = _Held(cell.gate, then=Deed.CUT, answers_only=True)


async def _unmute_ledger(cell: Cell) -> None:
    await asyncio.sleep(cell.world.outage_s)
    cell.watch.then = Plan()
    cell.gate.set()


class _Late(Plan):
    """Both ways take a time between two bounds."""

    def __init__(self, before_s: tuple[float, float], after_s: tuple[float, float], seed: int):
        self._chance = random.Random(seed)
        self._before_s, self._after_s = before_s, after_s

    async def before(self, command: Seen) -> Deed:
        await asyncio.sleep(self._chance.uniform(*self._before_s))
        return Deed.PASS

    async def after(self, command: Seen) -> Deed:
        await asyncio.sleep(self._chance.uniform(*self._after_s))
        return Deed.PASS


async def _delay_ledger(cell: Cell) -> None:
    cell.watch.then = _Late((0.0, 0.15), (0.0, 0.15), cell.seed)


async def _slow_server(cell: Cell) -> None:
    cell.watch.then = _Late((0.0, 0.0), (0.2, 0.2), cell.seed)


async def _quicken(cell: Cell) -> None:
    await asyncio.sleep(cell.world.outage_s)
    cell.watch.then = Plan()


async def _fill_server(cell: Cell) -> None:
    await asyncio.to_thread(cell.server.configure, "maxmemory", "1")


async def _empty_server(cell: Cell) -> None:
    await asyncio.sleep(cell.world.outage_s)
    await asyncio.to_thread(cell.server.configure, "maxmemory", "0")


async def _cut_client(cell: Cell) -> None:
    cell.world.sockets.hang_up(cell.struck.client)


async def _deafen_client(cell: Cell) -> None:
    cell.world.sockets.deafen(cell.struck.client)


async def _hang_up(cell: Cell) -> None:
    """A client that hears nothing dials again."""
    await asyncio.sleep(SHORT_S)
    cell.world.sockets.hang_up(cell.struck.client)


FAULTS = (
    Fault("sigkill", _kill),
    Fault("sigterm", _terminate),
    Fault("sigstop", _freeze, _thaw),
    Fault("stage-kill", _kill_stage),
    Fault("oom-kill", _kill_engines),
    Fault("server-restart", _restart_server),
    Fault("failover", _fail_over, needs_replica=True),
    Fault("ledger-delay", _delay_ledger, _quicken),
    Fault("ledger-cut", _cut_ledger, _join_ledger),
    Fault("ledger-one-way", _mute_ledger, _unmute_ledger),
    Fault("client-cut", _cut_client, of_one=True),
    Fault("client-one-way", _deafen_client, _hang_up, of_one=True),
    Fault("full-memory", _fill_server, _empty_server),
    Fault("slow-server", _slow_server, _quicken),
)

# --- when -----------------------------------------------------------------------------------------


async def _listening(cell: Cell) -> None:
    await cell.struck.until(lambda: cell.struck.silent_unit >= SECOND_UNIT)


async def _speaking(cell: Cell) -> None:
    await cell.struck.until(lambda: cell.struck.sounding)


async def _parking(cell: Cell) -> None:
    await cell.struck.until(lambda: max(cell.struck.units_done, default=0) > SECOND_UNIT)
    cell.park()


async def _handing_over(cell: Cell) -> None:
    await cell.struck.until(lambda: max(cell.struck.units_done, default=0) > SECOND_UNIT)
    cell.hand_over()


MOMENTS = (
    Moment("opening", "create"),
    Moment("listening", reached=_listening),
    Moment("speaking", reached=_speaking),
    Moment("rebuilding", "rebuild"),
    Moment("parking", "park", _parking),
    Moment("handing-over", "hand_over", _handing_over),
    Moment("closing", "release"),
)


async def hold_cell(cell: Cell, fault: Fault, moment: Moment) -> None:
    """The whole of it: returns when both conversations are over, with everything of both there and
    no silence longer than it may be."""
    with Standstill() as stood:
        await _hold(cell, fault, moment, stood)


async def _hold(cell: Cell, fault: Fault, moment: Moment, stood: Standstill) -> None:
    talking = [asyncio.create_task(cell.accompany(person)) for person in cell.people]
    try:
        await moment.reached(cell)
        if moment.watched:
            await cell.watch.reached.wait()
        began_s = time.monotonic()
        striking = asyncio.create_task(fault.strike(cell))
        await asyncio.sleep(0)  # the blow comes first, then what was held goes on
        cell.watch.struck.set()
        await striking
        await fault.heal(cell)
        over_s = time.monotonic() - began_s
        await asyncio.gather(*talking)
    finally:
        for task in (*talking, *([cell.moving] if cell.moving else [])):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
    for person in cell.people:
        assert person.ended == "session_ended"
        assert person.units_done == set(range(1, cell.world.units + 1))
        touched = person is cell.struck or not fault.of_one
        allowed_s = cell.world.slack_s + (over_s if touched else 0.0)
        allowed_s += stood.between_s(began_s, time.monotonic())
        assert person.longest_silence_s(began_s) <= allowed_s
        assert touched or person.dialled == 1
