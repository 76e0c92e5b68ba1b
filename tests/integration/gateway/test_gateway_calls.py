"""Calls through the gateway: the session may be anywhere, and move; the client's socket stays."""

import asyncio
import base64
import hashlib
import itertools
import secrets
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import AsyncOpenAI
from support.patience import PATIENCE_S
from support.realtime import Heard, RealtimeClient, append_event
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from duplex_api.session import SessionPhase
from duplex_gateway import waiting
from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, Yard, calling, gate, http_get, sha256_of, yard
from session_kit import RATE_HZ, TOKEN, Terms, second

pytestmark = pytest.mark.integration

FIRST_PAD_BYTES = 2 * (16_000 * 35 // 1000)


@pytest.fixture(autouse=True)
def _one_wake_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    """An operator that takes its time is not woken again."""
    monkeypatch.setattr(waiting, "WAKE_EVERY_S", 600.0)


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url) as front:
        yield front


async def new_session(ground: Yard, terms: Terms | None = None) -> str:
    session = f"g-{secrets.token_hex(4)}"
    await ground.operator.declare(session, terms)
    return session


async def say(client: RealtimeClient, first: int, last: int, *, slices: int = 3) -> None:
    """Those seconds, without a word about their positions, in uneven pieces."""
    for number in range(first, last + 1):
        pcm = second(number)
        cuts = [0, *sorted(np.random.default_rng(number).integers(1, RATE_HZ, slices - 1)), RATE_HZ]
        for start, end in itertools.pairwise(cuts):
            await client.append(pcm[2 * start : 2 * end])


async def check_input(ground: Yard, session: str, seconds: int) -> None:
    """Every sample that was sent is in the ledger, once, in order."""
    heard = await ground.heard_input(session)
    assert [(start, end) for start, end, _ in heard] == [
        (RATE_HZ * n, RATE_HZ * (n + 1)) for n in range(seconds)
    ]
    for number, (_, _, sha256) in enumerate(heard, 1):
        pad = bytes(FIRST_PAD_BYTES) if number == 1 else b""
        assert sha256 == hashlib.sha256(pad + second(number)).hexdigest(), f"second {number}"


