"""Ledgers on more than one server, and what each durability is worth."""

import asyncio
import secrets
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from support.ledger_kit import Writer, spoken_batch
from support.patience import PATIENCE_S, PATIENT
from support.valkeys import ValkeyProcess, connected_replicas, primary_and_replica, wait_until

from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.call import Head, PendingCall
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerUnavailable, LedgerUnsuitable, ServerFull
from duplex_sidecar.ledger.records import describe
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.store import Ledger, LedgerOptions

pytestmark = pytest.mark.fault

REPLICATED = LedgerOptions(durability=Durability.REPLICATED, call_timeout_ms=1_000)
FSYNC = LedgerOptions(durability=Durability.FSYNC, call_timeout_ms=5_000)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ValkeyProcess, ValkeyProcess]]:
    with primary_and_replica(tmp_path / "pair") as both:
        yield both


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


async def records_of(ledger: Ledger, session: str) -> list[str]:
    return [describe(entry.record) for entry in (await ledger.load(session)).entries]


# --- replicated ---------------------------------------------------------------------------------


async def test_a_write_counts_once_a_replica_has_it(
    pair: tuple[ValkeyProcess, ValkeyProcess], session: str
) -> None:
    primary, replica = pair
    ledger = await Ledger.connect(primary.url, REPLICATED)
    try:
        writer = await Writer.create(ledger, session)
        await writer.unit(1)
        replica.signal(signal.SIGSTOP)
        with pytest.raises(LedgerUnavailable) as caught:
            await writer.accept(2)
        pending = caught.value.pending
        assert pending is not None
        # The primary has it. A repeat changes nothing there, and yet is not confirmed.
        assert await records_of(ledger, session) == ["accepted 1", "committed 1", "accepted 2"]
        with pytest.raises(LedgerUnavailable):
            await ledger.retry_unknown(pending)
        with pytest.raises(LedgerUnavailable):
            await ledger.renew(writer.lease)
        replica.signal(signal.SIGCONT)
        head = await confirmed(ledger, pending)
        writer.head = head
        await writer.commit(2)
        await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
        await ledger.renew(writer.lease)
    finally:
        await ledger.close()
    # What was acknowledged is on the replica the moment that it is, whatever the primary does.
    primary.kill()
    with replica.client as client:
        client.replicaof("no", "one")
        client.config_set("min-replicas-to-write", 0)
    survivor = await Ledger.connect(replica.url)
    try:
        loaded = await survivor.load(session)
        assert loaded.head == writer.head
        assert loaded.meta.events_last == 1
    finally:
        await survivor.close()


async def confirmed(ledger: Ledger, pending: PendingCall) -> Head:
    """Once the replica has caught up."""
    async with asyncio.timeout(PATIENCE_S):
        while True:
            with suppress(LedgerUnavailable):
                head = await ledger.retry_unknown(pending)
                assert head is not None
                return head


async def test_without_its_replica_the_primary_takes_nothing_more(
    pair: tuple[ValkeyProcess, ValkeyProcess], session: str
) -> None:
    primary, replica = pair
    ledger = await Ledger.connect(primary.url, REPLICATED)
    try:
        writer = await Writer.create(ledger, session)
        replica.kill()
        with primary.client as client:
            wait_until(lambda: client.info("replication")["connected_slaves"] == 0)
        with pytest.raises(LedgerUnavailable) as caught:
            await writer.accept(1)
        assert caught.value.pending is None, "refused before it was executed"
        replica.start()
        with primary.client as client:
            wait_until(lambda: client.info("replication")["min_slaves_good_slaves"] == 1)
            client.set("first", 2)
            assert client.wait(1, round(1_000 * PATIENCE_S)) == 1
        await writer.unit(1)
    finally:
        await ledger.close()


# --- what a server can promise ------------------------------------------------------------------


async def test_a_promise_is_checked_before_anything_is_written(tmp_path: Path) -> None:
    server = EmbeddedValkey(tmp_path / "everysec")
    server.start()
    try:
        for options, words in ((FSYNC, "appendfsync everysec"), (REPLICATED, "min-replicas")):
            with pytest.raises(LedgerUnsuitable, match=words):
                await Ledger.connect(server.url, options)
    finally:
        server.stop()


async def test_a_server_that_syncs_each_write_promises_fsync(tmp_path: Path, session: str) -> None:
    server = EmbeddedValkey(tmp_path / "always", appendfsync="always")
    server.start()
    try:
        ledger = await Ledger.connect(server.url, FSYNC)
        writer = await Writer.create(ledger, session)
        await writer.units(3)
        server.kill()
        server.start()
        assert (await ledger.load(session)).head == writer.head
        await ledger.close()
    finally:
        server.stop()


async def test_a_managed_server_that_refuses_config_promises_memory_alone(tmp_path: Path) -> None:
    server = ValkeyProcess(tmp_path / "managed", "--appendonly", "yes", "--appendfsync", "always")
    server.start()
    try:
        with server.client as client:
            client.execute_command(
                "ACL", "SETUSER", "duplex", "on", ">pw", "~duplex:*", "+@all", "-config"
            )
        url = f"redis://duplex:pw@127.0.0.1:{server.port}"
        with pytest.raises(LedgerUnsuitable, match="CONFIG GET"):
            await Ledger.connect(url, FSYNC)
        ledger = await Ledger.connect(url)
        await ledger.close()
    finally:
        server.kill()


