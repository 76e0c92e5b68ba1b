"""Cells of the fault matrix on whole sidecars with real engines: processes that are killed, stopped
and told to leave, each behind a RESP proxy, all doors behind a socket proxy."""

import asyncio
import signal
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec
import psutil
from redis import Redis
from session_kit import TOKEN
from support.fault_cells import Cell, Host, Server, Watch
from support.fault_table import Fault, Moment, hold_cell
from support.histories import ledger_end
from support.material import manifest, speech
from support.observing import Observer
from support.processes import words_of
from support.resp_proxy import Plan, RespProxy
from support.sidecars import Bed
from support.socket_proxy import SocketProxy
from support.valkeys import FailingPair, crash

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar
from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import LedgerEnd, Reference
from duplex_sidecar.history.verdict import Report
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.model import load_model

WINDOW_UNITS = 8
SESSION = manifest(
    window={"mode": "context", "contextMaxUnits": WINDOW_UNITS, "contextPreviousMaxTokens": 60},
    lifecycle={"disconnectGrace": "10m"},
)
UNITS = 18
MOVED_FENCE = 2
"""The first owner has fence 1."""
MAX_MODEL_TOKENS = 512
STAGES = ("encoder", "thinker", "talker", "code2wav")
POLL_S = 0.1
END_S = 60.0
CELL_S = 420.0


@dataclass(eq=False)
class RealHost:
    """Implements `fault_cells.Host`. gone: its process has ended or was told to."""

    name: str
    proxy: RespProxy
    sidecar: LocalSidecar
    killed: asyncio.Event = field(default_factory=asyncio.Event)
    gone: bool = False


class Fleet:
    """Two sidecars that are ready before each cell. Use as `async with`.

    pair: they stand on it, with durability `replicated`, and not on the bed's server; only there
    can a server fail over."""

    def __init__(self, bed: Bed, pair: FailingPair | None = None) -> None:
        self.bed = bed
        self.url = pair.primary.url if pair else bed.valkey.url
        """Of the ledger's server."""
        self._pair = pair
        self.hosts: list[RealHost] = []
        self.special_ids: frozenset[int] = frozenset()
        self.tokens: tuple[tuple[int, ...], ...] = ()
        """Of a conversation in which nothing happened."""
        self._started = 0

    async def __aenter__(self) -> "Fleet":
        return self

    async def __aexit__(self, *_: object) -> None:
        for host in self.hosts:
            host.gone = True
        await self._tidy()

    async def stand_ready(self) -> None:
        await self._tidy()
        while len(self.hosts) < 2:
            self.hosts.append(await self._start())
        for host in self.hosts:
            await asyncio.to_thread(host.sidecar.wait_ready)

    async def _tidy(self) -> None:
        for host in [host for host in self.hosts if host.gone]:
            self.hosts.remove(host)
            await asyncio.to_thread(host.sidecar.stop)
            await host.proxy.__aexit__()

    async def _start(self) -> RealHost:
        self._started += 1
        name = f"real-{self._started}"
        nobody = Observer("between", special_ids=self.special_ids)
        path = self.bed.work / f"{self._started}.resp"
        proxy = await RespProxy(self.url, path, name, nobody).__aenter__()
        durability = Durability.REPLICATED if self._pair else Durability.MEMORY
        sidecar = self.bed.prepare(
            name,
            redis_url=proxy.url,
            ledger_durability=durability.value,
            max_model_tokens=MAX_MODEL_TOKENS,
            rebuild_ahead=False,
        )
        if not self.special_ids:
            model = await asyncio.to_thread(load_model, sidecar.settings)
            self.special_ids = model.vocabulary.special_ids
        await asyncio.to_thread(sidecar.start)
        return RealHost(name, proxy, sidecar)

    def server(self) -> Server:
        valkey = self.bed.valkey

        def restart() -> None:
            crash(valkey)
            valkey.start()

        def configure(name: str, value: str) -> None:
            with Redis.from_url(valkey.url) as client:
                client.config_set(name, value)

        return Server(self.url, restart, configure, self._pair.fail_over if self._pair else None)

    async def hold(self, name: str, fault: Fault, moment: Moment, seed: int) -> "RealGrounds":
        """One cell; its observers are asked with `report`. Its sessions are erased."""
        await self.stand_ready()
        async with RealGrounds(self, name) as grounds:
            watched = moment.watched
            cell = await Cell.prepare(grounds, self.server(), name, watched, seed)
            try:
                async with asyncio.timeout(CELL_S):
                    await hold_cell(cell, fault, moment)
            finally:
                for person in cell.people:
                    await grounds.finish(person.session)
            return grounds


