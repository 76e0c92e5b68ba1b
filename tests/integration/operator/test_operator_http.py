"""The operator's ways out over real sockets: what comes back in every way that it can."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import kopf
import pytest
from aiohttp import web
from redis.asyncio import Redis
from support.patience import PATIENCE_S
from support.stand_in_sidecar import StandInSidecar
from support.valkeys import ValkeyProcess, primary_and_replica, wait_until

from duplex_api.constants import SESSION_KIND
from duplex_api.routes import WAKE_FIELD, WAKE_STREAM, RouteRecord, call_key, route_key
from duplex_api.session import SessionPhase
from duplex_operator.feed import BeatLine, FeedPhase, FeedSession, HelloLine, PodLine, read_line
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import (
    ApiError,
    ConflictError,
    MissingError,
    NotLeadingError,
    RefusedError,
    UnavailableError,
)
from duplex_operator.kube.events import tell_event
from duplex_operator.kube.resources import PODS, SESSIONS
from duplex_operator.objects import ObjectKey, read_meta
from duplex_operator.routes import LedgerAwayError, Routes
from duplex_operator.settings import OperatorSettings
from duplex_operator.sidecar_client import (
    AdminAddress,
    AdminCredentials,
    SidecarClient,
    SidecarRefusalError,
    SidecarUnreachableError,
)
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = pytest.mark.integration

KEY = ObjectKey("default", "talk")
PORT = 8766
HOST = "127.11.0.1"
TOKEN = "an-admin-token"


@dataclass
class ApiStub:
    """Answers from a script; notes what was asked."""

    script: list[Callable[[], web.StreamResponse]] = field(default_factory=list)
    asked: list[tuple[str, str, dict[str, str], Any]] = field(default_factory=list)
    authorizations: list[str] = field(default_factory=list)
    handler: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
    """Instead of the script."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        if self.handler is not None:
            return await self.handler(request)
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.method, request.path, dict(request.query), body))
        self.authorizations.append(request.headers.get("Authorization", ""))
        return self.script.pop(0)()


def answer(status: int, body: Any = None, **headers: str) -> Callable[[], web.StreamResponse]:
    return lambda: web.json_response(body or {}, status=status, headers=headers)


@pytest.fixture
async def stub() -> AsyncIterator[tuple[ApiStub, str]]:
    stub = ApiStub()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", stub.handle)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    yield stub, f"http://127.0.0.1:{port}"
    await runner.cleanup()


class Naps(list[float]):
    async def nap(self, seconds: float) -> None:
        if seconds:
            self.append(seconds)


@pytest.fixture
def naps() -> Naps:
    return Naps()


@pytest.fixture
async def api(stub: tuple[ApiStub, str], naps: Naps) -> AsyncIterator[KubernetesApi]:
    api = KubernetesApi(
        ApiConnection(kopf.ConnectionInfo(server=stub[1], token="first"), sleep=naps.nap)
    )
    yield api
    await api.connection.close()


async def test_what_can_pass_is_tried_again(
    api: KubernetesApi, stub: tuple[ApiStub, str], naps: Naps
) -> None:
    stub[0].script = [
        answer(429, **{"Retry-After": "3"}),
        answer(500),
        answer(200, {"metadata": {"name": "talk"}}),
    ]
    assert await api.get(SESSIONS, KEY) == {"metadata": {"name": "talk"}}
    assert naps[0] == 3.0
    assert api.connection.requests["get duplexsessions"] == 3
    stub[0].script = [answer(503)] * 4
    with pytest.raises(UnavailableError):
        await api.get(SESSIONS, KEY)


@pytest.mark.parametrize(
    ("status", "kind"),
    [(409, ConflictError), (404, MissingError), (410, MissingError), (422, RefusedError)],
)
async def test_what_cannot_pass_is_told_at_once(
    api: KubernetesApi, stub: tuple[ApiStub, str], status: int, kind: type[Exception]
) -> None:
    stub[0].script = [answer(status, {"reason": "Because", "message": "m" * 5000})]
    with pytest.raises(kind) as caught:
        await api.patch(SESSIONS, KEY, {"status": {}}, version="7", subresource="status")
    assert len(str(caught.value)) <= 1024
    method, path, query, body = stub[0].asked[0]
    assert (method, path) == (
        "PATCH",
        "/apis/duplex.dev/v1alpha1/namespaces/default/duplexsessions/talk/status",
    )
    assert query == {"fieldManager": "duplex-operator"}
    assert body == {"status": {}, "metadata": {"resourceVersion": "7"}}


