"""Every await of what opens, feeds and ends sessions, cancelled once each: whoever gives up in
between takes nothing along. Slots, names, tasks, streams, spare seats and leases come back."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from support.cancelling_at import CancelledAt
from support.patience import unhurried

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.protocol.commands import AppendInput, Close
from duplex_sidecar.protocol.errors import ClientError

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    TOKEN,
    Caller,
    Replica,
    Terms,
    eventually,
    replica,
    second,
)

pytestmark = pytest.mark.fault
TERMS = Terms("context", max_units=2)
UNITS = 4
MOST_SUSPENSIONS = 500
"""A deed that waits more often is not one of these."""


@dataclass(frozen=True)
class Capacity:
    """What a replica has left, or holds. waiting: tasks beside the test's own."""

    free_slots: int
    sessions: frozenset[str]
    streams: tuple[str, ...]
    spare_seats: tuple[int, int]
    tasks: int


def capacity(here: Replica) -> Capacity:
    spare = here.stage_set.thinker_spare.free, here.stage_set.talker_spare.free
    return Capacity(
        here.registry.free_slots,
        frozenset(here.registry.roster.ids()),
        tuple(here.stages.held()),
        spare,
        len(asyncio.all_tasks()),
    )


@dataclass
class Ground:
    """here: the replica under test. there: another one, in which sessions wait to be taken up."""

    here: Replica
    there: Replica

    async def opened(self, session: str, where: Replica | None = None) -> Caller:
        replica_ = where or self.here
        await replica_.open(session, TERMS)
        caller = Caller(session)
        await caller.dial(replica_)
        await caller.talk(UNITS)
        return caller

    async def parked(self, session: str) -> None:
        caller = await self.opened(session, self.there)
        await caller.hang_up()
        await self.there.registry.departures.park(session, grace_s=0.0)

    async def lease_is_free(self, session: str) -> bool:
        meta = await self.here.ledger.reader.meta(session)
        return meta is None or meta.nonce == ""


@pytest.fixture(autouse=True)
def _unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        unhurried(patch)
        yield


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Ground]:
    async with AsyncExitStack() as stack:
        here = await stack.enter_async_context(replica(valkey.url, "here"))
        there = await stack.enter_async_context(replica(valkey.url, "there"))
        yield Ground(here, there)


Work = Coroutine[Any, Any, Any]
Deed = Callable[[Ground, str], Awaitable[Work]]
"""Prepares a session and returns what is to be cancelled."""


async def opening(ground: Ground, session: str) -> Work:
    return ground.here.open(session, TERMS)


async def waking(ground: Ground, session: str) -> Work:
    await ground.parked(session)
    return ground.here.open(session, TERMS)


async def dialling(ground: Ground, session: str) -> Work:
    """Of a parked session, and a greeting with what the client has missed."""
    await ground.parked(session)

    async def dial() -> None:
        attachment = await ground.here.registry.attach(session, TOKEN, 0)
        for _ in range(3):
            await attachment.next_event()

    return dial()


async def appending(ground: Ground, session: str) -> Work:
    caller = await ground.opened(session)
    assert caller.attachment is not None
    attachment = caller.attachment

    async def append() -> None:
        for number in (UNITS + 1, UNITS + 2):
            await attachment.submit(AppendInput(second(number), is_speech=True))
        await caller.until_unit(UNITS + 2)

    return append()


async def closing(ground: Ground, session: str) -> Work:
    caller = await ground.opened(session)
    assert caller.attachment is not None
    attachment = caller.attachment

    async def close() -> None:
        await attachment.submit(Close())
        while await attachment.next_event() is not None:
            pass

    return close()


async def parking(ground: Ground, session: str) -> Work:
    await ground.opened(session)
    return ground.here.registry.departures.park(session, grace_s=0.0)


async def ending(ground: Ground, session: str) -> Work:
    await ground.opened(session)
    return ground.here.registry.end(session)


async def ending_a_parked_one(ground: Ground, session: str) -> Work:
    await ground.parked(session)
    return ground.here.registry.end(session)


async def erasing(ground: Ground, session: str) -> Work:
    await ground.opened(session)
    return ground.here.registry.departures.erase(session)


@pytest.mark.parametrize(
    ("deed", "least"),
    [
        (opening, 5),
        (waking, 5),
        (dialling, 5),
        (appending, 3),
        (closing, 2),
        (parking, 2),
        (ending, 2),
        (ending_a_parked_one, 5),
        (erasing, 3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
async def test_whoever_gives_up_takes_nothing_along(ground: Ground, deed: Deed, least: int) -> None:
    before = capacity(ground.here)
    for number in range(1, MOST_SUSPENSIONS):
        session = f"{deed.__name__.replace('_', '-')}-{number}"
        done = CancelledAt(number, await deed(ground, session))
        with suppress(asyncio.CancelledError):
            await done.task
        if session not in ground.here.registry.live:
            # Nobody runs it: anybody may, at once.
            assert await ground.lease_is_free(session), f"lease, cancelled at {number}"
        with suppress(ClientError):
            await ground.here.registry.end(session)
        await eventually(lambda: capacity(ground.here) == before)
        assert await ground.lease_is_free(session), f"lease after the end, cancelled at {number}"
        assert done.task.cancelled() is (number <= done.suspensions)
        if not done.task.cancelled():
            break
    assert number >= least


async def test_a_sessions_own_task_gives_everything_back(
    ground: Ground, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled at each of its awaits while a client talks."""
    before = capacity(ground.here)
    create_task = asyncio.create_task
    number = 0
    sessions: list[CancelledAt] = []

    def creating(work: Work, *, name: str | None = None, **options: Any) -> Any:
        if name is not None and name.startswith("session own-"):
            sessions.append(CancelledAt(number, work, name))
            return sessions[-1].task
        return create_task(work, name=name, **options)

    monkeypatch.setattr(asyncio, "create_task", creating)
    for number in range(1, MOST_SUSPENSIONS):
        session = f"own-{number}"
        caller = Caller(session)
        with suppress(ClientError, AssertionError):
            await ground.here.open(session, TERMS)
            await caller.dial(ground.here)
            await caller.talk(UNITS)
            await caller.close()
        await eventually(lambda: capacity(ground.here) == before)
        assert await ground.lease_is_free(session), f"lease, cancelled at {number}"
        if sessions[-1].suspensions < number:
            break
    assert number > UNITS
