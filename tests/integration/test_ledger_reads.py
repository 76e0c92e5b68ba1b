"""Damage is named and concerns one session; a window that slides while it is read is no damage; the
command line and the exported file say the same as the ledger."""

import asyncio
import json
import re
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from redis.asyncio import Redis
from support.ledger_kit import (
    Writer,
    cut_of,
    spoken_batch,
    state_after,
    truncated_draft,
    unit_media,
)
from support.patience import PATIENT

from duplex_sidecar.cli.ledger import app
from duplex_sidecar.ledger.connection import Command, Connection
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LedgerCorrupt, SchemaTooNew
from duplex_sidecar.ledger.export import export_lines, verify_lines
from duplex_sidecar.ledger.keys import SessionKeys, session_keys
from duplex_sidecar.ledger.media import Trim
from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.records import ClosedDraft, RedoDraft
from duplex_sidecar.ledger.store import Ledger

pytestmark = pytest.mark.integration


@pytest.fixture
async def ledger(valkey: EmbeddedValkey) -> AsyncIterator[Ledger]:
    ledger = await Ledger.connect(valkey.url, PATIENT)
    yield ledger
    await ledger.close()


@pytest.fixture
async def raw(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url, protocol=2)
    yield client
    await client.aclose()


@pytest.fixture
def session() -> str:
    return f"s-{secrets.token_hex(6)}"


async def conversation(ledger: Ledger, session: str) -> Writer:
    """Three units, of which one sounded, and a fourth that is accepted."""
    writer = await Writer.create(ledger, session)
    await writer.units(3)
    await ledger.journal(writer.lease, spoken_batch(1, 1, chunk=0))
    await writer.accept(4, state=b"carry")
    return writer


# --- damage -------------------------------------------------------------------------------------

Damage = Callable[[Redis, SessionKeys], Awaitable[Any]]