async def test_a_replaced_token_is_read_again(stub: tuple[ApiStub, str]) -> None:
    naps = Naps()
    fresh = kopf.ConnectionInfo(server=stub[1], token="second")
    api = KubernetesApi(
        ApiConnection(
            kopf.ConnectionInfo(server=stub[1], token="first"),
            sleep=naps.nap,
            reconnect=lambda: fresh,
        )
    )
    stub[0].script = [answer(401), answer(200)]
    await api.get(SESSIONS, KEY)
    assert stub[0].authorizations == ["Bearer first", "Bearer second"]
    await api.connection.close()


async def test_many_calls_with_an_old_token_make_one_new_connection(
    stub: tuple[ApiStub, str],
) -> None:
    naps, reconnected = Naps(), 0
    arrived = asyncio.Barrier(8)

    def reconnect() -> kopf.ConnectionInfo:
        nonlocal reconnected
        reconnected += 1
        return kopf.ConnectionInfo(server=stub[1], token="second")

    async def handle(request: web.Request) -> web.StreamResponse:
        old = request.headers["Authorization"] == "Bearer first"
        if old:
            await arrived.wait()
        return web.json_response({}, status=401 if old else 200)

    stub[0].handler = handle
    first = kopf.ConnectionInfo(server=stub[1], token="first")
    api = KubernetesApi(ApiConnection(first, sleep=naps.nap, reconnect=reconnect))
    await asyncio.wait_for(asyncio.gather(*(api.get(SESSIONS, KEY) for _ in range(8))), PATIENCE_S)
    assert reconnected == 1
    await api.connection.close()


async def test_a_list_is_read_in_pages_and_starts_over_when_it_expires(
    api: KubernetesApi, stub: tuple[ApiStub, str]
) -> None:
    page = {"items": [{"metadata": {"name": "a"}}], "metadata": {"continue": "next"}}
    last = {"items": [{"metadata": {"name": "b"}}], "metadata": {"resourceVersion": "9"}}
    stub[0].script = [answer(200, page), answer(410), answer(200, page), answer(200, last)]
    listing = await api.list(PODS, selector="a=b")
    assert [item["metadata"]["name"] for item in listing.items] == ["a", "b"]
    assert listing.version == "9"
    assert stub[0].asked[-1][2] == {"limit": "100", "labelSelector": "a=b", "continue": "next"}


async def test_an_object_nested_too_deep_keeps_nobody_from_the_others(
    api: KubernetesApi, stub: tuple[ApiStub, str]
) -> None:
    """Who may make one object may write such a thing into its managedFields."""
    deep = '{"f:a":' * 3000 + "{}" + "}" * 3000
    odd = f'{{"metadata":{{"name":"odd","managedFields":[{{"fieldsV1":{deep}}}]}}}}'
    page = f'{{"items":[{{"metadata":{{"name":"a"}}}},{odd}],"metadata":{{"resourceVersion":"9"}}}}'

    def text(said: str) -> Callable[[], web.StreamResponse]:
        return lambda: web.Response(text=said, content_type="application/json")

    stub[0].script = [text(page), text(odd), text(f'{{"type":"ADDED","object":{odd}}}\n')]
    listing = await api.list(SESSIONS)
    assert [item["metadata"]["name"] for item in listing.items] == ["a", "odd"]
    assert (await api.get(SESSIONS, KEY))["metadata"]["name"] == "odd"
    told = [event async for event in api.watch(SESSIONS, "", "9") if event is not None]
    assert [event.object["metadata"]["name"] for event in told] == ["odd"]


@pytest.mark.parametrize("said", ["<html>sorry</html>", "", "[]", "null"])
async def test_an_answer_that_is_no_list_is_not_taken_for_an_empty_one(
    api: KubernetesApi, stub: tuple[ApiStub, str], said: str
) -> None:
    stub[0].script = [lambda: web.Response(text=said)]
    with pytest.raises(UnavailableError):
        await api.list(SESSIONS)


