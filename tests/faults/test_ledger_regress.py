"""A ledger that lost its newest writes under a living owner, as after a failover to a replica that
lagged."""

import secrets
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.ledger_kit import LossyProxy, Writer, spoken_batch
from support.patience import PATIENT

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import (
    HeadMismatch,
    LeaseLost,
    LedgerRegressed,
    LedgerUnavailable,
    SessionUnknown,
)
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.records import RedoDraft
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.ledger.store import Ledger

pytestmark = pytest.mark.fault
UNITS = 4


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(valkey.url, PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
async def server(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url)
    yield client
    await client.aclose()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


Snapshot = dict[str, bytes]


async def snapshot(server: Redis, session: str) -> Snapshot:
    keys = session_keys(session).all()
    return {key: data for key in keys if (data := await server.dump(key)) is not None}


async def go_back(server: Redis, session: str, then: Snapshot) -> None:
    await server.delete(*session_keys(session).all())
    for key, data in then.items():
        await server.restore(key, 60_000_000, data)


async def talk(writer: Writer, server: Redis) -> list[Snapshot]:
    """Units with a redo among them, each journaled; the ledger as it was after each write."""
    session, ledger = writer.lease.session, writer.ledger
    stood = [await snapshot(server, session)]
    for seq in range(1, UNITS + 1):
        await writer.accept(seq, state=b"carry")
        stood.append(await snapshot(server, session))
        if seq == 2:
            redo = RedoDraft(seq=seq, attempt=2, cause="engine_restart")
            writer.head = await ledger.note(writer.lease, writer.head, redo)
            stood.append(await snapshot(server, session))
        await writer.commit(seq)
        stood.append(await snapshot(server, session))
        await ledger.journal(writer.lease, spoken_batch(seq, seq, chunk=seq - 1))
        stood.append(await snapshot(server, session))
    return stood


def content(loaded: LoadedSession) -> object:
    return (
        loaded.head,
        [entry.stored for entry in loaded.entries],
        loaded.media,
        loaded.marks,
        loaded.voice_state,
        loaded.state,
    )


async def test_whatever_is_missing_is_there_again_after_the_next_write(
    ledger: Ledger, server: Redis, session: str
) -> None:
    for cut in range(3 * UNITS + 1):
        name = f"{session}-{cut}"
        writer = await Writer.create(ledger, name)
        stood = await talk(writer, server)
        before = content(await ledger.load(name))
        events = (await ledger.events_after(name, 0)).events
        await go_back(server, name, stood[cut])
        await ledger.journal(
            writer.lease, JournalBatch(unit=UNITS, first_seq=UNITS + 1, events=(b"next",))
        )
        assert content(await ledger.load(name)) == before, f"after write {cut}"
        assert (await ledger.events_after(name, 0)).events[:-1] == events
        await writer.unit(UNITS + 1)


async def test_a_chain_that_is_short_is_mended_by_the_next_unit_too(
    ledger: Ledger, server: Redis, session: str
) -> None:
    for cut in range(3 * UNITS - 1):
        name = f"{session}-{cut}"
        writer = await Writer.create(ledger, name)
        stood = await talk(writer, server)
        await go_back(server, name, stood[cut])
        await writer.unit(UNITS + 1)
        loaded = await ledger.load(name)
        assert [unit.seq for unit in loaded.committed] == list(range(1, UNITS + 2))
        assert (loaded.head, loaded.meta.events_last) == (writer.head, UNITS)


async def test_a_repair_whose_answer_is_lost_is_tried_again(
    valkey: EmbeddedValkey, server: Redis, session: str, tmp_path: Path
) -> None:
    async with LossyProxy(valkey.url, tmp_path) as proxy:
        ledger = await Ledger.connect(proxy.url, PATIENT)
        writer = await Writer.create(ledger, session)
        stood = await talk(writer, server)
        await go_back(server, session, stood[3])
        # The refusal and the owner's look at the ledger arrive, the repair's answers do not.
        proxy.let_through, proxy.lose_replies = 2, 1_000
        with pytest.raises(LedgerUnavailable) as caught:
            await writer.accept(UNITS + 1)
        assert caught.value.pending is None
        proxy.lose_replies = 0
        await writer.unit(UNITS + 1)
        assert (await ledger.load(session)).head == writer.head
        await ledger.close()


async def test_what_cannot_be_mended_is_said_and_left_alone(
    ledger: Ledger, server: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    stood = await talk(writer, server)
    await ledger.break_lease(session, replica="replica-a")
    heir = await Writer.take_over(ledger, session, "replica-b")
    await heir.unit(UNITS + 1)
    await go_back(server, session, stood[6])
    owner = session_keys(session).meta
    await server.hset(owner, "fence", str(heir.lease.fence))
    await server.hset(owner, "nonce", heir.lease.nonce)
    await server.hset(owner, "replica", "replica-b")
    with pytest.raises(LedgerRegressed):
        await heir.unit(UNITS + 2)
    assert len((await ledger.load(session)).committed) == 2
    # It goes on from what is left, and nothing of the lost owner's memory comes up later.
    await ledger.break_lease(session, replica="replica-b")
    third = await Writer.take_over(ledger, session, "replica-c")
    await third.unit(3)


async def test_an_owner_whose_lease_is_gone_mends_nothing(
    ledger: Ledger, server: Redis, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    stood = await talk(writer, server)
    await go_back(server, session, stood[3])
    await ledger.break_lease(session, replica="replica-a")
    with pytest.raises(LeaseLost):
        await writer.unit(UNITS + 1)
    await server.delete(*session_keys(session).all())
    with pytest.raises(SessionUnknown):
        await writer.unit(UNITS + 1)


async def test_a_write_that_nobody_waited_for_is_no_regression(
    ledger: Ledger, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.unit(1)
    before = writer.head
    await writer.accept(2)
    writer.head = before
    with pytest.raises(HeadMismatch):
        await writer.accept(2, state=b"other")
