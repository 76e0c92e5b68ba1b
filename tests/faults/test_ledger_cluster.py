"""A ledger on three nodes of a cluster: each session on one of them, wherever that is now."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Iterator

import pytest
from redis import Redis
from redis.crc import key_slot
from support.ledger_kit import Writer, spoken_batch
from support.patience import PATIENCE_S, PATIENT
from support.valkeys import SLOTS, ValkeyProcess, cluster_of_three, wait_until

from duplex_sidecar.ledger.errors import LeaseSettling, LedgerUnavailable, LedgerUnsuitable
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.store import Ledger

pytestmark = pytest.mark.fault

SESSIONS = 12


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ValkeyProcess]]:
    with cluster_of_three(tmp_path_factory.mktemp("cluster") / "nodes") as three:
        yield three


@pytest.fixture
async def ledger(nodes: list[ValkeyProcess]) -> AsyncIterator[Ledger]:
    """Knows of one node at first."""
    ledger = await Ledger.connect(f"redis+cluster://127.0.0.1:{nodes[0].port}", PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


def slot_of(session: str) -> int:
    return key_slot(session_keys(session).meta.encode())


class Move:
    """One slot's way from a node to another, step by step as `valkey-cli --cluster reshard` goes
    it."""

    def __init__(self, nodes: list[ValkeyProcess], session: str) -> None:
        self._slot = slot_of(session)
        self._keys = session_keys(session).all()
        self._clients: list[Redis] = [node.client for node in nodes]
        ids = [_text(client.execute_command("CLUSTER", "MYID")) for client in self._clients]
        source = next(number for number, node in enumerate(nodes) if _has(node, self._keys))
        target = (source + 1) % len(nodes)
        self.target = nodes[target]
        self._source_client, self._target_client = self._clients[source], self._clients[target]
        self._ids = ids[source], ids[target]

    def begin(self) -> None:
        source, target = self._ids
        self._set(self._target_client, "IMPORTING", source)
        self._set(self._source_client, "MIGRATING", target)

    def carry(self) -> None:
        """The session's keys, all of them."""
        place = ("127.0.0.1", self.target.port, "", 0, 5_000)
        self._source_client.execute_command("MIGRATE", *place, "KEYS", *self._keys)

    def end(self) -> None:
        for client in (self._target_client, self._source_client, *self._clients):
            self._set(client, "NODE", self._ids[1])

    def close(self) -> None:
        for client in self._clients:
            client.close()

    def _set(self, client: "Redis", what: str, node: str) -> None:
        client.execute_command("CLUSTER", "SETSLOT", self._slot, what, node)


def _has(node: ValkeyProcess, keys: tuple[str, ...]) -> bool:
    with node.client as client:
        return keys[0].encode() in client.keys("*")


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


async def test_sessions_live_on_all_nodes_and_each_on_one(
    ledger: Ledger, nodes: list[ValkeyProcess], session: str
) -> None:
    names = [f"{session}-{number}" for number in range(SESSIONS)]
    writers = [await Writer.create(ledger, name) for name in names]
    await asyncio.gather(*(writer.units(3) for writer in writers))
    for writer, name in zip(writers, names, strict=True):
        await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
        await ledger.renew(writer.lease)
        assert (await ledger.load(name)).head == writer.head
        assert (await ledger.events_after(name, 0)).last_seq == 1
    places = [
        {n for n, node in enumerate(nodes) if _has(node, session_keys(x).all())} for x in names
    ]
    assert all(len(place) == 1 for place in places)
    assert set.union(*places) == {0, 1, 2}
    found = [name async for name in ledger.reader.sessions() if name.startswith(session)]
    assert sorted(found) == sorted(names)
    for writer, name in zip(writers, names, strict=True):
        await ledger.release(writer.lease)
        heir = await Writer.take_over(ledger, name, "replica-b")
        await heir.unit(4)
        archive = await ledger.archive(name)
        await ledger.import_as(archive, f"{name}-again")
        assert (await ledger.load(f"{name}-again")).head.committed_seq == 4
        assert await ledger.erase(name) > 5