@pytest.mark.parametrize("said", ["<html>", "[]", "null", '{"type":"ADDED","object":[]}'])
async def test_a_watch_that_says_no_event_is_begun_anew(
    api: KubernetesApi, stub: tuple[ApiStub, str], said: str
) -> None:
    stub[0].script = [lambda: web.Response(text=said + "\n")]
    with pytest.raises(UnavailableError):
        async for _ in api.watch(SESSIONS, "", "9"):
            pass


def watching(*lines: str, ends: bool = True) -> Callable[[], web.StreamResponse]:
    """A watch's answer: one JSON object a line. ends: as the server ends it, else it breaks off."""
    body = "".join(line + "\n" for line in lines).encode()
    return lambda: web.Response(body=body) if ends else Broken(body)


class Broken(web.StreamResponse):
    """Says what it has, and its connection is gone."""

    def __init__(self, body: bytes) -> None:
        super().__init__()
        self._said = body

    async def prepare(self, request: web.BaseRequest) -> Any:
        writer = await super().prepare(request)
        await self.write(self._said)
        assert request.transport is not None
        request.transport.abort()
        return writer


class Silent(web.StreamResponse):
    """Begins, and says nothing for longer than its client waits."""

    async def prepare(self, request: web.BaseRequest) -> Any:
        await super().prepare(request)
        await self.write(b" ")
        with suppress(TimeoutError):
            async with asyncio.timeout(1):
                await asyncio.Event().wait()


ADDED = '{"type":"ADDED","object":{"metadata":{"name":"talk","resourceVersion":"7"}}}'
BOOKMARK = '{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9"}}}'
EXPIRED = '{"type":"ERROR","object":{"kind":"Status","code":410,"reason":"Expired","message":"x"}}'


async def test_a_watch_tells_changes_until_it_ends(
    api: KubernetesApi, stub: tuple[ApiStub, str]
) -> None:
    stub[0].script = [watching(ADDED, BOOKMARK)]
    seen = [event async for event in api.watch(PODS, "default", "5", selector="a=b")]
    assert seen[0] is None
    assert [event.type for event in seen[1:] if event is not None] == ["ADDED", "BOOKMARK"]
    (method, path, query, _) = stub[0].asked[0]
    assert (method, path) == ("GET", "/api/v1/namespaces/default/pods")
    assert query["resourceVersion"] == "5"
    assert query["labelSelector"] == "a=b"
    assert query["allowWatchBookmarks"] == "true"
    assert 300 <= int(query["timeoutSeconds"]) < 360


@pytest.mark.parametrize(
    ("script", "raised", "status"),
    [
        (answer(410, {"reason": "Expired"}), MissingError, 410),
        (watching(ADDED, EXPIRED), MissingError, 410),
        (answer(403, {"reason": "Forbidden"}), RefusedError, 403),
        (answer(503), UnavailableError, 503),
        (watching(ADDED, "no json"), UnavailableError, 0),
        (watching(ADDED, ends=False), UnavailableError, 0),
    ],
    ids=["expired", "expires", "forbidden", "away", "unreadable", "broken"],
)
async def test_how_a_watch_breaks(
    api: KubernetesApi,
    stub: tuple[ApiStub, str],
    script: Callable[[], web.StreamResponse],
    raised: type[ApiError],
    status: int,
) -> None:
    stub[0].script = [script]
    with pytest.raises(raised) as caught:
        async for _ in api.watch(SESSIONS, "", "5"):
            pass
    assert caught.value.status == status