class RealGrounds:
    """Implements `fault_cells.Grounds` for one cell."""

    outage_s = 4.5
    stop_s = 30.0
    slack_s = 90.0
    """A stage that ended is back after that time, and less."""
    patience_s = 150.0
    units = UNITS

    def __init__(self, fleet: Fleet, name: str) -> None:
        self._fleet = fleet
        self._observer = Observer(name, special_ids=fleet.special_ids)
        ports = {host.name: host.sidecar.settings.port for host in fleet.hosts}
        self._sockets = SocketProxy(0, self._observer, ports)
        self._asked = 0
        self.says: Callable[[int], bytes] | None = lambda number: speech(1, number - 1)

    async def __aenter__(self) -> "RealGrounds":
        await self._sockets.__aenter__()
        for host in self._fleet.hosts:
            host.proxy.observer = self._observer
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._sockets.__aexit__()

    @property
    def hosts(self) -> Sequence[Host]:
        return self._fleet.hosts

    @property
    def observer(self) -> Observer:
        return self._observer

    @property
    def sockets(self) -> SocketProxy:
        return self._sockets

    def watch(self, session: str, what: str) -> Watch:
        """An accept with a full window is followed by a rebuild."""
        if what == "rebuild":
            return Watch(session, "accept", WINDOW_UNITS + 2)
        return Watch(session, what)

    def moved_to(self, url: str) -> None:
        self._fleet.url = url

    async def start(self, plan: Plan) -> RealHost:
        """The next one that stands ready."""
        host = self._fleet.hosts[self._asked]
        self._asked += 1
        host.proxy.plan = plan
        return host

    async def bury(self, host: Host) -> None:
        """The fleet does."""

    async def open_session(self, host: Host, session: str) -> None:
        try:
            await asyncio.to_thread(_sidecar(host).open_session, session, SESSION, TOKEN)
        except ApiError as error:
            if error.body.get("error", {}).get("code") == ErrorCode.SESSION_ENDED.value:
                raise ClientError(ErrorCode.SESSION_ENDED) from error
            raise ConnectionError(str(error)) from error
        except OSError as error:
            raise ConnectionError(str(error)) from error

    async def park(self, host: Host, session: str) -> None:
        await self._admin(host, "POST", f"/sessions/{session}/park", {})

    async def hand_over(self, host: Host, to: Host, session: str) -> None:
        named = {"manifest": SESSION, "token": TOKEN, "fence": MOVED_FENCE}
        await self._admin(to, "POST", f"/sessions/{session}/prepare", named)
        order = {"target": to.name, "fence": MOVED_FENCE}
        await self._admin(host, "POST", f"/sessions/{session}/hand-over", order)

    async def declare_dead(self, lost: Host, to: Host) -> None:
        await asyncio.to_thread(_sidecar(to).declare_dead, lost.name)
        self._observer.happened("declared_dead", lost.name)

    async def runs(self, host: Host, session: str) -> bool:
        listed = await self._admin(host, "GET", "/sessions")
        return any(session in each.values() for each in listed["sessions"])

    async def _admin(
        self, host: Host, method: str, path: str, body: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        return await asyncio.to_thread(_sidecar(host).admin, method, path, body)

    # --- what breaks ------------------------------------------------------------------------------

    async def kill(self, host: Host) -> None:
        tree = _sidecar(host).tree()
        _signal(tree, signal.SIGKILL)
        host.proxy.kill()
        self._sockets.kill(host.name)
        self._observer.happened("killed", host.name)
        _real(host).gone = True
        host.killed.set()
        await asyncio.to_thread(psutil.wait_procs, tree, timeout=END_S)

    async def terminate(self, host: Host) -> None:
        _real(host).gone = True
        await asyncio.to_thread(_sidecar(host).stop, END_S)

    async def freeze(self, host: Host, gate: asyncio.Event) -> None:
        _signal(_sidecar(host).tree(), signal.SIGSTOP)

    async def thaw(self, host: Host) -> None:
        """It finds that its sessions are somebody else's."""
        _signal(_sidecar(host).tree(), signal.SIGCONT)
        async with asyncio.timeout(END_S):
            while (await self._admin(host, "GET", "/sessions"))["sessions"]:  # noqa: ASYNC110
                await asyncio.sleep(POLL_S)

    async def kill_stage(self, host: Host, which: int) -> None:
        process = _sidecar(host).stage_process(STAGES[which % len(STAGES)])
        assert process is not None
        _signal([process], signal.SIGKILL)

    async def kill_engines(self, host: Host) -> None:
        engines = [process for process in _sidecar(host).tree() if _is_engine(process)]
        assert engines
        _signal(engines, signal.SIGKILL)

    # --- the end ----------------------------------------------------------------------------------

    async def finish(self, session: str) -> None:
        """Look at the ledger, then erase it."""
        url = self._fleet.url
        self._observer.note(await ledger_end(url, session, self._observer.clock_ns()))
        if self._fleet.tokens:
            self._observer.note(Reference(session, self._fleet.tokens))
        ledger = await Ledger.connect(url)
        try:
            await ledger.erase(session)
        finally:
            await ledger.close()

    def report(self) -> Report:
        return check_history(self._observer.observations)

    def served(self) -> Counter[str]:
        """How many units each replica has committed, as the ledger says in the end."""
        ends = [one for one in self._observer.observations if isinstance(one, LedgerEnd)]
        lines = [msgspec.json.decode(line, type=Line) for end in ends for line in end.lines]
        return Counter(line.replica for line in lines if line.kind == "unit" and line.committed)


def _real(host: Host) -> RealHost:
    return cast(RealHost, host)


def _sidecar(host: Host) -> LocalSidecar:
    return _real(host).sidecar


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _is_engine(process: psutil.Process) -> bool:
    return any("EngineCore" in word for word in words_of(process))


async def undisturbed_tokens(fleet: Fleet) -> tuple[tuple[int, ...], ...]:
    """Of a conversation in which nothing happens."""
    await fleet.stand_ready()
    nothing = Fault("nothing", _nothing, of_one=True)
    grounds = await fleet.hold("calm", nothing, Moment("closing", "release"), 0)
    assert grounds.report().violations == ()
    end = next(one for one in grounds.observer.observations if isinstance(one, LedgerEnd))
    units = [msgspec.json.decode(line, type=Line) for line in end.lines]
    return tuple(unit.token_ids for unit in units if unit.kind == "unit" and unit.committed)


async def _nothing(cell: Cell) -> None:
    """Nothing breaks."""
