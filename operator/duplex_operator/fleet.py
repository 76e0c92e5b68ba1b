"""All pods as their sidecars tell it: one feed each, and who has fallen silent.

A pod's feed is the first to know of its death: a beat comes each second. One that breaks off and
cannot be dialled again, or `suspect_after_s` without a line, makes the pod suspect. What follows
from that is decided elsewhere, by the leases of its sessions.
"""

import asyncio
import logging
import random
import time
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from duplex_operator.decide.status import is_news
from duplex_operator.feed import FeedLine, FeedPhase, FeedSession, HelloLine, PodLine
from duplex_operator.names import ADMIN_PORT, admin_server_name
from duplex_operator.objects import Kind, ObjectKey, PodObject, PodPhase
from duplex_operator.sidecar_client import (
    AdminAddress,
    AdminCredentials,
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
)
from duplex_operator.store import Change, Store
from duplex_operator.watch import DirtySet

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.2
LONGEST_RETRY_S = 2.0
WATCHDOG_PERIOD_S = 0.1
MOST_SESSIONS = 4096
MOST_ENDED = 8


@dataclass(frozen=True, slots=True)
class PodFeed:
    """One pod's latest word. slots, understands: of its hello.
    ledger_away: it would be ready, were it not for the ledger.
    listed: since it connected it has told of every session there.
    told_to_drain: this operator has asked it to, whether or not the feed says so yet.
    dialled: somebody listens for it.
    ended: earlier starts of its sidecar, the last of them; a container is started again only once
    it has ended. restarts: its container had been started again at least so often when `replica`
    began."""

    pod_uid: str
    pod: ObjectKey
    pool: ObjectKey
    connected: bool = False
    listed: bool = False
    replica: str = ""
    version: str = ""
    model_name: str = ""
    slots: int = 0
    free_slots: int = 0
    ready: bool = False
    ledger_away: bool = False
    draining: bool = False
    told_to_drain: bool = False
    dialled: bool = False
    suspect: bool = False
    understands: tuple[str, ...] = ()
    ended: tuple[str, ...] = ()
    restarts: int = 0

    @property
    def is_up(self) -> bool:
        """Whether it can run what it has: it is ready, or waits for the ledger alone."""
        return self.connected and not self.suspect and (self.ready or self.ledger_away)

    @property
    def is_unheard(self) -> bool:
        """Whether it is too early to say what is there: it was dialled just now, and has not told
        of every session."""
        return self.dialled and not (self.listed or self.suspect)

    @property
    def takes_sessions(self) -> bool:
        """Whether a session may be placed there now."""
        return (
            self.connected
            and self.listed
            and self.ready
            and not (self.draining or self.told_to_drain or self.suspect)
        )


@dataclass(slots=True)
class _Line:
    """The feed's task and what it has heard. heard_s: monotonic time of its last line, 0 before it
    was first dialled."""

    feed: PodFeed
    heard_s: float = 0.0
    sessions: dict[str, FeedSession] = field(default_factory=dict)
    untold: set[str] = field(default_factory=set)
    """Sessions of before this connection that it has not told of yet."""
    client: SidecarClient | None = None
    task: asyncio.Task[None] | None = None


