"""Taking the lease of a session: waiting for a lost owner, or breaking the lease of a dead one."""

import asyncio
import logging
import secrets
from collections import OrderedDict
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

from duplex_sidecar.ledger.errors import LeaseHeld, LeaseSettling
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.moving import Offer, new_offer
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import LedgerCall

log = logging.getLogger(__name__)

ACQUIRE_TIMEOUT_S = 8.0
GIVE_BACK_S = 2.0
_ACQUIRE_POLL_S = 0.1
MAX_DEAD = 4096


class DeadReplicas:
    """Replicas that are known to be gone: somebody saw their process or their pod end. A replica of
    a pod is called `<pod uid>-<boot nonce>`. Bounded: the oldest proofs go first, and their leases
    run out by themselves."""

    def __init__(self) -> None:
        self._names: OrderedDict[str, None] = OrderedDict()

    def declare(self, name: str) -> None:
        """A replica's name, or a pod's uid."""
        self._names.pop(name, None)
        self._names[name] = None
        while len(self._names) > MAX_DEAD:
            self._names.popitem(last=False)

    def __contains__(self, replica: str) -> bool:
        return replica in self._names or replica.rpartition("-")[0] in self._names

    def __len__(self) -> int:
        return len(self._names)


def started_before(replica: str, other: str, pod_uid: str) -> bool:
    """Whether `other` was an earlier start of the container that `replica` runs in: containers of a
    pod are started anew only once the old one has ended. pod_uid: of this replica, "" outside a
    pod, where nothing follows from a name."""
    return (
        pod_uid != ""
        and other != replica
        and replica.rpartition("-")[0] == other.rpartition("-")[0] == pod_uid
    )


class Owners:
    def __init__(
        self, ledger: Ledger, replica: str, address: str, metrics: Metrics, pod_uid: str = ""
    ) -> None:
        self.metrics = metrics
        self._pod_uid = pod_uid
        self._ledger = ledger
        self.replica = replica
        self._address = address
        self.dead = DeadReplicas()
        self._asked: dict[str, str] = {}
        """Of each session that is being taken, the nonce of the newest lease that was asked for."""

    async def adopt(self, offer: Offer) -> Lease | None:
        """The lease that was handed over to this replica's offer, None where it was not. Raises
        what the ledger refuses where it is somebody else's by now."""
        self._asked[offer.session] = offer.nonce
        meta = await self._ledger.reader.meta(offer.session)
        if meta is None or meta.nonce != offer.nonce:
            return None
        with self.metrics.timed_ledger_call(LedgerCall.ACQUIRE):
            lease = await self._ledger.acquire(
                offer.session,
                offer.replica,
                fence=offer.fence,
                address=offer.address,
                nonce=offer.nonce,
            )
        with self.metrics.timed_ledger_call(LedgerCall.RENEW):
            return await self._ledger.renew(lease)

    def offer(self, session: str, fence: int) -> Offer:
        """A new one of this replica's."""
        return new_offer(session, self.replica, fence, self._address)

    @asynccontextmanager
    async def held(
        self, session: str, take: Callable[[], Awaitable[Lease]]
    ) -> AsyncGenerator[Lease]:
        """The lease, for what is to make use of it: given back at once when that fails or when the
        caller gives up, however far it had come. Only for who is the session's `only_caller` here.
        take: one of the ways to get it; raises what that does."""
        lease: Lease | None = None
        try:
            lease = await take()
            yield lease
        except BaseException as error:
            # Of one who was cancelled nobody knows whether the server has given it the lease.
            nonce = self._asked.get(session, "")
            if nonce and (lease is not None or isinstance(error, asyncio.CancelledError)):
                await self._give_back(session, nonce)
            raise
        finally:
            self._asked.pop(session, None)

    async def _give_back(self, session: str, nonce: str) -> None:
        """In a task of its own: the ledger does nothing for one that was cancelled. Bounded in
        time; what could not be given back runs out by itself, or is broken by the next caller. It
        names the lease: one that the server gets late must not end the next caller's."""
        giving = asyncio.create_task(
            self._ledger.break_lease(session, replica=self.replica, nonce=nonce)
        )
        with suppress(asyncio.CancelledError):
            await asyncio.wait({giving}, timeout=GIVE_BACK_S)
        giving.cancel()
        for outcome in await asyncio.gather(giving, return_exceptions=True):
            if isinstance(outcome, Exception):
                log.info("a lease was not given back: %s", type(outcome).__name__)

    async def acquire(
        self, session: str, fence: int | None = None, *, timeout_s: float = ACQUIRE_TIMEOUT_S
    ) -> Lease:
        """Wait for the lease of a lost owner to run out, or break it where its death is proven.
        Raises ClientError NOT_READY after the time, and what the ledger refuses. fence: of an
        operator, who is told at once that the owner lives: it knows what to do then."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        least_ms = None
        while True:
            try:
                return await self.acquire_if_free(session, fence)
            except LeaseHeld as held:
                wait_s = held.remaining_ms / 1000
                if fence is not None and least_ms is not None and held.remaining_ms > least_ms:
                    raise ClientError(ErrorCode.NOT_READY, "its owner renews its lease") from held
                least_ms = held.remaining_ms
            except LeaseSettling as settling:
                wait_s = settling.wait_ms / 1000
            if asyncio.get_running_loop().time() + min(wait_s, _ACQUIRE_POLL_S) > deadline:
                raise ClientError(ErrorCode.NOT_READY, "another replica holds the session's lease")
            await asyncio.sleep(max(0.01, min(wait_s, _ACQUIRE_POLL_S)))

    async def acquire_if_free(self, session: str, fence: int | None = None) -> Lease:
        """Without a wait; a lease that nobody can be using is broken. Only for who is the session's
        `only_caller` here. Raises LeaseHeld, LeaseSettling and whatever else the ledger refuses."""
        try:
            return await self._acquire(session, fence)
        except LeaseHeld as held:
            if not self._is_free(held.replica):
                raise
            # An own one by its nonce: the next one has the same replica.
            nonce = held.nonce if held.replica == self.replica else ""
            await self._ledger.break_lease(session, replica=held.replica, nonce=nonce)
        return await self._acquire(session, fence)

    def _is_free(self, holder: str) -> bool:
        """Whether the lease of that replica is nobody's any more. One that this replica itself
        holds without running the session was left behind by a caller that gave up."""
        return (
            holder in self.dead
            or holder == self.replica
            or started_before(self.replica, holder, self._pod_uid)
        )

    async def _acquire(self, session: str, fence: int | None) -> Lease:
        nonce = self._asked[session] = secrets.token_hex(16)
        with self.metrics.timed_ledger_call(LedgerCall.ACQUIRE):
            return await self._ledger.acquire(
                session, self.replica, fence=fence, address=self._address, nonce=nonce
            )
