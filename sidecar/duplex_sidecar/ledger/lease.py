"""The right of exactly one replica to run a session, and the task that keeps it.

The local deadline is taken on CLOCK_BOOTTIME before the renewal is sent (that clock runs on while
the machine sleeps) and lies a margin before the server's; only a confirmed renewal extends it. It
shortens overlap; safety rests on fence, nonce and head in every script.
"""

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path

import msgspec

from duplex_api.leases import LEASE_MARGIN_MS
from duplex_sidecar.ledger.errors import LeaseLost, LedgerError, LedgerUnavailable

log = logging.getLogger(__name__)

LEASE_MS = 3_000
RENEW_PERIOD_MS = 1_000
RETRY_PERIOD_MS = 150
MARGIN_MS = LEASE_MARGIN_MS


class Lease(msgspec.Struct, frozen=True):
    """fence: grows with each acquisition. nonce: random per acquisition. era: the server's
    replication id then. deadline_ms: local CLOCK_BOOTTIME until which the owner may let audio out.
    replica: the owner's name, one per process start (for example pod uid + boot nonce). woken: the
    session was parked until this acquisition."""

    session: str
    replica: str
    fence: int
    nonce: str
    era: str
    deadline_ms: int
    woken: bool = False


class LeaseState(StrEnum):
    HELD = "held"
    """The local deadline lies ahead."""
    SILENT = "silent"
    """The deadline passed without a confirmed renewal: nothing leaves, the keeper tries on."""
    LOST = "lost"
    """The ledger refused this owner. Final."""


def boottime_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000_000


def asked_at() -> str:
    """When a lease is asked for, `<clock> <microseconds>`, to tell calls of one replica apart that
    overtake each other. Those of two clocks cannot be compared: a replica may have the name of one
    that ran before its machine was started again."""
    return f"{_boot_id()} {time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1_000}"


@functools.cache
def _boot_id() -> str:
    """Of CLOCK_BOOTTIME: another one each time the machine starts."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


class LeaseKeeper:
    """Renews one lease each second until it is stopped or the ledger refuses.

    While the ledger is away it tries every 150 ms; the owner is `SILENT` from the deadline on and
    `HELD` again when the same fence is confirmed (`silences` counts these gaps).
    """

    def __init__(
        self,
        renew: Callable[[Lease], Awaitable[Lease]],
        lease: Lease,
        *,
        clock_ms: Callable[[], int] = boottime_ms,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._renew = renew
        self._lease = lease
        self._clock_ms = clock_ms
        self._sleep = sleep
        self._lost: LedgerError | None = None
        self._ended = asyncio.Event()
        self._news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.silences = 0

    @property
    def lease(self) -> Lease:
        """The lease with its present deadline."""
        return self._lease

    @property
    def state(self) -> LeaseState:
        if self._lost is not None:
            return LeaseState.LOST
        held = self._clock_ms() < self._lease.deadline_ms
        return LeaseState.HELD if held else LeaseState.SILENT

    @property
    def held(self) -> bool:
        """Asked before each event leaves."""
        return self.state is LeaseState.HELD

    @property
    def lost_because(self) -> LedgerError | None:
        return self._lost

    def start(self) -> None:
        if self._task is None:
            self._task = asyncio.create_task(self.run(), name=f"lease {self._lease.session}")

    async def stop(self) -> None:
        """Stop renewing; the lease itself is released by `Ledger.release`."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None

    async def wait_lost(self) -> LedgerError:
        """Returns why the lease was lost."""
        await self._ended.wait()
        assert self._lost is not None
        return self._lost

    async def wait_held(self) -> None:
        """Returns once the lease is held, at once if it is; raises the refusal if it is lost. The
        caller bounds the wait."""
        while not self.held:
            if self._lost is not None:
                raise self._lost
            self._news.clear()
            await self._news.wait()

    async def wait_not_held(self) -> None:
        """Returns once the lease is not held, by the local clock."""
        while self.held:
            left_ms = self._lease.deadline_ms - self._clock_ms()
            await self._sleep(max(left_ms, 1) / 1000)

    async def run(self) -> None:
        """Renew until the ledger refuses. One that was acquired long ago is renewed at once."""
        period_ms = RENEW_PERIOD_MS if self.held else 0
        while self._lost is None:
            await self._sleep(period_ms / 1000)
            period_ms = await self._renew_once()

    async def _renew_once(self) -> int:
        """Returns the milliseconds to wait before the next renewal."""
        try:
            lease = await self._renew(self._lease)
        except LedgerUnavailable:
            return RETRY_PERIOD_MS
        except LedgerError as error:
            return self._lose(error)
        except Exception as error:
            # Nobody renews any more: whoever waits for the lease has to learn of it.
            log.exception("lease cannot be renewed")
            return self._lose(
                LeaseLost(self._lease.session, f"not renewed: {type(error).__name__}")
            )
        if self.state is LeaseState.SILENT:
            self.silences += 1
        self._lease = lease
        self._news.set()
        return RENEW_PERIOD_MS

    def _lose(self, because: LedgerError) -> int:
        self._lost = because
        self._ended.set()
        self._news.set()
        return 0