async def test_a_session_is_followed_while_its_slot_moves(
    ledger: Ledger, nodes: list[ValkeyProcess], session: str
) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    await ledger.release(writer.lease)
    move = Move(nodes, session)
    move.begin()
    move.carry()
    # ASK: the node that has the slot yet points to the one that has the keys. A script of one key
    # goes there; one that names keys which do not exist is told to come again later.
    with pytest.raises(LedgerUnavailable):
        await ledger.load(session)
    assert await ledger.break_lease(session, replica="nobody") is False
    with pytest.raises(LedgerUnavailable, match="refuses for now"):
        await ledger.renew(writer.lease)
    move.end()
    # MOVED, once; then it is known.
    assert len((await ledger.load(session)).committed) == 2
    assert _has(move.target, session_keys(session).all())
    heir = None
    async with asyncio.timeout(PATIENCE_S):
        while heir is None:  # another node is another era: it settles first
            try:
                heir = await Writer.take_over(ledger, session, "replica-b")
            except LeaseSettling:
                await asyncio.sleep(0.2)
    await heir.unit(3)
    loaded = await ledger.load(session)
    assert [unit.seq for unit in loaded.committed] == [1, 2, 3]
    move.close()


async def test_nodes_that_have_forgotten_the_scripts_get_them_again(
    ledger: Ledger, nodes: list[ValkeyProcess], session: str
) -> None:
    for node in nodes:
        with node.client as client:
            client.script_flush()
    names = [f"{session}-{number}" for number in range(SESSIONS)]
    for name in names:
        await (await Writer.create(ledger, name)).unit(1)


async def test_one_node_by_its_own_address_is_refused(
    nodes: list[ValkeyProcess], session: str
) -> None:
    ledger = await Ledger.connect(nodes[0].url, PATIENT)
    elsewhere = next(
        name
        for name in (f"{session}-{number}" for number in range(100))
        if slot_of(name) > SLOTS // 3
    )
    with pytest.raises(LedgerUnsuitable, match=r"redis\+cluster://"):
        await ledger.exists(elsewhere)
    await ledger.close()


async def test_a_cluster_of_which_a_node_is_away_is_unavailable_there_alone(
    nodes: list[ValkeyProcess], ledger: Ledger, session: str
) -> None:
    names = [f"{session}-{number}" for number in range(SESSIONS)]
    writers = {name: await Writer.create(ledger, name) for name in names}
    for node in nodes:
        with node.client as client:
            client.config_set("cluster-require-full-coverage", "no")
    there = [name for name in names if _has(nodes[2], session_keys(name).all())]
    assert 0 < len(there) < SESSIONS
    nodes[2].kill()
    for name, writer in writers.items():
        if name in there:
            with pytest.raises(LedgerUnavailable):
                await writer.accept(1)
        else:
            await writer.unit(1)
    nodes[2].start()
    wait_until(lambda: _is_ok(nodes[0]))


async def test_nodes_get_their_scripts_again_whichever_other_one_is_away(
    nodes: list[ValkeyProcess], ledger: Ledger, session: str
) -> None:
    wait_until(lambda: all(_is_ok(node) for node in nodes))
    names = [f"{session}-{number}" for number in range(SESSIONS)]
    writers = {name: await Writer.create(ledger, name) for name in names}
    for node in nodes:
        with node.client as client:
            client.config_set("cluster-require-full-coverage", "no")
    here = [name for name in names if not _has(nodes[0], session_keys(name).all())]
    nodes[0].kill()
    for node in nodes[1:]:
        with node.client as client:
            client.script_flush()  # as if these had been started anew
    for name in here:
        await writers[name].unit(1)
    nodes[0].start()
    wait_until(lambda: all(_is_ok(node) for node in nodes))


def _is_ok(node: ValkeyProcess) -> bool:
    with node.client as client:
        return bool(client.cluster("info")["cluster_state"] == "ok")
