"""Who else may talk, and from when: a second connection, and a second token. At both doors, the
sidecar's own and the gateway's."""

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.realtime import Json, RealtimeClient
from websockets.asyncio.client import connect

from duplex_sidecar.ledger.embedded import EmbeddedValkey

sys.path.append(str(Path(__file__).resolve().parents[2] / "fakes"))
from gateway_kit import Gate, House, Yard, calling, gate, http_get, sha256_of, yard
from session_kit import TOKEN, claim, second

pytestmark = pytest.mark.integration

RESUME: Json = {"type": "session.resume", "last_received_server_event_seq": 0}
Dial = Callable[..., AbstractAsyncContextManager[RealtimeClient]]


@pytest.fixture
async def ground(valkey: EmbeddedValkey) -> AsyncIterator[Yard]:
    async with yard(valkey.url) as ground:
        yield ground


@pytest.fixture
async def front(valkey: EmbeddedValkey) -> AsyncIterator[Gate]:
    async with gate(valkey.url) as front:
        yield front


@pytest.fixture
async def house(ground: Yard) -> House:
    return await ground.build()


@pytest.fixture
async def session(ground: Yard, house: House) -> str:
    """One that runs."""
    name = f"t-{secrets.token_hex(4)}"
    await ground.operator.declare(name)
    await ground.operator.place(name, house)
    return name


@pytest.fixture(params=["sidecar", "gateway"])
def dial(request: pytest.FixtureRequest, front: Gate, house: House) -> Dial:
    @asynccontextmanager
    async def directly(
        session: str, token: str = TOKEN, *, resume: bool = False
    ) -> AsyncIterator[RealtimeClient]:
        more = "&resume=1" if resume else ""
        url = f"ws://{house.address}/v1/realtime?session={session}{more}"
        headers = {"authorization": f"Bearer {token}"}
        async with connect(url, additional_headers=headers, proxy=None) as socket:
            yield RealtimeClient(socket, session)

    def through_the_gateway(session: str, token: str = TOKEN, **how: Any) -> Any:
        return calling(front, session, token, **how)

    return directly if request.param == "sidecar" else through_the_gateway


async def talk(client: RealtimeClient, unit: int) -> None:
    await client.append(second(unit))
    await client.until_unit(unit)


async def test_a_takeover_takes_effect_with_its_first_message(dial: Dial, session: str) -> None:
    async with dial(session) as first:
        await first.until("session.created")
        await first.format()
        await talk(first, 1)
        async with dial(session, resume=True) as silent:
            await talk(first, 2)
            assert silent.heard.events == []
        await talk(first, 3)
        async with dial(session, resume=True) as abandoned:
            await talk(first, 4)
            abandoned.socket.transport.abort()
        await talk(first, 5)
        assert first.heard.errors == []
        async with dial(session, resume=True) as heir:
            await talk(first, 6)
            await heir.send(RESUME)
            assert (await first.until("error"))["error"]["code"] == "session_taken_over"
            assert (await first.until_closed())[0] == 4001
            await heir.until("session.resumed")
            await heir.format()
            await talk(heir, 7)
    first.heard.assert_whole()


async def test_a_plain_second_dial_takes_over_at_once(dial: Dial, session: str) -> None:
    async with dial(session) as first:
        await first.until("session.created")
        async with dial(session) as other:
            assert (await first.until("error"))["error"]["code"] == "session_taken_over"
            assert (await first.until_closed())[0] == 4001
            await other.until("session.created")
            await other.format()
            await talk(other, 1)


@pytest.mark.parametrize("resume", [False, True])
async def test_an_old_token_opens_until_the_first_message_under_the_new_one(
    dial: Dial, ground: Yard, house: House, session: str, resume: bool
) -> None:
    """resume: that it resumes is the new client's first message; else its format is."""
    manifest = ground.operator.terms[session].manifest()
    fence = house.opened[session]
    await house.replica.registry.open(session, manifest, claim("another", fence))
    await ground.operator.declare(
        session, token_sha256=sha256_of(TOKEN), token_sha256_next=sha256_of("another")
    )
    async with dial(session, TOKEN) as old:
        await old.until("session.created")
        await old.format()
        await talk(old, 1)
    async with dial(session, "another", resume=resume) as abandoned:
        if not resume:
            await abandoned.until("session.resumed")
    # It has said nothing, so nothing has changed.
    async with dial(session, TOKEN) as old:
        await old.until("session.resumed")
        await old.format()
        await talk(old, 2)
        async with dial(session, "another", resume=resume) as new:
            if resume:
                await new.send(RESUME)
            await new.until("session.resumed")
            await new.format()
            assert (await old.until_closed())[0] == 4001
            await talk(new, 3)
            async with dial(session, TOKEN) as late:
                assert (await late.until("error"))["error"]["code"] == "session_not_found"
                assert (await late.until_closed())[0] == 1008
            async with dial(session, "another", resume=True) as again:
                await again.send(RESUME)
                await again.until("session.resumed")


async def test_a_call_under_a_replaced_token_does_not_end_the_one_under_the_new_one(
    ground: Yard, front: Gate, house: House, session: str
) -> None:
    """The route record has both tokens still; the ledger knows that the new one is in use."""
    manifest, fence = ground.operator.terms[session].manifest(), house.opened[session]
    await house.replica.registry.open(session, manifest, claim("another", fence))
    both = {"token_sha256": sha256_of(TOKEN), "token_sha256_next": sha256_of("another")}
    await ground.operator.declare(session, token="another", **both)
    async with (
        calling(front, session, resume=True) as late,  # let in, before it says anything
        calling(front, session, "another") as new,
    ):
        await new.until("session.created")
        await new.format()
        await talk(new, 1)
        async with asyncio.timeout(PATIENCE_S):
            while await token_in_use(house, session) != sha256_of("another"):
                pass
        await late.send(RESUME)
        assert (await late.until("error"))["error"]["code"] == "session_not_found"
        assert (await late.until_closed())[0] == 1008
        async with calling(front, session) as later:
            assert (await later.until("error"))["error"]["code"] == "session_not_found"
        _, page = await http_get(front.health_port, "/metrics")
        assert "duplex_gateway_failed_attempts_total 1.0" in page
        await ground.build()
        await house.replica.registry.close()
        await new.until("session.moved")
        await talk(new, 2)
    assert new.heard.errors == []
    new.heard.assert_whole()


async def token_in_use(house: House, session: str) -> str:
    """sha256 of the one that lets in by the ledger."""
    meta = await house.replica.ledger.reader.meta(session)
    assert meta is not None
    return meta.token_sha256
