"""One operator works at a time: a Lease, as Kubernetes' own components use it.

Own code and not the client library's: that one has no timeout on its requests and ends at the first
network error, so that a hung API server would leave a leader who believes in itself. Here a leader
that could not renew in time stops working before anybody else may start, by its own clock; an API
server that is away does not end the process.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, cast

from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.errors import ApiError, ConflictError, MissingError
from duplex_operator.kube.resources import LEASES
from duplex_operator.objects import ObjectKey, RawObject

log = logging.getLogger(__name__)

LEASE_S = 15
RENEW_WITHIN_S = 10.0
PERIOD_S = 2.0
IN_TOUCH_S = 30.0


@dataclass(frozen=True, slots=True)
class LeaseRecord:
    """What the Lease says. holder empty: free. version: its resourceVersion."""

    holder: str
    lease_s: int
    renewed: str
    transitions: int
    version: str


@dataclass(frozen=True, slots=True)
class Sighting:
    """A record and when it was first seen so, by the local clock: remote clocks are not trusted."""

    record: LeaseRecord
    seen_s: float


def may_take(sighting: Sighting, identity: str, now_s: float) -> bool:
    """Whether the Lease is ours, free, or was not renewed for its time while we watched."""
    record = sighting.record
    if record.holder in ("", identity):
        return True
    return now_s - sighting.seen_s > record.lease_s


class Leader:
    """`run` leads whenever it can, and calls `reign` while it does. api: one that may write without
    the lead, since this is how it is got."""

    def __init__(
        self,
        api: KubernetesApi,
        lease: ObjectKey,
        identity: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._api = api
        self._lease = lease
        self._identity = identity
        self._clock = clock
        self._sleep = sleep
        self._sighting: Sighting | None = None
        self._leads_until_s = float("-inf")
        self._answered_s = float("-inf")

    @property
    def in_touch(self) -> bool:
        """Whether the API server has answered of late: an operator that has no way to it, or no
        rights there, would be no help to anybody."""
        return self._clock() - self._answered_s < IN_TOUCH_S

    @property
    def leads(self) -> bool:
        """Asked before each write to Kubernetes."""
        return self._clock() < self._leads_until_s

    async def run(self, reign: Callable[[], Awaitable[None]]) -> None:
        """Waits for the lead, reigns, and again after losing it. Returns when a reign returns on
        its own; gives the Lease back then, and when cancelled."""
        try:
            while True:
                await self._until_leading()
                log.info("%s leads", self._identity)
                if await self._reign_while_leading(reign):
                    return
                log.warning("%s does not lead any more", self._identity)
        finally:
            await self._give_back()

    async def _until_leading(self) -> None:
        while not await self._try():
            await self._sleep(PERIOD_S)

    async def _reign_while_leading(self, reign: Callable[[], Awaitable[None]]) -> bool:
        """True: the reign ended by itself."""
        work = asyncio.ensure_future(reign())
        renewal = asyncio.create_task(self._keep())
        try:
            await asyncio.wait((work, renewal), return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
                return True
            return False
        finally:
            for task in (work, renewal):
                task.cancel()
            await asyncio.gather(work, renewal, return_exceptions=True)

    async def _keep(self) -> None:
        """Returns when the lead is lost."""
        while self.leads:
            await self._sleep(PERIOD_S)
            await self._try()

    async def _try(self) -> bool:
        """One attempt to take or renew, bounded by a period or two."""
        started_s = self._clock()
        try:
            async with asyncio.timeout(2 * PERIOD_S):
                record = await self._write_if_allowed()
        except (ApiError, TimeoutError) as error:
            log.info("the lease: %s", error or type(error).__name__)
            return False
        self._answered_s = self._clock()
        if record is None:
            return False
        self._sighting = Sighting(record, started_s)
        self._leads_until_s = started_s + RENEW_WITHIN_S
        return True

    async def _write_if_allowed(self) -> LeaseRecord | None:
        sighting = self._sighting
        if sighting is None or sighting.record.holder != self._identity:
            sighting = await self._look()
        if sighting is None:
            body = {
                "apiVersion": "coordination.k8s.io/v1",
                "kind": "Lease",
                "metadata": {"name": self._lease.name, "namespace": self._lease.namespace},
                "spec": self._spec(0, taking=True),
            }
            return _record(await self._api.create(LEASES, self._lease.namespace, body))
        if not may_take(sighting, self._identity, self._clock()):
            return None
        record = sighting.record
        taking = record.holder != self._identity
        spec = self._spec(record.transitions + taking, taking=taking)
        try:
            return await self._write(spec, record.version)
        except (ConflictError, MissingError):
            self._sighting = None
            self._leads_until_s = float("-inf") if taking else self._leads_until_s
            return None

    async def _write(self, spec: Mapping[str, Any], version: str) -> LeaseRecord:
        body = {"spec": spec}
        return _record(await self._api.patch(LEASES, self._lease, body, version=version))

    async def _look(self) -> Sighting | None:
        """The Lease as it is now; None: there is none."""
        try:
            record = _record(await self._api.get(LEASES, self._lease))
        except MissingError:
            return None
        if self._sighting is None or self._sighting.record != record:
            self._sighting = Sighting(record, self._clock())
        return self._sighting

    def _spec(self, transitions: int, *, taking: bool) -> dict[str, Any]:
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, Any] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": LEASE_S,
            "renewTime": now,
            "leaseTransitions": transitions,
        }
        return spec | ({"acquireTime": now} if taking else {})

    async def _give_back(self) -> None:
        """The next one need not wait for the lease to run out."""
        leads = self.leads
        self._leads_until_s = float("-inf")
        if not leads:
            return
        with suppress(ApiError, TimeoutError):
            async with asyncio.timeout(PERIOD_S):
                await self._free()

    async def _free(self) -> None:
        """As it is now: a renewal that was cancelled on its way may have got there all the same."""
        record = _record(await self._api.get(LEASES, self._lease))
        if record.holder == self._identity:
            await self._write({"holderIdentity": ""}, record.version)


def _record(raw: RawObject) -> LeaseRecord:
    spec = cast("Mapping[str, Any]", raw.get("spec") or {})
    meta = cast("Mapping[str, Any]", raw.get("metadata") or {})
    return LeaseRecord(
        holder=str(spec.get("holderIdentity") or ""),
        lease_s=int(spec.get("leaseDurationSeconds") or LEASE_S),
        renewed=str(spec.get("renewTime") or ""),
        transitions=int(spec.get("leaseTransitions") or 0),
        version=str(meta.get("resourceVersion") or ""),
    )
