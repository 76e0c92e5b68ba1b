"""The Valkey is not there yet, is gone, hangs, and is back: what is held, what is refused by name,
and that nothing which was acknowledged is lost."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from functools import partial

import pytest
from support.arena import LEDGER_HOLD_S, Arena
from support.ledgers import assert_input_is_whole, committed_units, tokens_of
from support.material import manifest, speech
from support.patience import PATIENCE_S
from support.realtime import UNIT_BYTES, RealtimeClient, conversing, joined
from support.sidecars import get
from support.talks import CONTEXT, undisturbed
from support.valkeys import crash

from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.reach import ASK_PERIOD_S, AWAY_AFTER_S

pytestmark = pytest.mark.fault


def test_a_sidecar_without_its_ledger_waits_and_says_so(arena: Arena) -> None:
    assert arena.without_ledger["/livez"][0] == 200
    status, body = arena.without_ledger["/readyz"]
    assert status == 503
    assert '"waiting_for":"ledger: connecting"' in body
    assert "ledger: connecting" in arena.without_ledger["/statusz"][1]
    assert arena.refusal is not None
    assert arena.refusal.status == 503
    assert arena.refusal.body["error"]["code"] == "not_ready"
    assert arena.refusal.body["error"]["retryable"] is True
    assert arena.ready_after_ledger_s < 10
    assert arena.start_log.count("the ledger does not answer") == 1
    assert arena.start_log.count("the ledger is back") == 1


class Outage:
    """One way of being away."""

    def __init__(self, valkey: EmbeddedValkey, begin: Callable[[], None]) -> None:
        self.valkey = valkey
        self.begin = begin

    def end(self) -> None:
        if self.valkey.running:
            pid = self.valkey.pid
            assert pid is not None
            os.kill(pid, signal.SIGCONT)
        else:
            self.valkey.start()


@asynccontextmanager
async def outage(arena: Arena, how: signal.Signals) -> AsyncGenerator[Outage]:
    """The Valkey is well again afterwards, whatever a test does."""
    valkey = arena.bed.valkey
    pid = valkey.pid
    assert pid is not None
    away = Outage(
        valkey, partial(crash, valkey) if how is signal.SIGKILL else partial(os.kill, pid, how)
    )
    try:
        yield away
    finally:
        await asyncio.to_thread(away.end)


async def refused_at_last(client: RealtimeClient, deadline_s: float) -> None:
    """Offer nothing new until input is refused: empty appends are input, too."""
    async with asyncio.timeout(deadline_s):
        while True:
            await client.append(b"")
            try:
                event = await client.until("error", timeout_s=0.2)
            except TimeoutError:
                continue
            assert event["error"]["code"] == "ledger_unavailable"
            assert event["error"]["retryable"] is True
            return


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
async def test_a_ledger_that_goes_away_in_mid_conversation(
    arena: Arena, how: signal.Signals
) -> None:
    """Held at first, then refused by name; when it is back the conversation goes on as if nothing
    had been: the same units, the same tokens."""
    sidecar = arena.one()
    units = 16
    alone = await undisturbed(sidecar, CONTEXT, units)
    async with outage(arena, how) as away, conversing(sidecar, CONTEXT) as client:
        await client.speak(speech(6))
        await client.until_unit(4)
        await asyncio.to_thread(away.begin)
        gone = time.monotonic()
        await client.speak(speech(4, 6))  # held: no error
        await refused_at_last(client, PATIENCE_S)
        assert time.monotonic() - gone >= LEDGER_HOLD_S * 0.9
        refused = await client.refused({"type": "input_audio_buffer.append", "audio": ""})
        assert refused["code"] == "ledger_unavailable"
        assert get(sidecar, "/livez")[0] == 200
        known = len(client.heard.units)
        await asyncio.sleep(2)  # longer than the lease in all
        assert len(client.heard.units) == known, "nothing leaves while the ledger is away"
        await asyncio.to_thread(away.end)
        back = time.monotonic()
        await client.until_unit(10)
        print(f"first units {time.monotonic() - back:.1f} s after the ledger was back")
        client.heard.events.clear()
        await client.speak(speech(units - 10, 10))
        await client.until_unit(units)
        assert client.heard.errors == []
        client.heard.assert_whole()
        records = await committed_units(arena.bed.valkey.url, client.session)
        assert_input_is_whole(records)
        assert tokens_of(records) == alone.tokens


def readiness(sidecar: LocalSidecar, expected: int) -> tuple[str, float]:
    """What `/readyz` says once its status is the expected one, and after how many seconds."""
    began = time.monotonic()
    while (answer := get(sidecar, "/readyz"))[0] != expected:
        assert time.monotonic() - began < PATIENCE_S
        time.sleep(0.05)
    return answer[1], time.monotonic() - began


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "hanging"])
async def test_a_ledger_that_is_away_is_told_where_people_look(
    arena: Arena, how: signal.Signals
) -> None:
    """With no session: not ready after some seconds, alive, and ready again."""
    sidecar = arena.one()
    async with outage(arena, how) as away:
        before = len(sidecar.log.read_text())
        await asyncio.to_thread(away.begin)
        body, after_s = await asyncio.to_thread(readiness, sidecar, 503)
        assert '"waiting_for":"ledger: away"' in body
        # It had answered at most one look before.
        assert after_s > AWAY_AFTER_S - 2 * ASK_PERIOD_S
        assert get(sidecar, "/readyz?ledger=any")[0] == 200
        assert get(sidecar, "/livez")[0] == 200
        assert "ledger: away" in get(sidecar, "/statusz")[1]
        assert _reachable(sidecar) == 0
        await asyncio.to_thread(away.end)
        await asyncio.to_thread(readiness, sidecar, 200)
        assert "ledger: away" not in get(sidecar, "/statusz")[1]
        assert _reachable(sidecar) == 1
        told = sidecar.log.read_text()[before:]
        assert told.count("the ledger does not answer") == 1
        assert told.count("the ledger is back") == 1


def _reachable(sidecar: LocalSidecar) -> float:
    """As on `/metrics`."""
    lines = get(sidecar, "/metrics")[1].splitlines()
    return float(
        next(line for line in lines if line.startswith("duplex_ledger_reachable")).split()[-1]
    )


async def test_input_that_was_refused_can_be_sent_again(arena: Arena) -> None:
    """A client that goes by what is acknowledged loses nothing."""
    sidecar = arena.one()
    pcm = speech(8)
    async with outage(arena, signal.SIGSTOP) as away, conversing(sidecar, manifest()) as client:
        await client.speak(pcm[: 2 * UNIT_BYTES])
        await client.until_unit(2)
        await asyncio.to_thread(away.begin)
        await client.speak(pcm[2 * UNIT_BYTES : 3 * UNIT_BYTES])
        await refused_at_last(client, PATIENCE_S)
        await client.speak(pcm[3 * UNIT_BYTES :])  # refused whole
        assert (await client.until("error"))["error"]["code"] == "ledger_unavailable"
        await asyncio.to_thread(away.end)
        await client.until_unit(3)
        client.sent_samples = 3 * UNIT_BYTES // 2
        await client.speak(pcm[3 * UNIT_BYTES :])
        await client.until_unit(8)
        client.heard.assert_whole()
        assert_input_is_whole(await committed_units(arena.bed.valkey.url, client.session))


async def test_a_client_that_comes_back_while_the_ledger_is_away(arena: Arena) -> None:
    sidecar = arena.one()
    async with outage(arena, signal.SIGSTOP) as away, conversing(sidecar, manifest()) as client:
        await client.speak(speech(3))
        await client.until_unit(3)
        request = client.socket.request
        assert request is not None
        token = request.headers["authorization"].removeprefix("Bearer ")
        await asyncio.to_thread(away.begin)
        client.socket.transport.abort()
        with pytest.raises(ApiError) as refusal:
            await asyncio.to_thread(sidecar.open_session, "new-one", manifest(), "token")
        assert refusal.value.status == 503
        assert refusal.value.body["error"]["code"] == "ledger_unavailable"
        await asyncio.to_thread(away.end)
        async with joined(sidecar, client.session, token, heard=client.heard, resume=True) as again:
            await again.speak(speech(1, 3))
            await again.until_unit(4)
            again.heard.assert_whole()


def test_the_sidecar_is_still_the_same_process(arena: Arena) -> None:
    """None of the outages ended it or a stage of it."""
    sidecar = arena.one()
    assert sidecar.process is not None
    assert sidecar.process.poll() is None
    page = get(sidecar, "/statusz")[1]
    assert page.count("<td>ready</td>") == 4
