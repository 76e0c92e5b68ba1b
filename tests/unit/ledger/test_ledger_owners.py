"""What a process remembers of its owners: mended by a reader while the owner itself writes, and
forgotten once their lease is given back."""

import asyncio
from typing import Any, cast

import pytest

from duplex_sidecar.ledger.call import Head, PendingCall, ScriptName
from duplex_sidecar.ledger.owners import OwnersCalls
from duplex_sidecar.ledger.session_view import SessionMeta, parse_meta

pytestmark = pytest.mark.unit

META = {
    "phase": "open", "reason": "", "fence": "1", "nonce": "n", "replica": "a", "until": "0",
    "opening_hash": "", "floor_hash": "", "records_first": "1", "window_floor": "1",
    "pcm_floor": "1", "bytes": "0", "events_first": "1", "token": "", "token_offered": "",
    "voiced": "0", "voice_turn": "", "voice_samples": "0", "open": "", "events_last": "0",
}  # fmt: skip


class Server:
    """A ledger of one session that knows the length of its chain, and forgets on demand."""

    def __init__(self) -> None:
        self.index = 0
        self.asked: list[str] = []
        self.pause = asyncio.Event()
        self.pause.set()

    async def call(self, call: PendingCall) -> list[bytes]:
        self.asked.append(f"{call.script} {call.then.index if call.then else ''}".strip())
        if call.then is None:
            return [b"ok", b"1"]
        if call.then.index != self.index + 1:
            return [b"head", b"%d" % self.index, b"h%d" % self.index, b"0", b""]
        self.index += 1
        return [b"ok", b"%d" % self.index]

    async def meta(self, session: str) -> SessionMeta:
        fields = {
            **META,
            "index": str(self.index),
            "head": f"h{self.index}",
            "committed": str(self.index),
        }
        await self.pause.wait()
        return parse_meta(session, {k.encode(): v.encode() for k, v in fields.items()})


def acquire() -> PendingCall:
    return PendingCall("s", ScriptName.ACQUIRE, ("k",), ("n", "a"))


def note(index: int) -> PendingCall:
    then = Head(index, f"h{index}", index, None)
    return PendingCall("s", ScriptName.NOTE, ("k",), (1, "n", "op", f"h{index - 1}"), then)


async def owned(server: Server, writes: int) -> OwnersCalls:
    found = cast("Any", server)
    calls = OwnersCalls(found, found)
    await calls.run(acquire())
    for index in range(1, writes + 1):
        await calls.run(note(index))
    return calls


async def test_a_write_that_is_refused_while_a_reader_mends_is_sent_again() -> None:
    server = Server()
    calls = await owned(server, 3)
    server.index = 1
    server.pause.clear()
    mending = asyncio.create_task(calls.mend("s"))
    writing = asyncio.create_task(calls.run(note(4)))
    for _ in range(10):
        await asyncio.sleep(0)
    server.pause.set()
    assert await mending
    await writing
    assert server.index == 4


async def test_what_is_written_while_a_reader_looks_is_not_taken_for_lost() -> None:
    server = Server()
    calls = await owned(server, 1)
    server.pause.clear()
    mending = asyncio.create_task(calls.mend("s"))
    await asyncio.sleep(0)
    await calls.run(note(2))
    server.pause.set()
    assert not await mending
    assert server.asked.count("note 2") == 1


async def test_an_owner_whose_lease_is_broken_is_forgotten() -> None:
    server = Server()
    calls = await owned(server, 2)
    await calls.run(PendingCall("s", ScriptName.BREAK, ("k",), ("a",)))
    server.index = 1
    assert not await calls.mend("s")
    assert server.index == 1
