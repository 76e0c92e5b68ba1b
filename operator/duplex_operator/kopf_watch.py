"""kopf, used for its watches alone: `on.event` of four kinds, each event handed over as it is.

It runs in a thread with a loop of its own. At its end kopf cancels every task of its loop that was
made after it started, and on a main thread it takes the process's signals: neither is shared here.
No handler state, no annotations, no finalizers, no peering, no Events.
"""

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import kopf

from duplex_api.constants import API_GROUP, API_VERSION_NAME, POOL_PLURAL, SESSION_PLURAL
from duplex_operator.objects import Kind, RawObject

log = logging.getLogger(__name__)

STOP_WITHIN_S = 2.0
"""Stopped in the middle of its start kopf takes longer: its thread then ends by itself."""
WATCH_TIMEOUT_S = 300
TLS_CLOSE_S = 0.25

Sink = Callable[[Kind, str | None, RawObject], None]
"""(kind, ADDED|MODIFIED|DELETED or None for an object of a list, the object)."""


class KopfWatch:
    """`run` watches until cancelled and calls `sink` on the caller's loop. identity: of this
    process; kopf would ask for its user's name, which a uid alone does not have."""

    def __init__(
        self,
        sink: Sink,
        login: Callable[[], kopf.ConnectionInfo],
        namespaces: Sequence[str],
        identity: str,
    ) -> None:
        self._sink = sink
        self._login = login
        self._namespaces = tuple(namespaces)
        self._identity = identity
        self._stop = threading.Event()
        self._started = threading.Event()
        self._ended = False

    @property
    def stands(self) -> bool:
        """kopf has started its watches, and has not ended since."""
        return self._started.is_set() and not self._ended

    async def run(self) -> None:
        """Raises RuntimeError when kopf ends by itself."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()

        def work() -> None:
            try:
                asyncio.run(self._watch(loop))
            except Exception:
                log.exception("the watches have ended")
            finally:
                self._ended = True
                if not loop.is_closed():
                    loop.call_soon_threadsafe(ended.set)

        thread = threading.Thread(target=work, name="kopf", daemon=True)
        thread.start()
        try:
            await ended.wait()
            raise RuntimeError("the watches have ended")
        finally:
            self._stop.set()
            await asyncio.shield(asyncio.to_thread(thread.join, STOP_WITHIN_S))

    async def _watch(self, loop: asyncio.AbstractEventLoop) -> None:
        everywhere = not self._namespaces
        try:
            await kopf.operator(
                registry=self._registry(loop, nodes=everywhere),
                settings=_settings(),
                identity=cast("Any", self._identity),
                standalone=True,
                clusterwide=everywhere,
                namespaces=self._namespaces,
                stop_flag=self._stop,
                ready_flag=self._started,
            )
        finally:
            # The TLS connections that kopf has let go of close while the loop still runs.
            await asyncio.sleep(TLS_CLOSE_S)

    def _registry(self, loop: asyncio.AbstractEventLoop, *, nodes: bool) -> kopf.OperatorRegistry:
        """Without rights of the cluster (watchNamespaces) nodes are not watched."""
        registry = kopf.OperatorRegistry()

        async def login(**_: Any) -> kopf.ConnectionInfo:
            return self._login()

        kopf.on.login(registry=registry)(login)
        ours = (API_GROUP, API_VERSION_NAME)
        kinds = {
            Kind.SESSION: (*ours, SESSION_PLURAL),
            Kind.POOL: (*ours, POOL_PLURAL),
            Kind.POD: ("", "v1", "pods"),
        } | ({Kind.NODE: ("", "v1", "nodes")} if nodes else {})
        for kind, (group, version, plural) in kinds.items():
            handler = self._handler(loop, kind)
            kopf.on.event(group, version, plural, id=str(kind), registry=registry)(handler)
        return registry

    def _handler(self, loop: asyncio.AbstractEventLoop, kind: Kind) -> Callable[..., Any]:
        async def seen(event: Mapping[str, Any], **_: Any) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._sink, kind, event["type"], event["object"])

        return seen


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = WATCH_TIMEOUT_S
    settings.queueing.idle_timeout = 0.5
    return settings