async def test_a_session_that_nobody_runs_is_woken_and_talks(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        created = await client.until("session.created")
        assert created["duplex"]["session"] == session
        await client.format()
        await say(client, 1, 5)
        await client.until_unit(5)
        await client.send({"type": "session.heartbeat", "event_id": "beat"})
        assert (await client.until("session.heartbeat_ack"))["client_event_id"] == "beat"
        closed = await client.close_session()
        assert closed["reason"] == "session_ended"
        assert (await client.until_closed())[0] == 1000
    client.heard.assert_whole()
    assert ground.operator.wakes == [session]
    async with calling(front, session) as late:
        assert (await late.until("error"))["error"]["code"] == "session_ended"
        assert (await late.until_closed())[0] == 1000


async def test_moves_in_mid_sentence(ground: Yard, front: Gate) -> None:
    """Four owners, one socket. The client says no positions and knows of nothing."""
    here = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        said = 0
        for unit in (3, 6, 9):
            await say(client, said + 1, unit)
            await client.append(second(unit + 1)[:10_000])
            await client.until_unit(unit)
            there = await ground.build()
            await here.replica.registry.close()
            await client.append(second(unit + 1)[10_000:])
            moved = await client.until("session.moved")
            assert moved["duplex"]["fence"] == there.opened[session]
            assert moved["duplex"]["acknowledged_sample"] == unit * RATE_HZ
            await client.until_unit(unit + 1)
            here, said = there, unit + 1
        await client.close_session()
    client.heard.assert_whole()
    assert len(client.heard.units) == 10
    assert len(client.heard.of_type("session.updated")) == 1
    assert client.heard.errors == []
    _, page = await http_get(front.health_port, "/metrics")
    assert "duplex_gateway_moves_total 3.0" in page


async def test_every_sample_once_over_moves(ground: Yard, front: Gate) -> None:
    here = await ground.build()
    session = await new_session(ground, Terms("off"))
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        talking = asyncio.create_task(say(client, 1, 24, slices=7))
        for unit in (3, 9, 15):
            await client.until_unit(unit)
            there = await ground.build()
            await here.replica.registry.close()
            here = there
        await talking
        await client.until_unit(24)
    client.heard.assert_whole()
    await check_input(ground, session, 24)


async def test_a_client_that_counts_itself(ground: Yard, front: Gate) -> None:
    here = await ground.build()
    session = await new_session(ground, Terms("off"))
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        for number in range(1, 9):
            await client.send(append_event(second(number), from_sample=RATE_HZ * (number - 1)))
            if number == 4:
                await client.until_unit(3)
                there = await ground.build()
                await here.replica.registry.close()
                here = there
        await client.until_unit(8)
    client.heard.assert_whole()
    await check_input(ground, session, 8)


async def test_what_passes_is_byte_for_byte_what_the_sidecar_says(
    ground: Yard, front: Gate
) -> None:
    house = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        await say(client, 1, 8)
        await client.until_unit(8)
    url = f"ws://{house.address}/v1/realtime?session={session}&resume=1"
    headers = {"authorization": f"Bearer {TOKEN}"}
    async with connect(url, additional_headers=headers, proxy=None) as direct:
        twin = RealtimeClient(direct, session, client.heard)
        await twin.send({"type": "session.resume", "last_received_server_event_seq": 0})
        for _ in range(len(client.heard.sequenced) + 1):
            await twin.next()  # compares each with what the gateway passed on
    numbers = [e["server_event_seq"] for e in client.heard.events if "server_event_seq" in e]
    assert numbers == [*range(1, client.heard.last_sequence + 1)] * 2


async def test_an_owner_of_a_lower_fence_is_not_dialled(ground: Yard, front: Gate) -> None:
    """A ledger that fell back to a stale copy names one."""
    here = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        await say(client, 1, 1)
        await client.until_unit(1)
        ground.operator.awake = False
        stale = here.opened[session] - 1
        await ground.operator.forge_lease(session, fence=stale, address=here.address)
        here.cut_off()
        await client.until("session.queued")
        assert client.heard.of_type("session.moved") == []


def acknowledges(event: dict[str, Any], unit: int) -> bool:
    return event["type"] == "input_audio_buffer.committed" and event["duplex"]["unit"] == unit


async def test_the_same_token_dialled_again_is_a_resume(
    valkey: EmbeddedValkey, ground: Yard, front: Gate
) -> None:
    """Through another gateway; the first connection is told so."""
    await ground.build()
    session = await new_session(ground)
    heard = Heard()
    async with gate(valkey.url) as other, calling(front, session, heard=heard) as first:
        await first.until("session.created")
        await first.format()
        await say(first, 1, 3)
        await first.until_unit(2)
        if not any(acknowledges(event, 3) for event in heard.events):
            await first.until("input_audio_buffer.committed", lambda event: acknowledges(event, 3))
        seen = heard.last_sequence
        async with calling(other, session, heard=heard, resume=True) as second_call:
            await second_call.send(
                {"type": "session.resume", "last_received_server_event_seq": seen}
            )
            resumed = await second_call.until("session.resumed")
            assert resumed["duplex"]["acknowledged_sample"] == 3 * RATE_HZ
            assert (await first.until_closed())[0] == 4001
            await second_call.format()
            await say(second_call, 4, 5)
            await second_call.until_unit(5)
    heard.assert_whole()


async def test_the_older_of_two_calls_does_not_come_back_after_a_move(
    ground: Yard, front: Gate
) -> None:
    """Both lose their owner; the one whose client has dialled again is the session's call."""
    here = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as old:
        await old.until("session.created")
        ground.operator.awake = False
        await here.replica.registry.close()
        async with calling(front, session, resume=True) as new:
            await new.send({"type": "session.resume", "last_received_server_event_seq": 0})
            assert (await old.until("error"))["error"]["code"] == "session_taken_over"
            assert (await old.until_closed())[0] == 4001
            await ground.operator.place(session, await ground.build())
            await new.until("session.resumed")


async def test_a_sleeping_session_is_woken_by_input_alone(ground: Yard, front: Gate) -> None:
    here = await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        await say(client, 1, 2)
        await client.until_unit(2)
        # Before it parks: the gateway asks at once why the owner is gone.
        await ground.operator.declare(session, phase=SessionPhase.PARKED)
        await here.replica.registry.departures.park(session)
        queued = await client.until("session.queued")
        assert queued["duplex"]["reason"] == "parked"
        await client.send({"type": "session.heartbeat"})
        await client.until("session.heartbeat_ack")
        assert ground.operator.wakes == [session]
        await say(client, 3, 3)
        await client.until("session.moved")
        await client.until_unit(3)
        assert ground.operator.wakes == [session] * 2
    client.heard.assert_whole()
    await check_input(ground, session, 3)


async def test_a_client_is_told_what_it_waits_for(
    valkey: EmbeddedValkey, ground: Yard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_EVERY_S", 600.0)
    session = await new_session(ground)
    await ground.operator.declare(session, phase=SessionPhase.QUEUED, queue_position=3)
    async with gate(valkey.url, queue_wait_s=6.0) as front, calling(front, session) as client:
        queued = await client.until("session.queued")
        assert queued["duplex"]["reason"] == "queued"
        assert queued["duplex"]["position"] == 3
        assert queued["duplex"]["waited_ms"] >= 900
        error = await client.until("error")
        assert (error["error"]["code"], error["error"]["retryable"]) == ("not_ready", True)
        assert (await client.until_closed())[0] == 1013
        assert len(client.heard.of_type("session.queued")) == 1


async def refusal(front: Gate, session: str, token: str) -> tuple[str, str, int]:
    async with calling(front, session, token) as client:
        error = (await client.until("error"))["error"]
        return error["code"], error["message"], (await client.until_closed())[0]


async def test_who_may_not_call_learns_nothing(valkey: EmbeddedValkey, ground: Yard) -> None:
    await ground.build()
    session = await new_session(ground)
    async with gate(valkey.url, failed_attempts=6, failed_attempt_refill_s=600.0) as front:
        cases = [
            (session, "wrong"),
            ("unknown", TOKEN),
            ("%7Bx%7D*", TOKEN),
            ("", ""),
            (session, ""),
        ]
        answers = [await refusal(front, *case) for case in cases]
        assert {(code, close) for code, _, close in answers} == {("session_not_found", 1008)}
        assert len({message for _, message, _ in answers}) == 1
        assert (await refusal(front, session, "x" * 5000))[0] == "session_not_found"
        for token in ("wrong", TOKEN):  # from this address nobody may try now
            code, _, close = await refusal(front, session, token)
            assert (code, close) == ("resource_exhausted", 1013)
        _, page = await http_get(front.health_port, "/metrics")
        assert "duplex_gateway_failed_attempts_total 6.0" in page
    assert ground.operator.wakes == []


async def test_the_next_token_opens_too(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    await ground.operator.declare(
        session, token_sha256=sha256_of("older"), token_sha256_next=sha256_of(TOKEN)
    )
    async with calling(front, session) as client:
        await client.until("session.created")


async def test_a_browsers_token(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    await ground.operator.declare(session, token="plain-token")
    protocols = [Subprotocol("realtime"), Subprotocol("openai-insecure-api-key.plain-token")]
    async with connect(front.url(session), subprotocols=protocols, proxy=None) as socket:
        assert socket.subprotocol == "realtime"
        assert (await RealtimeClient(socket, session).until("session.created"))["session"]


async def test_a_resume_without_its_first_message(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    async with calling(front, session, resume=True) as client:
        await client.send({"type": "session.heartbeat"})
        assert (await client.until("error"))["error"]["code"] == "out_of_order_event"
        assert (await client.until_closed())[0] == 1008


async def test_refusals_of_the_session_are_passed_on_as_they_are(ground: Yard, front: Gate) -> None:
    await ground.build()
    session = await new_session(ground)
    async with calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        error = await client.refused(append_event(b"\0", event_id="odd"))
        assert (error["code"], error["event_id"]) == ("invalid_audio", "odd")
        error = await client.refused(append_event(b"\0"))
        assert (error["code"], error["event_id"]) == ("invalid_audio", None)
        error = await client.refused({"type": "response.create", "event_id": "r"})
        assert (error["code"], error["event_id"]) == ("unsupported_event", "r")
        assert (await client.refused("rubbish"))["code"] == "invalid_json"
        error = await client.refused(append_event(b"\0\0", unknown_field=1, event_id="u"))
        assert (error["code"], error["event_id"]) == ("invalid_event", "u")
        await say(client, 1, 2)
        await client.until_unit(2)
        assert await client.cut_off_by_many("rubbish", 120) == 1008


async def test_it_shuts_down_after_its_grace(valkey: EmbeddedValkey, ground: Yard) -> None:
    await ground.build()
    session = await new_session(ground)
    async with gate(valkey.url, drain_grace_s=600.0) as front, calling(front, session) as client:
        await client.until("session.created")
        await client.format()
        front.stop.set()
        assert await eventually_status(front.health_port, 503)
        async with calling(front, session) as late:
            assert (await late.until_closed())[0] == 1012
        await say(client, 1, 2)
        await client.until_unit(2)  # within the grace
        await client.close_session()
        await client.until_closed()
        await front.task  # nobody is left to wait for
    session = await new_session(ground)
    async with gate(valkey.url, drain_grace_s=0.5) as front, calling(front, session) as client:
        await client.until("session.created")
        front.stop.set()
        code, reason = await client.until_closed()
        assert (code, reason) == (1012, "the gateway is shutting down")
        await front.task


async def eventually_status(port: int, status: int) -> bool:
    async with asyncio.timeout(PATIENCE_S):
        while (await http_get(port, "/readyz"))[0] != status:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
    return True


async def test_a_full_gateway(valkey: EmbeddedValkey, ground: Yard) -> None:
    await ground.build()
    session = await new_session(ground)
    async with gate(valkey.url, max_calls=1) as front, calling(front, session) as client:
        await client.until("session.created")
        assert await refusal(front, session, TOKEN) == (
            "resource_exhausted",
            "this gateway has no room for a call",
            1013,
        )
        _, page = await http_get(front.health_port, "/metrics")
        assert "duplex_gateway_calls 1.0" in page
        assert (await http_get(front.health_port, "/livez"))[0] == 200


async def test_the_openai_sdk(ground: Yard, front: Gate) -> None:
    """Unmodified, over a move."""
    here = await ground.build()
    session = await new_session(ground)
    url = f"http://127.0.0.1:{front.port}/v1"
    client = AsyncOpenAI(base_url=url, api_key=TOKEN, max_retries=0)
    units: list[int] = []
    async with client.realtime.connect(
        model="duplex", extra_query={"session": session}
    ) as connection:
        assert (await connection.recv()).type == "session.created"
        for number in range(1, 7):
            if number == 4:
                there = await ground.build()
                await here.replica.registry.close()
                here = there
            pcm = np.repeat(np.frombuffer(second(number), "<i2"), 3)[::2].tobytes()  # 24 kHz
            await connection.input_audio_buffer.append(audio=base64.b64encode(pcm).decode())
        await connection.input_audio_buffer.commit()
        async with asyncio.timeout(PATIENCE_S):
            while not units or units[-1] < 6:
                event = (await connection.recv()).to_dict()
                if event["type"] == "duplex.unit":
                    units.append(event["unit"])  # type: ignore[arg-type]
    await client.close()
    assert units == [1, 2, 3, 4, 5, 6]