# --- memory -------------------------------------------------------------------------------------


async def test_a_server_that_fills_up_takes_no_new_sessions_and_costs_none_its_lease(
    tmp_path: Path, session: str
) -> None:
    server = ValkeyProcess(tmp_path / "small", "--maxmemory", "30mb")
    server.start()
    try:
        ledger = await Ledger.connect(server.url, PATIENT)
        writer = await Writer.create(ledger, session)
        await writer.unit(1)
        with server.client as client:
            for number in range(13):
                client.set(f"foreign-{number}", b"x" * 2_000_000)
            with pytest.raises(ServerFull, match="no new sessions"):
                await Writer.create(ledger, f"{session}-new")
            await writer.unit(2)
            client.config_set("maxmemory", 20_000_000)
            with pytest.raises(ServerFull):
                await writer.accept(3)
            writer.lease = await ledger.renew(writer.lease)
            client.delete(*(f"foreign-{number}" for number in range(13)))
        await writer.unit(3)
        await ledger.close()
    finally:
        server.kill()


def in_step(replication: dict[str, Any]) -> bool:
    return replication["slave0"]["offset"] == replication["master_repl_offset"]


# --- Sentinel, cluster --------------------------------------------------------------------------


async def test_a_living_owner_goes_on_behind_a_sentinel(
    pair: tuple[ValkeyProcess, ValkeyProcess], tmp_path: Path, session: str
) -> None:
    primary, replica = pair
    with primary.client as first, replica.client as second:
        first.config_set("min-replicas-to-write", 0)
        second.config_set("min-replicas-to-write", 0)
    sentinel = ValkeyProcess(tmp_path / "sentinel", sentinel_of=primary.port)
    sentinel.start()
    try:
        with sentinel.client as client:
            wait_until(lambda: len(client.sentinel_slaves("main")) == 1)
        options = LedgerOptions(call_timeout_ms=1_000)
        url = f"redis+sentinel://127.0.0.1:{sentinel.port}/main"
        ledger = await Ledger.connect(url, options)
        writer = await Writer.create(ledger, session)
        await writer.units(3)
        with primary.client as client:
            wait_until(lambda: in_step(client.info("replication")))
        primary.kill()
        async with asyncio.timeout(2 * PATIENCE_S):
            while True:
                try:
                    writer.lease = await ledger.renew(writer.lease)
                    break
                except LedgerUnavailable:
                    await asyncio.sleep(0.05)
        await writer.unit(4)
        loaded = await ledger.load(session)
        assert [unit.seq for unit in loaded.committed] == [1, 2, 3, 4]
        assert loaded.meta.fence == writer.lease.fence
        with replica.client as client:
            assert client.info("replication")["role"] == "master"
        await ledger.close()
    finally:
        sentinel.kill()


async def test_all_keys_of_a_session_live_on_one_node_of_a_cluster(
    tmp_path: Path, session: str
) -> None:
    bus = ("--cluster-port", str(free_port()))
    server = ValkeyProcess(tmp_path / "cluster", "--cluster-enabled", "yes", *bus)
    server.start()
    try:
        with server.client as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16_383)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
        ledger = await Ledger.connect(server.url, PATIENT)
        writer = await Writer.create(ledger, session)
        await writer.units(3)
        await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
        await ledger.renew(writer.lease)
        assert (await ledger.load(session)).head == writer.head
        assert (await ledger.events_after(session, 0)).last_seq == 1
        await ledger.release(writer.lease)
        await ledger.acquire(session, "replica-b")
        assert await ledger.erase(session) > 5
        with server.client as client:
            # A node that does not hold the slot sends the client elsewhere.
            slot = client.execute_command("CLUSTER", "KEYSLOT", f"duplex:{{{session}}}:meta")
            client.execute_command("CLUSTER", "DELSLOTS", slot)
            client.config_set("cluster-require-full-coverage", "no")
        with pytest.raises(LedgerUnavailable):
            await ledger.erase(session)
        await ledger.close()
    finally:
        server.kill()


# --- whether it answers ---------------------------------------------------------------------------


async def test_a_server_that_takes_no_writes_does_not_answer(
    pair: tuple[ValkeyProcess, ValkeyProcess],
) -> None:
    """It reads, and says PONG: but no session begins there, and none goes on."""
    primary, replica = pair
    ledger = await Ledger.connect(primary.url, PATIENT)
    demoted = await Ledger.connect(replica.url, PATIENT)
    try:
        await ledger.ping()
        with pytest.raises(LedgerUnavailable, match="read only"):
            await demoted.ping()
        replica.kill()
        await asyncio.to_thread(wait_until, lambda: connected_replicas(primary) == 0)
        with pytest.raises(LedgerUnavailable, match="NOREPLICAS"):
            await ledger.ping()
        with primary.client as client:
            client.config_set("min-replicas-to-write", 0)
            client.script_flush()
            client.config_set("maxmemory", 1)
        await ledger.ping()  # sessions that are there keep their leases
    finally:
        await demoted.close()
        await ledger.close()