class Fleet:
    """Follows the pods of `store`. Call `set_credentials` for each pool, `run` once."""

    def __init__(
        self,
        store: Store,
        dirty: DirtySet,
        *,
        suspect_after_s: float = 2.0,
        counters_period_s: float = 60.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._dirty = dirty
        self._suspect_after_s = suspect_after_s
        self._counters_period_s = counters_period_s
        self._clock = clock
        self._lines: dict[str, _Line] = {}
        self._credentials: dict[ObjectKey, AdminCredentials] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self.listeners: list[Callable[[ObjectKey], None]] = []
        """Told a pool's key when one of its pods changed (other than by a mere beat)."""
        store.listeners.pod.append(self._pod_changed)

    # What the feeds say

    def pod(self, pod_uid: str) -> PodFeed | None:
        line = self._lines.get(pod_uid)
        return None if line is None else line.feed

    def pods(self) -> tuple[PodFeed, ...]:
        return tuple(line.feed for line in self._lines.values())

    def sessions_on(self, pod_uid: str) -> Mapping[str, FeedSession]:
        """By session uid. What a pod said last, also while its feed is away."""
        line = self._lines.get(pod_uid)
        return {} if line is None else line.sessions

    def session(self, pod_uid: str, session_uid: str) -> FeedSession | None:
        return self.sessions_on(pod_uid).get(session_uid)

    def ended_replicas(self, pod_uid: str) -> tuple[str, ...]:
        """Starts of the pod's sidecar that are proven to be over: another one has said hello since,
        or the kubelet says that its container has ended and nothing is heard of it."""
        feed, pod = self.pod(pod_uid), self._store.pod_by_uid(pod_uid)
        if feed is None:
            return ()
        over = pod is not None and has_ended(pod, feed) and not feed.connected
        return (*feed.ended, feed.replica) if over and feed.replica else feed.ended

    def any_client(self) -> SidecarClient | None:
        """Of any pod that answers: for what every sidecar can do, such as erasing. One that is not
        ready yet may still be without the ledger."""
        live = [line for line in self._lines.values() if line.feed.connected and line.client]
        ready = [line for line in live if line.feed.ready]
        return random.choice(ready or live).client if live else None

    # Calls

    def set_credentials(self, pool: ObjectKey, credentials: AdminCredentials) -> None:
        """How to talk to the pool's pods. Changed ones make its feeds dial anew."""
        if self._credentials.get(pool) == credentials:
            return
        self._credentials[pool] = credentials
        for pod in self._store.pods_of(pool):
            self._forget(pod.meta.uid, keep_words=True)
            self._follow(pod)

    def client(self, pod_uid: str) -> SidecarClient | None:
        """None: no such pod, or its address or credentials are not known yet."""
        line = self._lines.get(pod_uid)
        return None if line is None else line.client

    async def drain(self, pod_uid: str, grace_s: float) -> None:
        """Takes the pod out of placement at once, then tells its sidecar. Raises
        SidecarUnreachableError; repeat it then."""
        line = self._lines.get(pod_uid)
        if line is None or line.client is None:
            raise SidecarUnreachableError("the pod cannot be reached yet")
        self._update(line, replace(line.feed, told_to_drain=True))
        await line.client.drain(grace_s)

    # Keeping up

    async def run(self) -> None:
        """The watchdog. Ends, and with it all feeds, when cancelled."""
        try:
            while True:
                await asyncio.sleep(WATCHDOG_PERIOD_S)
                for line in self._lines.values():
                    self._judge(line)
        finally:
            await self.close()

    async def close(self) -> None:
        lines, self._lines = list(self._lines.values()), {}
        for line in lines:
            if line.task is not None:
                line.task.cancel()
        await asyncio.gather(
            *(line.task for line in lines if line.task is not None), return_exceptions=True
        )
        for line in lines:
            if line.client is not None:
                await line.client.close()
        await asyncio.gather(*self._closing, return_exceptions=True)

    def _close_later(self, client: SidecarClient) -> None:
        """Whoever learns of a pod's death must not wait for its sockets."""
        task = asyncio.create_task(client.close())
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    def _judge(self, line: _Line) -> None:
        if line.heard_s and self._clock() - line.heard_s > self._suspect_after_s:
            self._suspect(line, f"silent for {self._suspect_after_s:.1f} s")

    def _suspect(self, line: _Line, why: str) -> None:
        if not line.feed.suspect:
            log.warning("pod %s: %s", line.feed.pod, why)
            self._update(line, replace(line.feed, suspect=True))
            self._mark_sessions(line)

    def _pod_changed(self, change: Change[PodObject]) -> None:
        pod = change.after
        if pod is None or pod.phase in (PodPhase.FAILED, PodPhase.SUCCEEDED):
            gone = change.before if pod is None else pod
            if gone is not None:
                line = self._lines.get(gone.meta.uid)
                self._forget(gone.meta.uid)
                if line is not None:
                    self._mark_sessions(line)
        else:
            before = change.before
            if before is not None and before.ip and before.ip != pod.ip:
                self._forget(pod.meta.uid)
            self._follow(pod)
        shown = pod or change.before
        if shown is not None:
            for session in self._store.placed_on(shown.meta.uid):
                self._dirty.mark(Kind.SESSION, session.meta.key)
            self._tell(shown.pool)

    def _follow(self, pod: PodObject) -> None:
        uid, credentials = pod.meta.uid, self._credentials.get(pod.pool)
        line = self._lines.get(uid)
        if line is None:
            feed = PodFeed(pod_uid=uid, pod=pod.meta.key, pool=pod.pool)
            line = self._lines[uid] = _Line(feed)
        if line.client is None and credentials is not None and pod.ip:
            server_name = admin_server_name(pod.pool.namespace, pod.pool.name)
            address = AdminAddress(pod.ip, ADMIN_PORT, server_name)
            line.client = SidecarClient(address, credentials)
            # A pod that never says a word is suspect in the end, too.
            line.heard_s = self._clock()
            line.feed = replace(line.feed, dialled=True)
            line.task = asyncio.create_task(self._listen(line, line.client), name=f"feed {uid}")

    def _forget(self, pod_uid: str, *, keep_words: bool = False) -> None:
        line = self._lines.pop(pod_uid, None)
        if line is None:
            return
        if line.task is not None:
            line.task.cancel()
        if line.client is not None:
            self._close_later(line.client)
        if keep_words:
            self._lines[pod_uid] = _Line(
                replace(line.feed, connected=False, listed=False, dialled=False),
                sessions=line.sessions,
            )

    async def _listen(self, line: _Line, client: SidecarClient) -> None:
        """Until cancelled, or until the line is taken off: below, a cancellation can come out as a
        timeout of the HTTP client."""
        retry_s = FIRST_RETRY_S
        while self._lines.get(line.feed.pod_uid) is line:
            try:
                async with aclosing(client.feed()) as lines:
                    async for said in lines:
                        retry_s = FIRST_RETRY_S
                        self._hear(line, said)
            except SidecarUnreachableError as error:
                log.debug("feed of %s: %s", line.feed.pod, error)
                if not line.feed.connected and line.feed.replica:
                    self._suspect(line, "its feed broke off and cannot be dialled")
            except SidecarRefusalError as error:
                log.debug("feed of %s: %s", line.feed.pod, error)
            except Exception:
                # Whatever it was, a pod that is never dialled again would stay suspect for good.
                log.exception("the feed of %s broke; it is dialled again", line.feed.pod)
            if line.feed.connected:
                self._update(line, replace(line.feed, connected=False, listed=False))
            await asyncio.sleep(retry_s * (0.5 + random.random()))
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)

    def _hear(self, line: _Line, said: FeedLine) -> None:
        line.heard_s = self._clock()
        heard = replace(line.feed, suspect=False) if line.feed.suspect else line.feed
        match said:
            case HelloLine():
                line.untold = set(line.sessions)
                pod = self._store.pod_by_uid(line.feed.pod_uid)
                self._update(line, _greeted(heard, said, 0 if pod is None else _restarts(pod)))
            case FeedSession():
                self._update(line, heard)
                self._hear_of_session(line, said)
            case PodLine():
                told = replace(
                    heard,
                    ready=said.ready,
                    ledger_away=said.ledger_away,
                    draining=said.draining,
                    free_slots=said.free_slots,
                )
                self._hear_end_of_list(line, told)
            case _:
                self._hear_end_of_list(line, heard)

    def _hear_of_session(self, line: _Line, said: FeedSession) -> None:
        """Counters move each second in each session: they wait for their time, spread out so that
        thousands of sessions do not have theirs together."""
        uid = said.session
        line.untold.discard(uid)
        before = line.sessions.get(uid)
        if said.phase is FeedPhase.GONE:
            line.sessions.pop(uid, None)
        elif before is not None or len(line.sessions) < MOST_SESSIONS:
            line.sessions[uid] = said
        session = self._store.session_by_uid(uid)
        if session is None:
            return
        if before is None or is_news(before, said):
            self._dirty.mark(Kind.SESSION, session.meta.key)
            return
        # An appointment of before, a parked session's retention say, may be days away.
        period_s, spread_s = self._counters_period_s, self._counters_period_s / 2
        if not self._dirty.awaits(Kind.SESSION, session.meta.key, period_s + spread_s):
            delay_s = period_s + random.random() * spread_s
            self._dirty.mark_after(Kind.SESSION, session.meta.key, delay_s)

    def _hear_end_of_list(self, line: _Line, heard: PodFeed) -> None:
        """The first line after the hello that is about no session: all sessions have been told of,
        and what was not told of is not there."""
        first = not line.feed.listed
        if first:
            for uid in line.untold:
                line.sessions.pop(uid, None)
            line.untold.clear()
        self._update(line, replace(heard, listed=True))
        if first:
            self._mark_sessions(line)

    def forget_session(self, pod_uid: str, session_uid: str) -> None:
        """An ended or parked session has been dealt with: its last word is not needed."""
        line = self._lines.get(pod_uid)
        said = None if line is None else line.sessions.get(session_uid)
        over = said is not None and said.phase in (FeedPhase.PARKED, FeedPhase.ENDED)
        if line is not None and over:
            del line.sessions[session_uid]

    def _update(self, line: _Line, feed: PodFeed) -> None:
        before, line.feed = line.feed, feed
        if before is not feed and before != feed:
            self._tell(feed.pool)

    def _tell(self, pool: ObjectKey) -> None:
        self._dirty.mark(Kind.POOL, pool)
        for listener in self.listeners:
            listener(pool)

    def _mark_sessions(self, line: _Line) -> None:
        for session in self._store.placed_on(line.feed.pod_uid):
            self._dirty.mark(Kind.SESSION, session.meta.key, urgent=True)


