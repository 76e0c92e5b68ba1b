"""An erasure that something gets in the way of is finished later, also by others."""

import asyncio
import secrets
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis.asyncio import Redis
from support.ledger_kit import Writer
from support.valkeys import ValkeyProcess, primary_and_replica, wait_until

from duplex_sidecar.cli.ledger import erase
from duplex_sidecar.cli.ledger_sweeping import sweep
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerCorrupt, LedgerUnavailable, SessionErased
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.pending import PendingErasures, finish_erasures
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import Ledger

pytestmark = pytest.mark.fault


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[tuple[ValkeyProcess, ValkeyProcess]]:
    with primary_and_replica(tmp_path / "pair") as both:
        yield both


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


async def begun(ledger: Ledger) -> list[str]:
    return [name async for name in ledger.unfinished_erasures()]


async def test_an_order_outlives_whoever_took_it(
    valkey: EmbeddedValkey,
    session: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))
    ledger = await Ledger.connect(valkey.url)
    await (await Writer.create(ledger, session)).units(2)
    valkey.stop()
    order = lambda: erase(session, url=valkey.url, yes=True, patience_s=0.0)  # noqa: E731
    assert await asyncio.to_thread(order) == 2
    assert "may be there still" in capsys.readouterr().err
    # Another process, later: only the files and the ledger's address are the same.
    kept = PendingErasures(tmp_path / "cache", valkey.url)
    assert kept.sessions() == [session]
    assert await finish_erasures(ledger, kept) == 0
    assert kept.sessions() == [session]
    valkey.start()
    assert await ledger.phase(session) is Phase.OPEN
    assert await asyncio.to_thread(lambda: sweep(url=valkey.url)) == 0
    assert "finished 1 erasures" in capsys.readouterr().out
    assert await ledger.phase(session) is Phase.ERASED
    assert kept.sessions() == []
    await ledger.close()


async def test_what_is_no_session_is_refused_once(
    valkey: EmbeddedValkey,
    session: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Something else has the name of the session's meta: it stays, and nobody asks again."""
    monkeypatch.setenv("DUPLEX_CACHE_DIR", str(tmp_path / "cache"))
    ledger = await Ledger.connect(valkey.url)
    kept = PendingErasures(tmp_path / "cache", valkey.url)
    meta = session_keys(session).meta
    server = Redis.from_url(valkey.url)
    for write in (("SET", meta, "else"), ("RPUSH", meta, "else")):
        await server.execute_command(*write)
        with pytest.raises(LedgerCorrupt, match="foreign type"):
            await ledger.erase(session)
        kept.add(session)
        kept.add(f"{session}-other")
        caplog.clear()
        assert [await finish_erasures(ledger, kept) for _ in range(3)] == [1, 0, 0]
        assert kept.sessions() == []
        assert caplog.text.count("foreign type") == 1
        order = lambda: erase(session, url=valkey.url, yes=True)  # noqa: E731
        assert await asyncio.to_thread(order) == 1
        assert "foreign type" in capsys.readouterr().err
        assert kept.sessions() == []
        assert await server.exists(meta) == 1
        await server.delete(meta)
    await server.aclose()
    await ledger.close()


def test_orders_are_kept_apart_by_ledger_and_under_safe_names(tmp_path: Path) -> None:
    kept = PendingErasures(tmp_path, "redis://u:secret@h:1")
    for name in ("..", ".", "a"):
        kept.add(name)
    with pytest.raises(ValueError, match="session id"):
        kept.add("no/name")
    assert kept.sessions() == [".", "..", "a"]
    assert PendingErasures(tmp_path, "redis://h:1").sessions() == kept.sessions()
    assert PendingErasures(tmp_path, "redis://h:2").sessions() == []
    assert not [path for path in tmp_path.rglob("*") if "secret" in str(path)]
    kept.done("..")
    kept.done("..")
    assert kept.sessions() == [".", "a"]


async def test_a_replica_that_does_not_follow_leaves_the_erasure_unfinished(
    pair: tuple[ValkeyProcess, ValkeyProcess], session: str
) -> None:
    """Also where writes do not wait for replicas: a failover would bring the session back."""
    primary, replica = pair
    ledger = await Ledger.connect(primary.url)
    await (await Writer.create(ledger, session)).units(2)
    replica.signal(signal.SIGSTOP)
    with pytest.raises(LedgerUnavailable, match="0 of 1 replicas"):
        await ledger.erase(session)
    assert await ledger.phase(session) is Phase.ERASED
    with pytest.raises(SessionErased):
        await ledger.load(session)
    assert await begun(ledger) == [session]
    replica.signal(signal.SIGCONT)
    with primary.client as client:  # it has caught up before anybody is asked to finish
        client.set("later", 1)
        wait_until(lambda: client.wait(1, 1_000) == 1)
    assert await asyncio.to_thread(lambda: sweep(url=primary.url)) == 0
    assert await begun(ledger) == []
    await ledger.close()
    primary.kill()
    with replica.client as client:
        client.replicaof("no", "one")
        wait_until(lambda: client.info("replication")["role"] == "master")
    survivor = await Ledger.connect(replica.url)
    assert await survivor.phase(session) is Phase.ERASED
    await survivor.close()


async def test_an_erasure_whose_caller_ends_half_way_is_found(
    valkey: EmbeddedValkey, session: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = await Ledger.connect(valkey.url)
    await (await Writer.create(ledger, session)).units(1)
    connection = ledger._connection

    async def never(_: object) -> None:
        raise LedgerUnavailable(session, "its caller has ended")

    with monkeypatch.context() as patch:
        patch.setattr(connection, "repeat_for_all_replicas", never)
        with pytest.raises(LedgerUnavailable):
            await ledger.erase(session)
    assert await begun(ledger) == [session]
    assert await ledger.erase(session) == 0
    assert await begun(ledger) == []
    await ledger.close()


async def test_one_that_is_not_confirmed_holds_up_no_other(
    pair: tuple[ValkeyProcess, ValkeyProcess], session: str, tmp_path: Path
) -> None:
    primary, replica = pair
    ledger = await Ledger.connect(primary.url)
    kept = PendingErasures(tmp_path / "cache", primary.url)
    names = [f"{session}-{number}" for number in range(3)]
    for name in names:
        await Writer.create(ledger, name)
        kept.add(name)
    replica.signal(signal.SIGSTOP)
    assert await finish_erasures(ledger, kept) == 0
    assert [await ledger.phase(name) for name in names] == [Phase.ERASED] * 3
    assert kept.sessions() == names
    replica.signal(signal.SIGCONT)
    await ledger.close()
