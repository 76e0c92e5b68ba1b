"""Real engines: a sidecar that is asked to leave parks what it runs, in the middle of turns too;
another one wakes it, and every token is as if nothing had happened. Strangers get no numbers."""

import asyncio
import os
import signal
import time
import urllib.request

import pytest
from support.arena import Arena
from support.ledgers import assert_input_is_whole, committed_units, tokens_of
from support.material import speech
from support.realtime import Gone, Heard, RealtimeClient, joined, new_session
from support.sidecars import get, survivors
from support.talks import CONTEXT, OFF, Undisturbed, speak_in_step, undisturbed

from duplex_sidecar.ledger.reader import LedgerReader
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

pytestmark = pytest.mark.fault
UNITS = 20
PARKED = (ERRORS[ErrorCode.PARKED].close_code, "parked")


async def test_four_conversations_move_when_their_sidecar_is_asked_to_leave(arena: Arena) -> None:
    first, second = arena.pair()
    texts = (OFF, CONTEXT, OFF, CONTEXT)
    alone = {text: await undisturbed(second, text, UNITS) for text in (OFF, CONTEXT)}
    named = [await asyncio.to_thread(new_session, first, text, "moves") for text in texts]
    heard = [Heard() for _ in texts]
    tree = first.tree()
    assert first.process is not None

    async def until_parked(number: int) -> None:
        """The first two talk on until their turn is over, the others wait for the grace's end."""
        text = texts[number]
        inside = first_that_sounds(alone[text]) if text == CONTEXT else alone[OFF].inside_turn(3)
        async with joined(first, *named[number], heard=heard[number]) as client:
            await speak_in_step(client, 1, inside)
            await ready.wait()
            more = range(inside + 1, UNITS) if number < 2 else range(0)
            assert await farewell(client, more) == PARKED

    ready = asyncio.Barrier(len(texts) + 1)
    async with asyncio.TaskGroup() as group:
        for number in range(len(texts)):
            group.create_task(until_parked(number))
        async with asyncio.timeout(240):
            await ready.wait()
        asked = time.monotonic()
        os.kill(first.process.pid, signal.SIGTERM)
    print(f"all parked {time.monotonic() - asked:.1f} s after SIGTERM")
    assert await asyncio.to_thread(first.process.wait, 180) == 0
    assert survivors(tree, 60) == []

    reader = await LedgerReader.connect(arena.bed.valkey.url)
    try:
        for session, _ in named:
            meta = await reader.meta(session)
            assert meta is not None
            assert (meta.phase, meta.reason, meta.nonce) == (Phase.PARKED, "drain", "")
    finally:
        await reader.close()
    for number, (session, token) in enumerate(named):
        async with joined(second, session, token, heard=heard[number], resume=True) as client:
            await client.speak(speech(UNITS)[2 * client.sent_samples :])
            await client.until_unit(UNITS)
            client.heard.assert_whole()
            causes = [unit["rebuild_cause"] for unit in client.heard.units]
            assert causes.count("move") == 1
            records = await committed_units(arena.bed.valkey.url, session)
            assert_input_is_whole(records)
            assert tokens_of(records) == alone[texts[number]].tokens
            await client.close_session()


def first_that_sounds(alone: Undisturbed) -> int:
    sounding = (unit["unit"] for unit in alone.units if unit["audio_samples"])
    return next(unit for unit in sounding if unit >= 3)


async def farewell(client: RealtimeClient, more: range) -> tuple[int, str]:
    """Say those units, as long as somebody listens. Close code and reason."""
    try:
        for unit in more:
            await client.speak(speech(1, unit - 1))
            await client.until_unit(unit)
        return await client.until_closed()
    except Gone as gone:
        return gone.code, gone.reason


def test_pages_of_a_sidecar_that_strangers_can_reach(arena: Arena) -> None:
    """Its host is every address; started for this alone, its stages need not be ready."""
    sidecar = arena.bed.prepare("strangers", host="0.0.0.0")
    sidecar.start()
    deadline = time.monotonic() + 180
    while sidecar.readiness()[1] == "starting":
        assert time.monotonic() < deadline, sidecar.log_tail()
        time.sleep(0.1)
    try:
        for path in ("/metrics", "/statusz", "/admin/v1/sessions", "/admin/v1/feed"):
            assert get(sidecar, path)[0] == 401, path
        assert get(sidecar, "/livez")[0] == 200
        assert get(sidecar, "/openapi.json")[0] == 404
        token = sidecar.settings.admin_token
        for path in ("/metrics", "/statusz"):
            request = urllib.request.Request(
                f"{sidecar.base_url}{path}", headers={"authorization": f"Bearer {token}"}
            )
            with urllib.request.urlopen(request, timeout=60) as answer:
                assert answer.status == 200
    finally:
        assert sidecar.stop() == 0