def has_ended(pod: PodObject, feed: PodFeed | None) -> bool:
    """Whether the container that the kubelet says has ended is the one of the feed's replica. The
    pod's object lags behind: it may still tell of the start before."""
    return bool(pod.sidecar_terminated) and pod.sidecar_restarts >= (feed.restarts if feed else 0)


def _restarts(pod: PodObject) -> int:
    """How often at least the container has been started again if a sidecar speaks in it now."""
    return pod.sidecar_restarts + (1 if pod.sidecar_terminated else 0)


def _greeted(feed: PodFeed, hello: HelloLine, restarts: int) -> PodFeed:
    """restarts: of the container, at least, as the pod's object has it."""
    another = feed.replica not in ("", hello.replica)
    if another:
        restarts = max(restarts, feed.restarts + 1)
    elif feed.replica:
        restarts = feed.restarts  # it has not begun anew
    return replace(
        feed,
        ended=(*feed.ended, feed.replica)[-MOST_ENDED:] if another else feed.ended,
        restarts=restarts,
        connected=True,
        listed=False,
        replica=hello.replica,
        version=hello.version,
        model_name=hello.model_name,
        slots=hello.slots,
        free_slots=hello.free_slots,
        ready=hello.ready,
        ledger_away=hello.ledger_away,
        draining=hello.draining,
        understands=hello.understands,
        told_to_drain=feed.told_to_drain and feed.replica == hello.replica,
    )
