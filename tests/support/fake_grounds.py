"""Cells of the fault matrix on replicas over fake stages, all in one loop. Leases last 900 ms here,
so what lasts 30 s beside real ones of 3 s lasts little more than a second."""

import asyncio
from collections.abc import Sequence
from typing import cast

from fake_thinker import FakeThinker
from session_kit import VOCABULARY, WORD_IDS, Stages, Terms, claim, eventually
from support.fault_cells import SECOND_UNIT, Host, Watch
from support.histories import Member, World
from support.observing import Observer
from support.resp_proxy import Plan
from support.socket_proxy import SocketProxy

from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.stages.envelope import ThinkerAnswer, ThinkerFeed

LEASE_MS, MARGIN_MS, RENEW_MS = 900, 150, 100
TERMS = Terms("context")
"""Slides from unit 7 on."""
UNITS = 12
MOVED_FENCE = 2
"""The first owner has fence 1."""
GRACE_S = 0.2
HAND_OVER_UNIT_S = 0.15


class _WatchedThinker(FakeThinker):
    """Tells of the first rebuild of that session, and holds it until the blow has begun."""

    def __init__(self, session: str, watch: Watch) -> None:
        super().__init__(VOCABULARY, WORD_IDS)
        self._session = session
        self._watch = watch

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        rebuilds = request.opens and request.unit > SECOND_UNIT
        if rebuilds and request.session == self._session and not self._watch.reached.is_set():
            await self._watch.stand_still()
        return await super().feed(request)


class FakeGrounds:
    """Implements `fault_cells.Grounds`."""

    outage_s = 1.4
    stop_s = 1.4
    slack_s = 4.0
    patience_s = 30.0
    units = UNITS
    says = None

    def __init__(self, world: World) -> None:
        self.world = world
        self._thinker: FakeThinker | None = None

    @property
    def hosts(self) -> Sequence[Host]:
        return self.world.members

    @property
    def observer(self) -> Observer:
        return self.world.observer

    @property
    def sockets(self) -> SocketProxy:
        return self.world.sockets

    def watch(self, session: str, what: str) -> Watch:
        watch = Watch(session, what, unit_s=HAND_OVER_UNIT_S if what == "hand_over" else 0.0)
        if what == "rebuild":
            self._thinker = _WatchedThinker(session, watch)
        return watch

    def moved_to(self, url: str) -> None:
        self.world.url = url

    async def start(self, plan: Plan) -> Member:
        thinker, self._thinker = self._thinker, None
        stages = Stages() if thinker is None else Stages(thinker=thinker)
        return await self.world.start(plan, stages=stages)

    async def bury(self, host: Host) -> None:
        await self.world.bury(_member(host))

    async def open_session(self, host: Host, session: str) -> None:
        await self.world.open_session(_member(host), session, TERMS)

    async def park(self, host: Host, session: str) -> None:
        departures = _member(host).replica.registry.departures
        await self.world.unless_killed(_member(host), lambda: departures.park(session, grace_s=0.0))

    async def hand_over(self, host: Host, to: Host, session: str) -> None:
        source, target = _member(host), _member(to)
        moved = claim(fence=MOVED_FENCE)
        manifest = TERMS.manifest()
        await self.world.unless_killed(
            target, lambda: target.replica.registry.prepare(session, manifest, moved)
        )
        order = HandOver(target.name, MOVED_FENCE)
        departures = source.replica.registry.departures
        await self.world.unless_killed(
            source, lambda: departures.hand_over(session, order, grace_s=0.0)
        )

    async def declare_dead(self, lost: Host, to: Host) -> None:
        self.world.declare_dead(_member(lost), _member(to))

    async def runs(self, host: Host, session: str) -> bool:
        return session in _member(host).replica.registry.live

    async def kill(self, host: Host) -> None:
        self.world.kill(_member(host))

    async def terminate(self, host: Host) -> None:
        departures = _member(host).replica.registry.departures
        departures.drain(GRACE_S)
        await departures.drained()
        await self.world.leave(_member(host))

    async def freeze(self, host: Host, gate: asyncio.Event) -> None:
        """Seen from outside. What it had under way passes when the gate opens."""
        self.world.sockets.hold(host.name, gate)

    async def thaw(self, host: Host) -> None:
        await eventually(lambda: not _member(host).replica.registry.live)

    async def kill_stage(self, host: Host, which: int) -> None:
        stages = _member(host).replica.stages
        every = (stages.encoder, stages.thinker, stages.talker, stages.code2wav)
        every[which % len(every)].kill(health_calls=3)

    async def kill_engines(self, host: Host) -> None:
        _member(host).replica.stages.thinker.kill(health_calls=3)
        _member(host).replica.stages.talker.kill(health_calls=2)


def _member(host: Host) -> Member:
    return cast(Member, host)
