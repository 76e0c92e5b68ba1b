"""Conversations over a ledger that fails over, loses its newest writes, or is full."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.valkeys import ValkeyProcess, primary_and_replica, wait_until

from duplex_sidecar.admin.views import feed_line
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Closed, ResyncRequired

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import TOKEN, Caller, Terms, check_events, eventually, replica, tokens, undisturbed

pytestmark = pytest.mark.fault
UNITS = 30


@pytest.fixture
async def server(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url)
    yield client
    await client.aclose()


async def snapshot(server: Redis, session: str) -> dict[str, bytes]:
    keys = session_keys(session).all()
    return {key: data for key in keys if (data := await server.dump(key)) is not None}


async def go_back(server: Redis, session: str, then: dict[str, bytes]) -> None:
    async with server.pipeline(transaction=True) as pipeline:
        pipeline.delete(*session_keys(session).all())
        for key, data in then.items():
            pipeline.restore(key, 60_000_000, data)
        await pipeline.execute()


async def test_a_living_owner_hides_what_the_ledger_lost(
    valkey: EmbeddedValkey, server: Redis
) -> None:
    """Again and again the ledger goes back by some units: the client notices nothing, and in the
    end everything is there."""
    terms = Terms("context")
    calm, calm_call = await undisturbed(valkey.url, "calm-back", terms, UNITS)
    async with replica(valkey.url, "owner") as here:
        await here.open("back", terms)
        caller = Caller("back")
        await caller.dial(here)
        for unit in range(1, UNITS + 1):
            await caller.talk(unit)
            if unit % 5 == 2:
                then = await snapshot(server, "back")
            if unit % 5 == 4:
                await go_back(server, "back", then)
        check_events(caller)
        assert [event.body for event in caller.sequenced if event.sequence % 7 == 0]
        assert await tokens(here.ledger, "back") == calm
        meta = await here.ledger.reader.meta("back")
        assert meta is not None
        assert (meta.fence, meta.events_last) == (1, caller.last_sequence)
        assert len(caller.sequenced) == len(calm_call.sequenced)
        assert all(unit.rebuild_cause in (None, "slide") for unit in caller.units)


async def test_what_nobody_can_bring_back_is_told_the_client(
    valkey: EmbeddedValkey, server: Redis
) -> None:
    async with replica(valkey.url, "first") as here:
        await here.open("rewound", Terms("context"))
        caller = Caller("rewound")
        await caller.dial(here)
        await caller.talk(4)
        then = await snapshot(server, "rewound")
        await caller.talk(8)
    await go_back(server, "rewound", then)
    await server.hset(session_keys("rewound").meta, mapping={"nonce": "", "until": "0"})
    async with replica(valkey.url, "second") as there:
        attachment = await there.registry.attach("rewound", TOKEN, 0)
        await attachment.next_event()
        assert not feed_line(there.registry.live["rewound"])["ledgerRewound"]
        attachment = await there.registry.attach("rewound", TOKEN, caller.last_sequence)
        await attachment.next_event()
        resync = await attachment.next_event()
        assert isinstance(resync, ResyncRequired)
        assert resync.ledger_rewound
        assert feed_line(there.registry.live["rewound"])["ledgerRewound"]
        assert resync.requested == caller.last_sequence
        assert resync.oldest < caller.last_sequence
        assert there.registry.live["rewound"].conversation.seq == 4


async def test_an_owner_whose_ledger_is_another_one_lets_go(
    valkey: EmbeddedValkey, server: Redis
) -> None:
    """The chain that is left does not join what the owner remembers."""
    async with replica(valkey.url, "regressed") as here:
        await here.open("other", Terms("context"))
        caller = Caller("other")
        await caller.dial(here)
        await caller.talk(3)
        await server.hset(session_keys("other").meta, mapping={"head": "0" * 64, "index": "2"})
        await caller.say(4)
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.LEASE_LOST
        assert "resume" in closed.detail


async def test_a_full_server_is_waited_for(valkey: EmbeddedValkey, server: Redis) -> None:
    terms = Terms("basic")
    calm, _ = await undisturbed(valkey.url, "calm-full", terms, 12)
    async with replica(valkey.url, "roomy", hold_s=60.0) as here:
        await here.open("full", terms)
        caller = Caller("full")
        await caller.dial(here)
        await caller.talk(5)
        await server.config_set("maxmemory", 1_000_000)
        try:
            await caller.say(6)
            lease = here.registry.live["full"].lease
            await eventually(
                lambda: here.registry.live["full"].lease.deadline_ms > lease.deadline_ms
            )
            assert len(caller.units) == 5
        finally:
            await server.config_set("maxmemory", 0)
        await caller.talk(12)
        check_events(caller)
        assert await tokens(here.ledger, "full") == calm


async def test_conversations_go_on_through_a_failover(tmp_path: Path) -> None:
    """Behind a Sentinel, on a primary that dies: the same owner, no rebuild, nothing lost (what the
    replica has not heard, the owner has)."""
    with primary_and_replica(tmp_path / "pair") as (primary, other):
        with primary.client as first, other.client as second:
            first.config_set("min-replicas-to-write", 0)
            second.config_set("min-replicas-to-write", 0)
        sentinel = ValkeyProcess(tmp_path / "sentinel", sentinel_of=primary.port)
        sentinel.start()
        try:
            with sentinel.client as client:
                wait_until(lambda: len(client.sentinel_slaves("main")) == 1)
            url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
            async with replica(url, "owner", hold_s=60.0, call_timeout_ms=1_000) as here:
                callers = [Caller(f"over-{number}", voice=number) for number in range(4)]
                for caller in callers:
                    await here.open(caller.session, Terms("context"))
                    await caller.dial(here)
                    await caller.talk(6)
                primary.kill()
                for caller in callers:
                    await caller.say(8)
                for caller in callers:
                    await caller.talk(12)
                    check_events(caller)
                    assert len(await tokens(here.ledger, caller.session)) == 12
                    assert all(unit.rebuild_cause in (None, "slide") for unit in caller.units)
                    meta = await here.ledger.reader.meta(caller.session)
                    assert meta is not None
                    assert meta.fence == 1
        finally:
            sentinel.kill()