async def test_a_watch_without_a_word_ends(
    api: KubernetesApi, stub: tuple[ApiStub, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_operator.kube.connection.STREAM_SILENCE_S", 0.2)
    stub[0].script = [Silent]
    assert [event async for event in api.watch(PODS, "", "5")] == [None]


async def test_a_watch_with_an_old_token_is_begun_with_a_new_one(
    stub: tuple[ApiStub, str],
) -> None:
    stub[0].script = [answer(401), watching(ADDED)]
    first, second = (kopf.ConnectionInfo(server=stub[1], token=t) for t in ("old", "new"))
    api = KubernetesApi(ApiConnection(first, reconnect=lambda: second))
    with pytest.raises(UnavailableError):
        async for _ in api.watch(SESSIONS, "", "5"):
            pass
    assert len([event async for event in api.watch(SESSIONS, "", "5")]) == 2
    assert stub[0].authorizations == ["Bearer old", "Bearer new"]
    await api.connection.close()


async def test_nothing_is_written_without_the_lead(stub: tuple[ApiStub, str]) -> None:
    api = KubernetesApi(ApiConnection(kopf.ConnectionInfo(server=stub[1])), may_write=lambda: False)
    with pytest.raises(NotLeadingError):
        await api.patch(SESSIONS, KEY, {}, version=None)
    assert not stub[0].asked
    await api.connection.close()


async def test_a_delete_names_its_object_and_a_lost_event_stops_nothing(
    api: KubernetesApi, stub: tuple[ApiStub, str]
) -> None:
    stub[0].script = [answer(404), answer(403), answer(201)]
    await api.delete(PODS, KEY, uid="u1", grace_s=5)
    assert stub[0].asked[0][3] == {
        "preconditions": {"uid": "u1"},
        "propagationPolicy": "Background",
        "gracePeriodSeconds": 5,
    }
    about = read_meta({"metadata": {"name": KEY.name, "namespace": KEY.namespace, "uid": "u1"}})
    await tell_event(api, SESSION_KIND, about, reason="Ready", note="n" * 5000, action="Reconcile")
    event = stub[0].asked[1][3]
    assert (event["type"], len(event["note"])) == ("Normal", 1024)
    assert event["regarding"] == {
        "apiVersion": "duplex.dev/v1alpha1",
        "kind": "DuplexSession",
        "name": "talk",
        "namespace": "default",
        "uid": "u1",
    }
    await tell_event(api, SESSION_KIND, about, reason="Ready", note="né " * 500, action="Reconcile")
    assert stub[0].asked[2][3]["note"] == "né " * 256


async def test_an_api_server_that_is_away_is_told_so() -> None:
    naps = Naps()
    api = KubernetesApi(
        ApiConnection(kopf.ConnectionInfo(server="http://127.0.0.1:9"), sleep=naps.nap)
    )
    with pytest.raises(UnavailableError) as caught:
        await api.get(SESSIONS, KEY)
    assert caught.value.status == 0
    assert len(naps) == 3
    await api.connection.close()


# --- the sidecar ---------------------------------------------------------------------------------


@pytest.fixture
async def sidecar(valkey: EmbeddedValkey) -> AsyncIterator[StandInSidecar]:
    sidecar = StandInSidecar(valkey.url, "pod-uid", TOKEN, HOST)
    await sidecar.start(PORT)
    yield sidecar
    await sidecar.die()


def client_of(token: str = TOKEN, host: str = HOST) -> SidecarClient:
    return SidecarClient(AdminAddress(host, PORT, "name"), AdminCredentials(token, ""))


async def test_calls_to_a_sidecar(sidecar: StandInSidecar) -> None:
    client = client_of()
    await client.put_session("s1", '{"a": 1}', "f" * 64, 1)
    await client.put_session("s1", '{"a": 1}', "f" * 64, 1)
    with pytest.raises(SidecarRefusalError) as caught:
        await client.put_session("s1", '{"a": 2}', "f" * 64, 1)
    assert caught.value.code == "manifest_conflict"
    sidecar.keeps.add("s1")
    assert not await client.end("s1", "Deleted")
    sidecar.keeps.clear()
    assert await client.end("s1", "Deleted")
    assert await client.end("s1", "Deleted")
    await client.erase("s1")
    with pytest.raises(SidecarRefusalError) as caught:
        await client.park("s1")
    assert caught.value.status == 404
    await client.close()


async def test_what_goes_on_is_not_begun_anew(sidecar: StandInSidecar) -> None:
    client = client_of()
    with pytest.raises(SidecarRefusalError) as caught:
        await client.put_session("lost", "{}", "f" * 64, 1, resume=True)
    assert (caught.value.status, caught.value.code) == (410, "ledger_lost")
    await client.put_session("lost", "{}", "f" * 64, 1)
    await client.put_session("lost", "{}", "f" * 64, 1, resume=True)
    await client.close()


async def test_a_voice_goes_along_with_both_orders(sidecar: StandInSidecar) -> None:
    client = client_of()
    await client.put_session("spoken", "{}", "f" * 64, 1, b"a voice")
    await client.prepare("expected", "{}", "f" * 64, 2, b"another")
    assert sidecar.sessions["spoken"].voice_file == b"a voice"
    assert sidecar.prepared["expected"].voice_file == b"another"
    await client.close()


async def test_no_call_waits_for_the_connection_of_another(
    sidecar: StandInSidecar, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is answered before all are there."""
    monkeypatch.setattr("duplex_operator.sidecar_client.CONNECT_TIMEOUT_S", 10.0)
    client = client_of()
    (many,) = (f.default for f in fields(OperatorSettings) if f.name == "reconciles_at_once")
    sidecar.hand_overs_together = asyncio.Barrier(many)
    moves = (client.hand_over(f"s{number}", "replica", 2) for number in range(many))
    told = await asyncio.gather(*moves, return_exceptions=True)
    assert {type(error) for error in told} == {SidecarRefusalError}, "each has had its answer"
    await client.close()


async def test_a_wrong_token_and_nobody_there(sidecar: StandInSidecar) -> None:
    client = client_of(token="wrong")
    with pytest.raises(SidecarRefusalError) as caught:
        await client.drain(5)
    assert caught.value.status == 401
    with pytest.raises(SidecarRefusalError):
        async for _ in client.feed():
            pass
    await client.close()
    away = client_of(host="127.11.0.2")
    with pytest.raises(SidecarUnreachableError):
        await away.erase("s1")
    await away.close()
    assert TOKEN not in repr(AdminCredentials(TOKEN, ""))


async def test_a_feed_tells_everything_then_what_changes(sidecar: StandInSidecar) -> None:
    client = client_of()
    await client.put_session("s2", "{}", "f" * 64, 1)
    lines = client.feed()
    hello = await anext(lines)
    assert isinstance(hello, HelloLine)
    assert (hello.replica, hello.slots, hello.ready) == ("pod-uid-1", 2, True)
    told = await anext(lines)
    assert isinstance(told, FeedSession)
    assert (told.session, told.phase, told.fence) == ("s2", FeedPhase.READY, 1)
    assert isinstance(await anext(lines), BeatLine)
    sidecar.attach("s2")
    news = [line async for line in _until_session(lines)]
    assert news[-1].phase is FeedPhase.ACTIVE
    await sidecar.die()
    try:
        async for line in lines:
            assert isinstance(line, BeatLine | FeedSession)
    except SidecarUnreachableError:
        pass  # how a socket ends is the system's choice
    await client.close()


async def _until_session(lines: AsyncIterator[Any]) -> AsyncIterator[FeedSession]:
    async for line in lines:
        if isinstance(line, FeedSession):
            yield line
            return


def test_lines_of_another_release_are_passed_over() -> None:
    assert read_line(b'{"kind": "weather"}') is None
    assert read_line(b"nonsense") is None
    assert read_line(b'{"kind":"pod","ready":true,"mood":"good"}') == PodLine(ready=True)


# --- the ledger server ---------------------------------------------------------------------------


async def test_route_records_leases_and_wakes(valkey: EmbeddedValkey) -> None:
    routes = Routes(valkey.url)
    redis = Redis.from_url(valkey.url, protocol=2, decode_responses=True)
    record = RouteRecord(
        token_sha256="a" * 64,
        phase=SessionPhase.QUEUED,
        pool="a/b",
        session="c/d",
        queue_position=2,
    )
    assert await routes.read("r1") is None
    await routes.write("r1", record, 60_000)
    assert await routes.read("r1") == record
    assert 0 < await redis.pttl(route_key("r1")) <= 60_000
    shorter = record.model_copy(update={"queue_position": None})
    await routes.write("r1", shorter, 60_000)
    assert await routes.read("r1") == shorter
    assert [uid async for uid, _ in routes.records() if uid == "r1"] == ["r1"]
    assert [uid async for uid, _ in routes.records(lambda uid: uid == "r1") if uid == "r1"] == []

    lease = await routes.lease("r1")
    assert (lease.held, lease.fence, lease.phase) == (False, 0, "")
    far = {"until": "99999999999999", "nonce": "n", "fence": "7", "phase": "open"}
    await redis.hset("duplex:{r1}:meta", mapping=far)  # type: ignore[misc]
    lease = await routes.lease("r1")
    assert (lease.held, lease.fence, lease.phase) == (True, 7, "open")

    assert await routes.token_let_in("r1") == ""
    await redis.hset("duplex:{r1}:meta", "token", "b" * 64)  # type: ignore[misc]
    assert await routes.token_let_in("r1") == "b" * 64

    woken: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(routes.wakes(woken.put_nowait))
    async with asyncio.timeout(PATIENCE_S):
        while woken.empty():
            await redis.xadd(WAKE_STREAM, {WAKE_FIELD: "r1"})
            await asyncio.sleep(0.02)
        assert await woken.get() == "r1"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await redis.set(call_key("r1"), "a gateway's")
    await routes.drop("r1")
    assert await redis.keys("duplex:{r1}:*") == ["duplex:{r1}:meta"]
    await redis.aclose()
    await routes.close()


async def test_a_wake_between_two_looks_is_heard(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_operator.routes.WAKE_BLOCK_MS", 1)
    routes = Routes(valkey.url)
    redis = Redis.from_url(valkey.url, protocol=2, decode_responses=True)
    await redis.xadd(WAKE_STREAM, {WAKE_FIELD: "of before"})
    look, called = routes._redis.xread, list[str]()

    async def looking(*arguments: Any, **named: Any) -> Any:
        answer = await look(*arguments, **named)
        if not answer and not called:
            called.append("r2")
            await redis.xadd(WAKE_STREAM, {WAKE_FIELD: "r2"})
        return answer

    monkeypatch.setattr(routes._redis, "xread", looking)
    woken: asyncio.Queue[str] = asyncio.Queue()
    task = asyncio.create_task(routes.wakes(woken.put_nowait))
    async with asyncio.timeout(PATIENCE_S):
        assert await woken.get() == "r2"
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await redis.aclose()
    await routes.close()


async def test_wakes_are_heard_in_a_stream_that_begins_anew_under_an_earlier_clock(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As behind a failover, or on a server that has lost everything."""
    monkeypatch.setattr("duplex_operator.routes.WAKE_BLOCK_MS", 1)
    routes = Routes(valkey.url)
    redis = Redis.from_url(valkey.url, protocol=2, decode_responses=True)
    await redis.delete(WAKE_STREAM)
    await redis.xadd(WAKE_STREAM, {WAKE_FIELD: "of before"}, id="99999999999999-7")
    woken: set[str] = set()
    task = asyncio.create_task(routes.wakes(woken.add))
    async with asyncio.timeout(PATIENCE_S):
        for uid in ("r3", "r4"):
            while uid not in woken:
                await redis.xadd(WAKE_STREAM, {WAKE_FIELD: uid})
                await asyncio.sleep(0.02)
            await redis.delete(WAKE_STREAM)
    assert "of before" not in woken
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    await redis.aclose()
    await routes.close()


async def test_the_primary_is_the_one_that_sentinels_name(tmp_path: Path) -> None:
    """Also after they have named another one."""
    record = RouteRecord(token_sha256="a" * 64, phase=SessionPhase.READY, pool="a/b", session="c/d")
    with primary_and_replica(tmp_path / "servers") as (primary, replica):
        sentinel = ValkeyProcess(tmp_path / "sentinel", sentinel_of=primary.port)
        sentinel.start()
        routes = Routes(f"redis+sentinel://127.0.0.1:{sentinel.port}/main/0")
        try:
            with sentinel.client as client:
                wait_until(lambda: len(client.sentinel_slaves("main")) == 1)
            await routes.write("r1", record, 60_000)
            with replica.client as client:
                client.config_set("min-replicas-to-write", 0)
            primary.kill()
            async with asyncio.timeout(2 * PATIENCE_S):
                while not await _written(routes, record):
                    assert routes.failures
            assert await routes.read("r1") == record
        finally:
            await routes.close()
            sentinel.kill()


async def _written(routes: Routes, record: RouteRecord) -> bool:
    try:
        await routes.write("r1", record, 60_000)
    except LedgerAwayError:
        await asyncio.sleep(0.1)
        return False
    return True


async def test_a_ledger_that_is_away_is_an_answer() -> None:
    routes = Routes("redis://127.0.0.1:9")
    with pytest.raises(LedgerAwayError):
        await routes.read("r1")
    assert routes.failures == 1
    await routes.close()