async def _flip(raw: Redis, key: str, field: str) -> None:
    data = bytearray(await raw.hget(key, field) or b"")
    data[len(data) // 2] ^= 1
    await raw.hset(key, field, bytes(data))


async def _retype(raw: Redis, key: str) -> None:
    await raw.delete(key)
    await raw.set(key, "foreign")


DAMAGES: dict[str, tuple[Damage, str]] = {
    "an entry changed": (lambda raw, keys: _flip(raw, keys.entries, "3"), r"entry (3|4)"),
    "the last entry changed": (
        lambda raw, keys: raw.hset(keys.entries, "7", b'{"schema":1,"kind":"closed"}'),
        "entry 7",
    ),
    "an entry missing": (lambda raw, keys: raw.hdel(keys.entries, "2"), "entry 2"),
    "the opening missing": (lambda raw, keys: raw.hdel(keys.entries, "0"), "entry 0"),
    "the opening changed": (lambda raw, keys: _flip(raw, keys.entries, "0"), "entry 0"),
    "rows missing": (lambda raw, keys: raw.hdel(keys.rows, "2"), "rows of unit 2"),
    "rows changed": (lambda raw, keys: _flip(raw, keys.rows, "2"), "rows of unit 2"),
    "PCM missing": (lambda raw, keys: raw.hdel(keys.pcm, "4"), "pcm of unit 4"),
    "a frame missing": (lambda raw, keys: raw.hdel(keys.frames, "3"), "frames of unit 3"),
    "a frame changed": (lambda raw, keys: _flip(raw, keys.frames, "1"), "frames of unit 1"),
    "reference rows missing": (lambda raw, keys: raw.hdel(keys.rows, "0"), "reference rows"),
    "state changed": (lambda raw, keys: _flip(raw, keys.state, "committed"), "state"),
    "open unit's state missing": (
        lambda raw, keys: raw.hdel(keys.state, "accepted"),
        "state of the open unit",
    ),
    "a voice mark changed": (lambda raw, keys: raw.rpush(keys.voice, b"?"), "voice mark 1"),
    "meta has a field less": (lambda raw, keys: raw.hdel(keys.meta, "voiced"), "meta"),
    "head of another chain": (lambda raw, keys: raw.hset(keys.meta, "head", "0" * 64), "entry 7"),
    "entries of a foreign type": (lambda raw, keys: _retype(raw, keys.entries), "entries"),
    "meta of a foreign type": (lambda raw, keys: _retype(raw, keys.meta), "meta"),
    "rows of a foreign type": (lambda raw, keys: _retype(raw, keys.rows), "rows"),
}


@pytest.mark.parametrize("name", DAMAGES)
async def test_damage_is_named_and_nothing_is_deleted(
    ledger: Ledger, raw: Redis, session: str, name: str
) -> None:
    damage, record = DAMAGES[name]
    await conversation(ledger, session)
    bystander = await conversation(ledger, f"{session}-b")
    keys = session_keys(session)
    await damage(raw, keys)
    before = [await raw.dump(key) for key in keys.all()]
    with pytest.raises(LedgerCorrupt) as caught:
        await ledger.load(session)
    assert caught.match(record)
    assert caught.value.session == session
    assert [await raw.dump(key) for key in keys.all()] == before
    assert (await ledger.load(f"{session}-b")).head == bystander.head


async def test_a_record_of_a_newer_release_is_refused_by_name(
    ledger: Ledger, raw: Redis, session: str
) -> None:
    await conversation(ledger, session)
    await raw.hset(session_keys(session).entries, "5", b'{"schema":9,"kind":"unheard-of"}')
    with pytest.raises(SchemaTooNew) as caught:
        await ledger.load(session)
    assert (caught.value.record, caught.value.schema) == ("entry 5", 9)


@pytest.mark.parametrize("part", ["pcm", "rows", "frames", "entries", "order", "state"])
async def test_a_write_into_a_foreign_key_moves_nothing(
    ledger: Ledger, raw: Redis, session: str, part: str
) -> None:
    writer = await conversation(ledger, session)
    await writer.commit(4)
    await _retype(raw, getattr(session_keys(session), part))
    with pytest.raises(LedgerCorrupt):
        await writer.accept(5, state=b"x")
    meta = await ledger.reader.meta(session)
    assert meta is not None
    assert meta.head == writer.head


# --- reading beside a writer --------------------------------------------------------------------


class SlidesMeanwhile(Connection):
    """Lets something happen between the snapshot and the blobs."""

    meanwhile: Callable[[], Awaitable[None]] | None = None

    async def read_at_once(self, session: str, commands: Sequence[Command]) -> list[Any]:
        answers = await super().read_at_once(session, commands)
        if self.meanwhile is not None:
            happening, self.meanwhile = self.meanwhile, None
            await happening()
        return answers


async def test_a_window_that_slides_while_it_is_read_is_read_again(
    valkey: EmbeddedValkey, ledger: Ledger, session: str
) -> None:
    writer = await conversation(ledger, session)
    connection = await SlidesMeanwhile.connect(
        valkey.url, call_timeout_ms=5_000, load_timeout_ms=20_000, connections=2
    )
    assert isinstance(connection, SlidesMeanwhile)
    connection.meanwhile = lambda: writer.commit(4, trim=Trim(window_below=4, pcm_below=4))
    loaded = await LedgerReader(connection).load(session)
    assert loaded.head.committed_seq == 4
    assert loaded.media[4] == unit_media(4)
    assert loaded.media[3].rows == b""
    await connection.close()


async def test_a_reader_beside_a_fast_writer_always_sees_a_whole_session(
    valkey: EmbeddedValkey, ledger: Ledger, session: str
) -> None:
    writer = await Writer.create(ledger, session)
    reader = await LedgerReader.connect(valkey.url)
    heads: list[int] = []

    async def read() -> None:
        while not done.is_set():
            loaded = await reader.load(session)
            assert loaded.state == state_after(loaded.head.committed_seq)
            heads.append(loaded.head.index)

    done = asyncio.Event()
    reading = asyncio.create_task(read())
    seq = 0
    while seq < 40 or len(set(heads)) <= 5:
        seq += 1
        floor = max(1, seq - 3)
        await writer.unit(seq, trim=Trim(floor, floor, floor))
        await asyncio.sleep(0.01)
    done.set()
    await reading
    assert heads == sorted(heads)
    assert len(set(heads)) > 5
    await reader.close()


# --- the file and the command line --------------------------------------------------------------


async def told(ledger: Ledger, session: str) -> Writer:
    """Every kind of record: four units (the last one redone), a truncation, a close."""
    writer = await Writer.create(ledger, session)
    await writer.units(2)
    await writer.cut(cut_of(truncated_draft(2, 2), 1))
    await writer.unit(3)
    await writer.accept(4)
    redo = RedoDraft(seq=4, attempt=2, cause="engine_restart")
    writer.head = await ledger.note(writer.lease, writer.head, redo)
    await writer.commit(4, turn_end=True)
    await writer.accept(5)
    draft = ClosedDraft(seq=4, reason="unit_failed")
    writer.head = await ledger.note(writer.lease, writer.head, draft)
    return writer


async def test_an_exported_file_has_one_line_a_unit_and_verifies_alone(
    ledger: Ledger, session: str
) -> None:
    writer = await told(ledger, session)
    lines = list(export_lines(await ledger.load(session)))
    rows = [json.loads(line) for line in lines]
    assert [(row["kind"], row["seq"], row["committed"]) for row in rows] == [
        ("opening", 0, False),
        ("unit", 1, True),
        ("unit", 2, True),
        ("truncated", 2, False),
        ("unit", 3, True),
        ("unit", 4, True),
        ("unit", 5, False),
        ("closed", 4, False),
    ]
    wanted = {"seq", "epoch", "turn", "token_ids", "terminator", "plan", "prev_hash", "replica"}
    assert all(wanted <= row.keys() for row in rows)
    assert [row["prev_hash"] for row in rows[1:]] == [row["hash"] for row in rows[:-1]]
    assert rows[-1]["hash"] == writer.head.hash
    assert rows[5]["attempts"] == 2
    assert verify_lines(lines) == 4


@pytest.mark.parametrize("place", [0, 1, 4, 7])
async def test_a_changed_exported_line_is_found(ledger: Ledger, session: str, place: int) -> None:
    await told(ledger, session)
    lines = list(export_lines(await ledger.load(session)))
    row = json.loads(lines[place])
    row["records"][-1] = row["records"][-1].replace('"at_ms":1', '"at_ms":2')
    lines[place] = json.dumps(row).encode()
    with pytest.raises(LedgerCorrupt):
        verify_lines(lines)


async def test_a_trimmed_ledger_exports_what_it_kept(ledger: Ledger, session: str) -> None:
    writer = await Writer.create(ledger, session)
    await writer.units(4)
    await writer.unit(5, trim=Trim(4, 4, 4))
    lines = list(export_lines(await ledger.load(session)))
    assert [json.loads(line)["seq"] for line in lines] == [0, 4, 5]
    assert verify_lines(lines) == 2


def run(*arguments: str) -> int:
    """The command's exit code."""
    with pytest.raises(SystemExit) as caught:
        app(list(arguments))
    code = caught.value.code
    return code if isinstance(code, int) else 0


async def test_show_verify_and_export(
    valkey: EmbeddedValkey,
    ledger: Ledger,
    raw: Redis,
    session: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await told(ledger, session)
    output = tmp_path / "ledger.jsonl"
    in_thread = asyncio.to_thread

    assert await in_thread(run, "show", session, "--url", valkey.url) == 0
    text = capsys.readouterr().out
    assert "unit 4 committed, unit 5 accepted" in text
    assert "ran out" not in text
    units = [line for line in text.splitlines() if line.endswith("replica-a")]
    assert len(units) == 4
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\d ", line) for line in units)
    await raw.hset(session_keys(session).meta, "until", "1")
    assert await in_thread(run, "show", session, "--url", valkey.url) == 0
    assert "nobody: the lease of replica-a (fence 1) ran out" in capsys.readouterr().out
    assert await in_thread(run, "verify", session, "--url", valkey.url) == 0
    assert "4 units" in capsys.readouterr().out
    assert (
        await in_thread(run, "export", session, "--url", valkey.url, "--output", str(output)) == 0
    )
    assert await in_thread(run, "verify", "--file", str(output)) == 0
    assert "ok: 4 units" in capsys.readouterr().out
    assert await in_thread(run, "export", session, "--url", valkey.url) == 0
    assert capsys.readouterr().out.encode() == output.read_bytes()


async def test_the_command_line_says_what_is_wrong(
    valkey: EmbeddedValkey,
    ledger: Ledger,
    raw: Redis,
    session: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    await told(ledger, session)
    await _flip(raw, session_keys(session).entries, "2")
    in_thread = asyncio.to_thread
    assert await in_thread(run, "verify", session, "--url", valkey.url) == 1
    assert "entry" in capsys.readouterr().err
    assert await in_thread(run, "show", "nobody", "--url", valkey.url) == 2
    assert "not in the ledger" in capsys.readouterr().err
    assert await in_thread(run, "show", "no/name", "--url", valkey.url) == 2
    assert await in_thread(run, "verify", session, "--url", f"unix://{tmp_path}/none") == 2
    assert await in_thread(run, "verify") == 2
    assert await in_thread(run, "verify", "--file", str(tmp_path / "none")) == 2
    (tmp_path / "bad").write_text("{}\n")
    assert await in_thread(run, "verify", "--file", str(tmp_path / "bad")) == 1
