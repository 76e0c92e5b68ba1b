"""A ledger that cannot be read is refused by the record's name; nothing is deleted, nobody else
notices."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace as changed
from pathlib import Path

import msgspec
import pytest
from redis.asyncio import Redis

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.keys import SessionKeys, session_keys
from duplex_sidecar.protocol.errors import ClientError, ErrorCode

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODEL, TOKEN, Caller, Terms, check_events, replica, tokens

pytestmark = pytest.mark.fault
UNITS = 8


@pytest.fixture
async def server(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url)
    yield client
    await client.aclose()


async def flip_a_byte(server: Redis, keys: SessionKeys) -> None:
    record = await server.hget(keys.entries, "5")
    assert record is not None
    middle = len(record) // 2
    damaged = record[:middle] + bytes([record[middle] ^ 1]) + record[middle + 1 :]
    await server.hset(keys.entries, "5", damaged)


async def newer_schema(server: Redis, keys: SessionKeys) -> None:
    record = await server.hget(keys.entries, "5")
    assert record is not None
    await server.hset(keys.entries, "5", record.replace(b'"schema":1', b'"schema":2'))


async def lose_a_record(server: Redis, keys: SessionKeys) -> None:
    await server.hdel(keys.entries, "5")


async def lose_a_blob(server: Redis, keys: SessionKeys) -> None:
    await server.hdel(keys.rows, str(UNITS))


async def change_a_blob(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.pcm, str(UNITS), b"other")


async def lose_the_state(server: Redis, keys: SessionKeys) -> None:
    await server.hdel(keys.state, "committed")


async def foreign_type(server: Redis, keys: SessionKeys) -> None:
    await server.delete(keys.rows)
    await server.set(keys.rows, "foreign")


async def damage_a_mark(server: Redis, keys: SessionKeys) -> None:
    await server.rpush(keys.voice, b"\xc1")


async def no_number(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.meta, "index", "many")


async def no_text(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.meta, "reason", b"\xff\xfe")


async def no_unit(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.state, "voice_unit", "many")


async def other_speech(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.state, "voice", b"\xc1")


async def foreign_meta(server: Redis, keys: SessionKeys) -> None:
    await server.delete(keys.meta)
    await server.set(keys.meta, "foreign")


async def high_floor(server: Redis, keys: SessionKeys) -> None:
    await server.hset(keys.meta, "window_floor", 1_000_000)


Damage = Callable[[Redis, SessionKeys], Awaitable[None]]
DAMAGES: dict[str, tuple[Damage, str]] = {
    "flipped byte": (flip_a_byte, "entry 5"),
    "newer schema": (newer_schema, "entry 5: schema 2"),
    "lost record": (lose_a_record, "entry 5"),
    "lost blob": (lose_a_blob, f"rows of unit {UNITS}"),
    "changed blob": (change_a_blob, f"pcm of unit {UNITS}"),
    "lost state": (lose_the_state, "state"),
    "foreign type": (foreign_type, ":rows: has a foreign type"),
    "damaged mark": (damage_a_mark, "voice mark"),
    "no text": (no_text, "meta: unreadable field"),
    "no unit": (no_unit, "voice state: unreadable unit"),
    "other speech": (other_speech, "voice state"),
    "foreign meta": (foreign_meta, ":meta: has a foreign type"),
    "high floor": (high_floor, "meta: window floor 1000000"),
    "no number": (no_number, "meta: unreadable field"),
}
LEASE = {
    *(b"fence", b"nonce", b"replica", b"asked", b"until", b"era", b"released", b"address", b"woken")
}
LEASE |= {b"phase", b"reason"}


async def held(server: Redis, session: str) -> dict[str, object]:
    """Everything of the session but whose lease it is."""
    found: dict[str, object] = {}
    for key in session_keys(session).all():
        found[key] = await server.dump(key)
    if await server.type(session_keys(session).meta) != b"hash":
        return found
    meta = await server.hgetall(session_keys(session).meta)
    found[session_keys(session).meta] = {k: v for k, v in meta.items() if k not in LEASE}
    return found


@pytest.mark.parametrize("name", DAMAGES)
async def test_a_damaged_ledger_is_refused_by_its_record(
    valkey: EmbeddedValkey, server: Redis, name: str
) -> None:
    damage, words = DAMAGES[name]
    session, beside = f"bad-{name.replace(' ', '-')}", f"beside-{name.replace(' ', '-')}"
    async with replica(valkey.url, f"before-{session}") as here:
        await here.open(session, Terms("context"))
        caller = Caller(session)
        await caller.dial(here)
        await caller.talk(UNITS)
    await damage(server, session_keys(session))
    before = await held(server, session)
    async with replica(valkey.url, f"after-{session}") as here:
        await here.open(beside, Terms("basic"))
        other = Caller(beside)
        await other.dial(here)
        await other.talk(3)
        for _ in range(2):
            with pytest.raises(ClientError) as error:
                await here.registry.attach(session, TOKEN, caller.last_sequence)
            assert error.value.code is ErrorCode.LEDGER_CORRUPT
            assert words in error.value.detail
        await other.talk(6)
        check_events(other)
        assert len(await tokens(here.ledger, beside)) == 6
    assert await held(server, session) == before


async def test_a_ledger_of_another_checkpoint_is_refused_by_its_name(
    valkey: EmbeddedValkey, server: Redis
) -> None:
    async with replica(valkey.url, "old-checkpoint") as here:
        await here.open("old", Terms("off"))
        caller = Caller("old")
        await caller.dial(here)
        await caller.talk(2)
    before = await held(server, "old")
    model = changed(MODEL, fingerprint="another")
    async with replica(valkey.url, "new-checkpoint", model=model) as here:
        with pytest.raises(ClientError, match="names checkpoint fake, here runs another"):
            await here.registry.attach("old", TOKEN, 0)
    assert await held(server, "old") == before
    async with replica(valkey.url, "old-checkpoint-again") as here:
        await caller.dial(here)
        await caller.talk(4)
        check_events(caller)


def test_the_schema_is_where_the_damage_expects_it() -> None:
    assert msgspec.json.encode({"schema": 1}) == b'{"schema":1}'
