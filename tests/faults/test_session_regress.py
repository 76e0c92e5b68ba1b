"""Conversations over a ledger that fails over, loses its newest writes, or is full."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support import last_run
from support.ledger_kit import Writer
from support.valkeys import ValkeyProcess, primary_and_replica, wait_until

from duplex_sidecar.admin.views import feed_line
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.store import LEASE_MS, Ledger
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import (
    Closed,
    Event,
    ResyncRequired,
    Sequenced,
    TurnTruncated,
    UnitDone,
    encode_sequenced,
)
from duplex_sidecar.session.replay import replay_after

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_encoder import FakeEncoder
from fake_thinker import FakeThinker
from fake_voice import FakeCode2Wav, FakeTalker
from session_kit import (
    TOKEN,
    VOCABULARY,
    WORD_IDS,
    Caller,
    Stages,
    Terms,
    check_events,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
UNITS = 30
BEFORE_UNITS, FAILOVER_UNITS = 6, 20
SILENCE_S = LEASE_MS / 1000 + 5.0


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


@pytest.mark.parametrize("missing", [{5}, {5, 80}, {3, 4, 5}, {90}, {5, 90}])
async def test_behind_a_hole_in_the_journal_is_replayed_what_is_there(
    valkey: EmbeddedValkey, server: Redis, missing: set[int]
) -> None:
    """Whatever tore it. Nothing counts as rewound: the journal's end has not moved."""
    ledger = await Ledger.connect(valkey.url)
    name = "hole-" + "-".join(map(str, sorted(missing)))
    writer = await Writer.create(ledger, name)
    events = [encode_sequenced(Sequenced(n, TurnTruncated(n, n, 0, 0))) for n in range(1, 91)]
    await ledger.journal(writer.lease, JournalBatch(unit=0, first_seq=1, events=tuple(events)))
    await server.hdel(session_keys(name).events, *map(str, missing))
    replay, resync = await replay_after(ledger, name, 2)
    assert resync == ResyncRequired(2, max(missing) + 1)
    assert [event.sequence for event in replay] == list(range(max(missing) + 1, 91))
    behind = max(missing)
    replay, resync = await replay_after(ledger, name, behind)
    assert (len(replay), resync) == (90 - behind, None)
    await ledger.close()


async def test_a_number_that_was_never_given_is_no_lost_event(valkey: EmbeddedValkey) -> None:
    """The one owner that a session ever had knows what it has said."""
    async with replica(valkey.url, "only") as here:
        await here.open("boast", Terms("context"))
        caller = Caller("boast")
        await caller.dial(here)
        await caller.talk(2)
        newest = caller.last_sequence
        attachment = await here.registry.attach("boast", TOKEN, newest + 1_000)
        await attachment.next_event()
        resync = await attachment.next_event()
        assert resync == ResyncRequired(newest + 1_000, newest + 1, ledger_rewound=False)
        assert not feed_line(here.registry.live["boast"])["ledgerRewound"]
        for said, rewound in ((newest, False), (newest + 3, True), (None, True)):
            replay, resync = await replay_after(here.ledger, "boast", newest + 1_000, said)
            assert resync == ResyncRequired(newest + 1_000, newest + 1, rewound)
            assert replay == []


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


class Timed(Caller):
    """Knows when each of its units was done."""

    def __init__(self, session: str, *, voice: int) -> None:
        super().__init__(session, voice=voice)
        self.done_s: list[float] = []

    async def next(self) -> Event:
        event = await super().next()
        if isinstance(event, Sequenced) and isinstance(event.body, UnitDone):
            self.done_s.append(time.monotonic())
        return event

    async def talk_at_pace(self, units: int, first_s: float, period_s: float) -> None:
        """One second of sound each `period_s`, whatever comes back."""

        async def speak() -> None:
            for number in range(self.next_second, units + 1):
                due_s = first_s + period_s * number
                await asyncio.sleep(max(0.0, due_s - time.monotonic()))
                await self.say(number)

        async with asyncio.TaskGroup() as group:
            group.create_task(speak())
            group.create_task(self.until_unit(units))

    @property
    def longest_silence_s(self) -> float:
        """Between one unit done and the next."""
        return max(later - done for done, later in pairwise(self.done_s))


@contextmanager
def behind_a_sentinel(folder: Path) -> Iterator[tuple[str, ValkeyProcess]]:
    """(what a ledger dials, the primary)."""
    with primary_and_replica(folder / "pair") as (primary, other):
        with primary.client as first, other.client as second:
            first.config_set("min-replicas-to-write", 0)
            second.config_set("min-replicas-to-write", 0)
        sentinel = ValkeyProcess(folder / "sentinel", sentinel_of=primary.port)
        sentinel.start()
        try:
            with sentinel.client as client:
                wait_until(lambda: len(client.sentinel_slaves("main")) == 1)
            yield f"redis+sentinel://127.0.0.1:{sentinel.port}/main", primary
        finally:
            sentinel.kill()


async def test_conversations_go_on_through_a_failover(tmp_path: Path) -> None:
    """Behind a Sentinel, on a primary that dies: the same owners, no rebuild, nothing lost (what
    the replica has not heard, the owners have), and a silence that has a bound. `make test-long`
    has thirty of them."""
    many, period_s = (30, 1.0) if last_run.is_long() else (8, 0.5)
    with behind_a_sentinel(tmp_path) as (url, primary):
        # Calls give up before a lease's margin, as they do outside of tests.
        options = {"slots": many, "hold_s": 60.0, "call_timeout_ms": 1_000}
        seats = many + 2
        stages = Stages(
            encoder=FakeEncoder(max_sessions=seats),
            code2wav=FakeCode2Wav(max_sessions=seats),
            thinker=FakeThinker(VOCABULARY, WORD_IDS, seats=seats),
            talker=FakeTalker(seats=seats),
        )
        async with replica(url, "owner", stages=stages, **options) as here:
            callers = [Timed(f"over-{number}", voice=number) for number in range(many)]
            for caller in callers:
                await here.open(caller.session, Terms("context"))
                await caller.dial(here)
            began_s = time.monotonic()
            async with asyncio.TaskGroup() as group:
                for number, caller in enumerate(callers):
                    phase_s = period_s * number / many
                    group.create_task(
                        caller.talk_at_pace(FAILOVER_UNITS, began_s + phase_s, period_s)
                    )
                await eventually(lambda: all(len(c.done_s) >= BEFORE_UNITS for c in callers))
                await asyncio.to_thread(primary.kill)
            silences_s = sorted(caller.longest_silence_s for caller in callers)
            for caller in callers:
                check_events(caller)
                assert len(await tokens(here.ledger, caller.session)) == FAILOVER_UNITS
                assert all(unit.rebuild_cause in (None, "slide") for unit in caller.units)
                meta = await here.ledger.reader.meta(caller.session)
                assert meta is not None
                assert meta.fence == 1
    last_run.add(
        "sentinel_failover",
        [],
        sessions=many,
        longest_silence_s=round(silences_s[-1], 2),
        median_silence_s=round(silences_s[many // 2], 2),
        allowed_s=SILENCE_S,
        period_s=period_s,
    )
    assert silences_s[many // 2] > 1.5 * period_s, "the failover was not noticed"
    assert silences_s[-1] <= SILENCE_S
