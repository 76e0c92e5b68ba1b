"""One leads at a time, and a leader that cannot renew stops before anybody else may start."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from duplex_operator.kube.errors import ConflictError, MissingError, UnavailableError
from duplex_operator.kube.resources import LEASES, Resource
from duplex_operator.leader import Leader, LeaseRecord, Sighting, may_take
from duplex_operator.objects import ObjectKey

pytestmark = pytest.mark.unit

LEASE = ObjectKey("duplex", "duplex-operator")


class Leases:
    """The API server's Leases, in memory, with its preconditions."""

    def __init__(self) -> None:
        self.raw: dict[str, Any] | None = None
        self.version = 0
        self.away = False

    def _check(self) -> None:
        if self.away:
            raise UnavailableError(0, "Unreachable", "away")

    async def get(self, _: Resource, __: ObjectKey) -> Mapping[str, Any]:
        self._check()
        if self.raw is None:
            raise MissingError(404, "NotFound", "no lease")
        return self.raw

    async def create(self, _: Resource, __: str, body: Mapping[str, Any]) -> Mapping[str, Any]:
        self._check()
        if self.raw is not None:
            raise ConflictError(409, "AlreadyExists", "there is one")
        return self._store(dict(body["spec"]))

    async def patch(
        self, _: Resource, __: ObjectKey, body: Mapping[str, Any], *, version: str
    ) -> Mapping[str, Any]:
        self._check()
        assert self.raw is not None
        if version != str(self.version):
            raise ConflictError(409, "Conflict", "changed")
        return self._store({**self.raw["spec"], **body["spec"]})

    def _store(self, spec: dict[str, Any]) -> Mapping[str, Any]:
        self.version += 1
        self.raw = {"metadata": {"resourceVersion": str(self.version)}, "spec": spec}
        return self.raw


class Clock:
    """Time passes when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        await asyncio.sleep(0)


def leader(leases: Leases, clock: Clock, name: str) -> Leader:
    api: Any = leases
    return Leader(api, LEASE, name, clock=lambda: clock.now_s, sleep=clock.sleep)


async def reign_until(stop: asyncio.Event, reigned: list[str], name: str) -> None:
    reigned.append(name)
    await stop.wait()


def test_a_lease_is_ours_free_or_old() -> None:
    record = LeaseRecord("other", 15, "t", 0, "1")
    seen = Sighting(record, 100.0)
    assert not may_take(seen, "me", 115.0)
    assert may_take(seen, "me", 115.1)
    assert may_take(seen, "other", 100.0)
    assert may_take(Sighting(LeaseRecord("", 15, "t", 0, "1"), 100.0), "me", 100.0)


async def test_nobody_is_in_touch_before_the_api_server_has_answered() -> None:
    leases, clock = Leases(), Clock()
    leases.away = True
    asked = asyncio.Event()

    async def nap(seconds: float) -> None:
        await clock.sleep(seconds)
        asked.set()

    api: Any = leases
    standby = Leader(api, LEASE, "standby", clock=lambda: clock.now_s, sleep=nap)
    assert not standby.in_touch
    work = asyncio.create_task(standby.run(lambda: reign_until(asyncio.Event(), [], "standby")))
    await asked.wait()
    assert not standby.in_touch
    leases.away = False
    await leases.create(
        LEASES,
        "",
        {"spec": {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": "t"}},
    )
    asked.clear()
    await asked.wait()
    assert standby.in_touch
    assert not standby.leads
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    clock.now_s += 60
    assert not standby.in_touch


async def test_the_second_takes_over_at_once_when_the_lease_is_given_back() -> None:
    leases, clock = Leases(), Clock()
    stop, reigned = asyncio.Event(), list[str]()
    first = leader(leases, clock, "first")
    begun = asyncio.Event()

    async def reign() -> None:
        begun.set()
        await reign_until(stop, reigned, "first")

    work = asyncio.create_task(first.run(reign))
    await begun.wait()
    assert first.leads
    stop.set()
    await work
    assert not first.leads
    started_s = clock.now_s
    second = leader(leases, clock, "second")
    await second.run(lambda: reign_until(stop, reigned, "second"))
    assert reigned == ["first", "second"]
    assert clock.now_s - started_s < 5


async def test_a_lease_is_given_back_though_the_last_renewal_was_not_heard_of() -> None:
    leases, clock = Leases(), Clock()

    async def reign() -> None:
        assert leases.raw is not None
        assert leases.raw["spec"]["holderIdentity"] == "first"
        await leases.patch(
            LEASES, LEASE, {"spec": {"renewTime": "later"}}, version=str(leases.version)
        )

    await leader(leases, clock, "first").run(reign)
    assert leases.raw is not None
    assert leases.raw["spec"]["holderIdentity"] == ""


async def test_a_lease_that_somebody_else_has_taken_is_not_given_back() -> None:
    leases, clock = Leases(), Clock()

    async def reign() -> None:
        await leases.patch(
            LEASES, LEASE, {"spec": {"holderIdentity": "second"}}, version=str(leases.version)
        )

    await leader(leases, clock, "first").run(reign)
    assert leases.raw is not None
    assert leases.raw["spec"]["holderIdentity"] == "second"


async def test_the_second_takes_over_from_a_dead_one_within_20_s() -> None:
    leases, clock = Leases(), Clock()
    await leases.create(
        LEASES,
        "",
        {"spec": {"holderIdentity": "dead", "leaseDurationSeconds": 15, "renewTime": "t"}},
    )
    reigned: list[str] = []
    stop = asyncio.Event()
    stop.set()
    second = leader(leases, clock, "second")
    await second.run(lambda: reign_until(stop, reigned, "second"))
    assert reigned == ["second"]
    assert 15 < clock.now_s <= 20
    assert leases.raw is not None
    assert leases.raw["spec"]["leaseTransitions"] == 1


async def test_a_leader_without_an_api_server_stops_before_its_lease_ends_and_comes_back() -> None:
    leases, clock = Leases(), Clock()
    reigned: list[float] = []
    ended: list[float] = []

    async def reign() -> None:
        reigned.append(clock.now_s)
        leases.away = len(reigned) == 1
        try:
            if len(reigned) == 1:
                await asyncio.Event().wait()
        finally:
            ended.append(clock.now_s)
            leases.away = False

    await leader(leases, clock, "me").run(reign)
    assert len(reigned) == 2
    assert ended[0] - reigned[0] <= 15
