"""The append-only file is a witness of its own: it says what the product's reader says where that
one is right, and something else where reader, server or file are not what they should be."""

import sys
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from redis import Redis
from support.aof_witness import AofWitness
from support.ledger_kit import Writer, cut_of, spoken_batch, truncated_draft

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.export import Line, export_lines
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.ledger.store import Ledger

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from support import histories

pytestmark = pytest.mark.fault
SESSION = "seen"
KEYS = session_keys(SESSION)
UNITS = 12
KEPT_UNITS = 4


@pytest.fixture
def server(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
async def writer(server: EmbeddedValkey) -> AsyncIterator[Writer]:
    """Of a session with trimmed blobs and records, a journal, a cut and an open unit."""
    ledger = await Ledger.connect(server.url)
    writer = await Writer.create(ledger, SESSION)
    events = 0
    for seq in range(1, UNITS + 1):
        floor = max(1, seq - KEPT_UNITS)
        await writer.unit(seq, trim=Trim(floor, floor, max(1, floor - 2)))
        batch = spoken_batch(seq, events + 1, chunk=seq - 1)
        events = await ledger.journal(writer.lease, batch)
    await writer.cut(cut_of(truncated_draft(UNITS, UNITS), events + 1))
    await writer.accept(UNITS + 1)
    yield writer
    await ledger.close()


async def witnessed(url: str, folder: Path) -> list[str]:
    witness = AofWitness()
    witness.expect(await histories.ledger_end(url, SESSION))
    return witness.differences(url, folder / "copy")


async def test_reader_and_file_say_the_same(
    server: EmbeddedValkey, writer: Writer, tmp_path: Path
) -> None:
    assert await witnessed(server.url, tmp_path) == []
    with Redis.from_url(server.url) as client:
        assert int(cast(Any, client.hget(KEYS.meta, "records_first"))) > 1
        client.bgrewriteaof()
    await writer.commit(UNITS + 1)
    assert await witnessed(server.url, tmp_path) == []


def hides_a_unit(lines: list[Line]) -> list[Line]:
    return lines[:-1]


def says_other_tokens(lines: list[Line]) -> list[Line]:
    return [
        msgspec.structs.replace(
            line, records=tuple(record.replace("[10,11,", "[10,12,") for record in line.records)
        )
        for line in lines
    ]


def makes_up_a_hash(lines: list[Line]) -> list[Line]:
    return [*lines[:-1], msgspec.structs.replace(lines[-1], hash="0" * 64)]


@pytest.mark.parametrize("wrong", [hides_a_unit, says_other_tokens, makes_up_a_hash])
async def test_a_reader_that_says_something_else_is_caught(
    server: EmbeddedValkey,
    writer: Writer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    wrong: Callable[[list[Line]], list[Line]],
) -> None:
    def lines(loaded: Any) -> list[bytes]:
        right = [msgspec.json.decode(line, type=Line) for line in export_lines(loaded)]
        return [msgspec.json.encode(line) for line in wrong(right)]

    monkeypatch.setattr(histories, "export_lines", lines)
    assert await witnessed(server.url, tmp_path) != []


async def test_a_unit_that_is_not_in_the_file_is_missed(
    server: EmbeddedValkey, writer: Writer, tmp_path: Path
) -> None:
    with Redis.from_url(server.url) as client:
        client.config_set("appendonly", "no")
    await writer.commit(UNITS + 1)
    assert any("in the file" in text for text in await witnessed(server.url, tmp_path))


def another_record(client: "Redis") -> None:
    index = int(cast(Any, client.hget(KEYS.meta, "index"))) - 2
    stored = cast(bytes, client.hget(KEYS.entries, str(index)))
    client.hset(KEYS.entries, str(index), stored.replace(b'"seq"', b'"seq" '))


def another_sound(client: "Redis") -> None:
    client.hset(KEYS.pcm, str(UNITS), b"x" * 32_000)


def a_lost_event(client: "Redis") -> None:
    client.hdel(KEYS.events, "5")


@pytest.mark.parametrize("forged", [another_record, another_sound, a_lost_event])
async def test_what_was_forged_after_it_was_read_is_caught(
    server: EmbeddedValkey, writer: Writer, tmp_path: Path, forged: Callable[["Redis"], None]
) -> None:
    """As if the reader had not looked: the file is judged by itself, too."""
    witness = AofWitness()
    witness.expect(await histories.ledger_end(server.url, SESSION))
    with Redis.from_url(server.url) as client:
        forged(client)
    assert witness.differences(server.url, tmp_path / "copy") != []
