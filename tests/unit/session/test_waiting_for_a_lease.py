"""How the next owner waits for the lease of one that may be gone."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_api.leases import LEASE_MARGIN_MS
from duplex_sidecar.ledger.errors import LeaseHeld
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.store import Ledger
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.owners import Owners
from duplex_sidecar.telemetry.metrics import Metrics

pytestmark = pytest.mark.unit


class Server:
    """A ledger whose clock moves only in sleeps, and one lease that somebody else has."""

    def __init__(self, left_ms: int, patch: pytest.MonkeyPatch) -> None:
        self.now_ms = 0.0
        self.until_ms = float(left_ms)
        self.renewals_ms: list[float] = []
        """When its owner renews it, for 3 s each time."""
        self.asked_ms: list[float] = []
        patch.setattr(asyncio, "sleep", self._sleep)
        patch.setattr(asyncio, "get_running_loop", lambda: SimpleNamespace(time=self._time_s))
        metrics = SimpleNamespace(timed_ledger_call=Ignored)
        self.owners = Owners(
            cast("Ledger", self), "next", "next:8765", cast("Metrics", metrics), "pod"
        )

    def _time_s(self) -> float:
        return self.now_ms / 1000

    async def _sleep(self, seconds: float) -> None:
        self.now_ms += seconds * 1000

    async def acquire(self, session: str, replica: str, *, nonce: str, **_: Any) -> Lease:
        self.asked_ms.append(self.now_ms)
        for at_ms in self.renewals_ms:
            if at_ms <= min(self.now_ms, self.until_ms):
                self.until_ms = max(self.until_ms, at_ms + 3_000)
        left_ms = self.until_ms - self.now_ms
        if left_ms > 0:
            raise LeaseHeld(session, "other", int(left_ms), "of-the-other")
        return Lease(session, replica, 4, nonce, "era", 0)


class Ignored:
    def __init__(self, _: object) -> None: ...

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize("fence", [4, None])
async def test_it_is_taken_as_soon_as_it_is_over(
    fence: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(LEASE_MARGIN_MS - 17, monkeypatch)
    lease = await server.owners.acquire("talk", fence)
    assert lease.replica == "next"
    late_ms = server.asked_ms[-1] - (LEASE_MARGIN_MS - 17)
    assert 0 <= late_ms <= 10, "no whole look of 0.1 s behind its end"


async def test_an_operator_is_told_at_once_of_an_owner_that_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server(LEASE_MARGIN_MS, monkeypatch)
    server.renewals_ms = [250.0, 1_250.0, 2_250.0]
    with pytest.raises(ClientError) as refused:
        await server.owners.acquire("talk", 4)
    assert refused.value.code is ErrorCode.NOT_READY
    assert server.now_ms <= 400


async def test_one_who_dials_by_himself_waits_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its owner may be about to leave, and nobody else would ask again."""
    server = Server(LEASE_MARGIN_MS, monkeypatch)
    server.renewals_ms = [250.0, 1_250.0]
    lease = await server.owners.acquire("talk")
    assert lease.replica == "next"
    assert 4_250 <= server.now_ms <= 4_270


async def test_the_wait_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(LEASE_MARGIN_MS, monkeypatch)
    server.renewals_ms = [float(at_ms) for at_ms in range(250, 60_000, 1_000)]
    with pytest.raises(ClientError) as refused:
        await server.owners.acquire("talk", timeout_s=8.0)
    assert refused.value.code is ErrorCode.NOT_READY
    assert 7_800 <= server.now_ms <= 8_000
