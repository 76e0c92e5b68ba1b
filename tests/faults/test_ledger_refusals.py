"""A write that may have been executed stays one, whatever the server says of its repeat: its owner
asks for it under the same operation id, also where the primary becomes a replica under it. What
passes costs no lease, whatever the server calls it."""

import asyncio
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from redis import exceptions
from support.ledger_kit import accept_draft, opening_draft, state_after, unit_media
from support.valkeys import SLOTS, ValkeyProcess, primary_and_replica, wait_until

from duplex_sidecar.client.local_sidecar import free_port
from duplex_sidecar.ledger.connection import Connection
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerUnavailable
from duplex_sidecar.ledger.server import Durability
from duplex_sidecar.ledger.store import Ledger, LedgerOptions

pytestmark = pytest.mark.fault
OPTIONS = LedgerOptions(durability=Durability.REPLICATED, call_timeout_ms=20_000)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ValkeyProcess, ValkeyProcess]]:
    with primary_and_replica(tmp_path / "pair") as pair:
        yield pair


async def waits(primary: ValkeyProcess) -> None:
    """Returns when a client of the primary waits for its replica."""

    def blocked() -> bool:
        with primary.client as client:
            return client.info("clients")["blocked_clients"] > 0

    while not await asyncio.to_thread(blocked):  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def test_a_demoted_primary_leaves_the_outcome_unknown(
    pair: tuple[ValkeyProcess, ValkeyProcess],
) -> None:
    primary, other = pair
    ledger = await Ledger.connect(primary.url, OPTIONS)
    try:
        head = await ledger.create(
            opening_draft("demoted"), replica="a", token_sha256="0", state=state_after(0)
        )
        lease = await ledger.acquire("demoted", "a")
        other.signal(signal.SIGSTOP)
        writing = asyncio.create_task(
            ledger.accept(lease, head, accept_draft(1), unit_media(1), state=state_after(1))
        )
        await waits(primary)
        with primary.client as client:
            client.replicaof("127.0.0.1", other.port)
        with pytest.raises(LedgerUnavailable):
            await writing
    finally:
        other.signal(signal.SIGCONT)
        await ledger.close()


REFUSALS = [
    exceptions.BusyLoadingError("the dataset is loaded"),
    exceptions.ReadOnlyError("of a replica"),
    exceptions.ResponseError("NOREPLICAS Not enough good replicas to write."),
    exceptions.OutOfMemoryError("command not allowed"),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda error: type(error).__name__)
async def test_a_repeat_that_is_refused_for_now_leaves_the_first_one_unknown(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    session = f"unknown-{type(refusal).__name__}"
    ledger = await Ledger.connect(valkey.url)
    try:
        head = await ledger.create(
            opening_draft(session), replica="a", token_sha256="0", state=state_after(0)
        )
        lease = await ledger.acquire(session, "a")
        exchange = Connection._exchange
        tries: list[int] = []

        async def loses_its_answer(self: Connection, *packed: Any) -> list[Any]:
            tries.append(1)
            if len(tries) > 1:
                return [refusal]
            await exchange(self, *packed)
            raise exceptions.ConnectionError("the answer is lost")

        with monkeypatch.context() as patched:
            patched.setattr(Connection, "_exchange", loses_its_answer)
            with pytest.raises(LedgerUnavailable) as unknown:
                await ledger.accept(
                    lease, head, accept_draft(1), unit_media(1), state=state_after(1)
                )
        assert len(tries) == 2
        assert unknown.value.pending is not None
        then = await ledger.retry_unknown(unknown.value.pending)
        assert then is not None
        assert (await ledger.load(session)).head == then
    finally:
        await ledger.close()


async def test_a_cluster_node_without_room_for_connections_costs_no_lease(tmp_path: Path) -> None:
    """It says so in other words than a server that is alone."""
    bus = ("--cluster-port", str(free_port()))
    node = ValkeyProcess(tmp_path / "node", "--cluster-enabled", "yes", *bus)
    node.start()
    try:
        with node.client as client:
            client.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, SLOTS - 1)
            wait_until(lambda: client.cluster("info")["cluster_state"] == "ok")
            ledger = await Ledger.connect(node.url)
            try:
                await ledger.create(
                    opening_draft("crowded"), replica="a", token_sha256="0", state=state_after(0)
                )
                lease = await ledger.acquire("crowded", "a")
                client.config_set("maxclients", 1)
                client.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
                with pytest.raises(LedgerUnavailable):
                    await ledger.renew(lease)
                client.config_set("maxclients", 100)
                await ledger.renew(lease)
            finally:
                await ledger.close()
    finally:
        node.kill()
