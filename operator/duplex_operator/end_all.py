"""`python -m duplex_operator end-all --timeout S`: ends every session that this operator serves.

Run before the operator is removed, while it still works: sessions are deleted as a user would, and
the operator erases their ledgers and lets them go. What is not gone in time loses its finalizer
here, so that no object waits for an operator that nobody will start again; its ledger then runs
out by itself.
"""

import argparse
import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ApiError, ConflictError, MissingError
from duplex_operator.kube.resources import SESSIONS
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import Meta, read_meta

POLL_S = 1.0
ATTEMPTS = 3
AT_ONCE = 24


class EndAll:
    """One run over the watched namespaces ("" alone: all of them)."""

    def __init__(
        self,
        api: KubernetesApi,
        namespaces: Sequence[str],
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._namespaces = tuple(namespaces) or ("",)
        self._clock = clock
        self._sleep = sleep
        self._gate = asyncio.Semaphore(AT_ONCE)

    async def run(self, timeout_s: float) -> bool:
        """False: something is still there. Prints what it does. Raises ApiError when sessions
        cannot be listed."""
        until_s = self._clock() + timeout_s
        left = await self._sessions()
        print(f"{len(left)} sessions to end", flush=True)
        while left and self._clock() < until_s:
            # Again each time: sessions may be made meanwhile.
            await self._each(left, self._delete)
            await self._sleep(POLL_S)
            left = await self._sessions()
        if left:
            print(f"{len(left)} not over after {timeout_s:g} s: let go by force", flush=True)
            await self._each(left, self._let_go)
            left = await self._sessions()
        print("no session is left" if not left else f"{len(left)} sessions are left", flush=True)
        return not left

    async def _sessions(self) -> list[Meta]:
        listings = [
            await self._api.list(SESSIONS, namespace, read=read_meta)
            for namespace in self._namespaces
        ]
        return [meta for listing in listings for meta in listing.items]

    async def _each(self, sessions: list[Meta], act: Callable[[Meta], Awaitable[None]]) -> None:
        async def one(session: Meta) -> None:
            async with self._gate:
                try:
                    await act(session)
                except ApiError as error:
                    print(f"{session.key}: {error}", flush=True)

        await asyncio.gather(*(one(session) for session in sessions))

    async def _delete(self, session: Meta) -> None:
        if not session.deleting:
            await self._api.delete(SESSIONS, session.key, uid=session.uid)

    async def _let_go(self, session: Meta) -> None:
        """Others' finalizers stay. A changed object is read again and tried again."""
        for _ in range(ATTEMPTS):
            try:
                await self._delete(session)
                kept = [name for name in session.finalizers if name != SESSION_FINALIZER]
                body = {"metadata": {"finalizers": kept}}
                await self._api.patch(SESSIONS, session.key, body, version=session.version)
            except ConflictError:
                try:
                    session = read_meta(await self._api.get(SESSIONS, session.key))
                except MissingError:
                    return
            except MissingError:
                return
            else:
                return


def timeout_of(arguments: Sequence[str]) -> float:
    """Seconds. Exits with status 2 for wrong arguments."""
    parser = argparse.ArgumentParser(prog="duplex_operator end-all", description=__doc__)
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds (120)")
    found: float = parser.parse_args(arguments).timeout
    if not 0 <= found <= 86_400:
        parser.error("--timeout must be between 0 and 86400")
    return found


async def end_all(api: KubernetesApi, namespaces: Sequence[str], timeout_s: float) -> int:
    """The exit status: 0 when no session is left, else 1."""
    try:
        return 0 if await EndAll(api, namespaces).run(timeout_s) else 1
    except ApiError as error:
        print(f"sessions cannot be listed: {error}", flush=True)
        return 1
    finally:
        await api.connection.close()
