"""The admin API over HTTP, on a port of its own, with TLS: every call, every refusal, the feed, and
nobody gets in anywhere without the token."""

import asyncio
import base64
import gc
import json
import logging
import socket
import ssl
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from support.certificates import make_certificate
from support.patience import PATIENCE_S

from duplex_api.given_voices import MAX_GIVEN_VOICE_BYTES, given_voice_name
from duplex_api.session import Modality, Output
from duplex_sidecar.admin import api as admin_api
from duplex_sidecar.admin.api import admin_router, install_error_handlers
from duplex_sidecar.admin.feed import Feed
from duplex_sidecar.admin.guard import AdminGuard, guards_all, guards_status
from duplex_sidecar.admin.tokens import FixedToken
from duplex_sidecar.checkpoint.voice import save_voice, seeded_voice
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.session.given_voices import GivenVoices
from duplex_sidecar.session.watching import UNIT_MS

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import MODEL, TOKEN, Caller, Replica, Terms, replica

pytestmark = pytest.mark.integration
ADMIN = "admin token"


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"), "duplex")


class Server(uvicorn.Server):
    async def __aenter__(self) -> "Server":
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.task = asyncio.create_task(self._serve([self.listener]))
        while not self.started:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.should_exit = True
        await self.task
        self.listener.close()


@dataclass
class Pod:
    """A replica over fake stages behind its admin port."""

    name: str
    replica: Replica
    feed: Feed
    server: Server
    client: httpx.AsyncClient
    ready: bool = True

    def hello(self) -> dict[str, Any]:
        return {
            "kind": "hello",
            "replica": self.name,
            "freeSlots": self.replica.registry.free_slots,
            "draining": self.replica.registry.departures.draining,
            "ready": self.ready,
            "ledgerAway": False,
        }

    async def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        answer = await self.client.request(method, f"/admin/v1{path}", json=body)
        assert answer.headers["duplex-admin-version"] == "1"
        found = answer.json()
        return answer.status_code, found.get("error", found)

    async def put(self, session: str, terms: Terms, **more: Any) -> tuple[int, Any]:
        manifest = terms.manifest().model_dump_json(by_alias=True, exclude_none=True)
        body: dict[str, Any] = {"manifest": manifest, **more}
        if "token" not in body and "tokenHash" not in body:
            body["token"] = TOKEN
        return await self.call("PUT", f"/sessions/{session}", body)


@asynccontextmanager
async def pod(
    url: str, name: str, certificate: tuple[Path, Path], slots: int
) -> AsyncIterator[Pod]:
    async with replica(url, name, slots=slots) as running, AsyncExitStack() as stack:
        found: list[Pod] = []
        feed = Feed(running.registry.roster, lambda: found[0].hello())
        app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        install_error_handlers(app)
        kept = Path(stack.enter_context(TemporaryDirectory()))
        voices = GivenVoices(kept, kept, MODEL.config.token2wav, MODEL.given, set)
        app.include_router(
            admin_router(lambda: running.registry, lambda: found[0].ready, feed, voices)
        )
        app.add_middleware(AdminGuard, token=FixedToken(ADMIN), guarded=guards_all)
        config = uvicorn.Config(
            app,
            log_config=None,
            lifespan="off",
            ssl_certfile=str(certificate[0]),
            ssl_keyfile=str(certificate[1]),
        )
        async with (
            Server(config) as server,
            httpx.AsyncClient(
                base_url=f"https://127.0.0.1:{server.port}",
                headers={"authorization": f"Bearer {ADMIN}"},
                verify=trusting(certificate[0]),
                timeout=PATIENCE_S,
            ) as client,
        ):
            found.append(Pod(name, running, feed, server, client))
            yield found[0]
            feed.close()


def trusting(cert: Path) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(cert))
    context.check_hostname = False  # the pod's address is no name of the certificate
    return context


@pytest.fixture
async def here(
    valkey: EmbeddedValkey, certificate: tuple[Path, Path], request: pytest.FixtureRequest
) -> AsyncIterator[Pod]:
    async with pod(valkey.url, f"pod-{request.node.name[:60]}", certificate, slots=2) as running:
        yield running


# --- the calls ------------------------------------------------------------------------------------


async def test_a_session_from_its_order_to_its_end(here: Pod) -> None:
    status, view = await here.put("whole", Terms("context"), fence=3)
    assert status == 200
    assert (view["phase"], view["fence"], view["units"], view["attached"]) == ("ready", 3, 0, False)
    assert await here.put("whole", Terms("context"), fence=3) == (200, view)
    caller = Caller("whole")
    await caller.dial(here.replica)
    await caller.talk(3)
    view = (await here.call("GET", "/sessions/whole"))[1]
    assert (view["phase"], view["units"], view["attached"]) == ("active", 3, True)
    assert await here.call("POST", "/sessions/whole/park", {}) == (200, {"parked": True})
    assert await here.call("POST", "/sessions/whole/park", {}) == (200, {"parked": True})
    assert (await here.call("GET", "/sessions/whole"))[0] == 404
    status, view = await here.put("whole", Terms("context"), fence=4)
    assert (status, view["fence"], view["units"]) == (200, 4, 3)
    await caller.dial(here.replica)
    await caller.talk(4)
    view = (await here.call("GET", "/sessions/whole"))[1]
    assert (view["rebuilds"], view["lastRebuild"]["cause"]) == (1, "move")
    assert len(view["lastRebuild"]["traceID"]) == 32
    answer = await here.call("DELETE", "/sessions/whole", {"reason": "deleted"})
    assert answer == (200, {"ended": True})
    assert await here.call("DELETE", "/sessions/whole") == (200, {"ended": False})
    status, error = await here.put("whole", Terms("context"), fence=5)
    assert (status, error["code"]) == (410, "session_ended")
    assert await here.call("POST", "/erase/whole") == (200, {"erased": True})
    assert await here.call("POST", "/erase/whole") == (200, {"erased": True})


async def test_the_refusals(here: Pod) -> None:
    terms = Terms("context")
    await here.put("one", terms, fence=5)
    refused: dict[str, tuple[int, str]] = {}

    async def note(what: str, answer: tuple[int, Any]) -> None:
        refused[what] = (answer[0], answer[1]["code"])

    await note("smaller fence", await here.put("one", terms, fence=4))
    await note("other manifest", await here.put("one", replace(terms, greedy=True), fence=5))
    await note("other token", await here.put("one", terms, token="another"))
    await note("unknown", await here.call("POST", "/sessions/nobody/park", {}))
    await here.put("two", terms)
    await note("no slot", await here.put("three", terms))
    here.ready = False
    await note("not ready", await here.put("three", terms))
    here.ready = True
    await here.call("POST", "/sessions/two/park", {})
    assert await here.call("POST", "/drain", {"graceSeconds": 60}) == (
        200,
        {"draining": True, "sessions": 1},
    )
    await note("draining", await here.put("three", terms))
    assert refused == {
        "smaller fence": (409, "stale_fence"),
        "other manifest": (409, "manifest_conflict"),
        "other token": (403, "unauthorized"),
        "unknown": (404, "session_not_found"),
        "no slot": (429, "no_slot"),
        "not ready": (503, "not_ready"),
        "draining": (503, "draining"),
    }


async def test_what_has_a_history_is_never_begun_without_it(here: Pod) -> None:
    terms = Terms("context")
    status, error = await here.put("resumed", terms, fence=2, resume=True)
    assert (status, error["code"]) == (410, "ledger_lost")
    assert not await here.replica.ledger.exists("resumed")
    await here.put("resumed", terms, fence=3)
    caller = Caller("resumed")
    await caller.dial(here.replica)
    await caller.talk(3)
    for fence in (3, 4):
        status, view = await here.put("resumed", terms, fence=fence, resume=True)
        assert (status, view["fence"], view["units"]) == (200, fence, 3)
    await here.call("POST", "/sessions/resumed/park", {})
    # Its retention passes while nobody runs it.
    keys = session_keys("resumed").all()
    await here.replica.ledger.reader._connection.read("resumed", ("DEL", *keys))
    for _ in range(2):
        status, error = await here.put("resumed", terms, fence=5, resume=True)
        assert (status, error["code"]) == (410, "ledger_lost")
    assert here.replica.registry.free_slots == 2
    status, view = await here.put("resumed", terms, fence=5)
    assert (status, view["units"]) == (200, 0)


async def test_an_operator_of_the_first_release_has_its_way(here: Pod) -> None:
    """Its requests, word for word, and what it looks at of the answers. It hands nothing over."""
    manifest = (
        '{"apiVersion":"duplex.dev/v1alpha1","kind":"DuplexSession","metadata":{"name":"talk",'
        '"namespace":"default"},"spec":{"output":{"audioFormat":"pcm"},"poolRef":{"name":"demo"},'
        '"prompt":"Be brief.","window":{"basicWindowHighTokens":8000,"basicWindowLowTokens":6000,'
        '"boundary":"unit","contextMaxUnits":24,"contextPreviousMaxTokens":500,"hysteresisUnits":1,'
        '"mode":"context","strategy":"reprefill"}}}'
    )
    client, uid = here.client, "0f0e5d6c-5f3b-4f44-9a55-0d7c6a3b2a10"
    client.headers.update({"Duplex-Admin-Version": "1", "Content-Type": "application/json"})

    async def ask(method: str, path: str, body: str) -> int:
        answer = await client.request(method, f"/admin/v1{path}", content=body.encode())
        assert answer.status_code < 300 or answer.json()["error"]["code"]
        return answer.status_code

    def order(fence: int) -> str:
        head = f'{{"manifest":{json.dumps(manifest)},"tokenHash":"{token_sha256(TOKEN)}",'
        return f'{head}"fence":{fence}}}'

    path = f"/sessions/{uid}"
    assert await ask("PUT", path, order(1)) == 200
    assert await ask("PUT", path, order(1)) == 200
    caller = Caller(uid)
    await caller.dial(here.replica)
    await caller.talk(2)
    assert await ask("POST", f"{path}/park", "{}") == 200
    assert await ask("POST", "/dead-replicas", f'{{"podUID":"{uid}"}}') == 200
    assert await ask("PUT", path, order(1)) == 409
    assert await ask("PUT", path, order(2)) == 200
    async with listening(here) as feed:
        hello = await feed.until(kind="hello")
        for name, kind in (("replica", str), ("freeSlots", int), ("ready", bool)):
            assert isinstance(hello[name], kind)
        told = await feed.until(session=uid)
        assert (told["phase"], told["fence"], told["units"]) == ("active", 2, 2)
        assert isinstance(told["changed_ms"], int)
        assert set(told["audio"]) == {"underruns", "longestGapMs"}
    assert await ask("DELETE", path, '{"reason":"Deleted"}') == 200
    assert await ask("PUT", path, order(3)) == 410
    assert await ask("POST", f"/erase/{uid}", "{}") == 200
    assert await ask("POST", "/drain", '{"graceSeconds":30}') == 200


async def test_one_modality_alone_is_refused_where_a_session_begins(here: Pod) -> None:
    text = Terms("context").manifest()
    for one in Modality:
        output = Output(modalities=(one,))
        spec = text.spec.model_copy(update={"output": output})
        manifest = text.model_copy(update={"spec": spec})
        body = {"manifest": manifest.model_dump_json(exclude_none=True), "token": TOKEN}
        status, error = await here.call("PUT", "/sessions/half", body)
        assert (status, error["code"]) == (422, "unserved_manifest")
        (problem,) = error["problems"]
        assert problem["path"] == "spec.output.modalities"
        assert "audio and text" in problem["message"]
        # One that another release has begun goes on.
        name = f"half-{one}"
        await here.put(name, Terms("context"), fence=1)
        await here.call("POST", f"/sessions/{name}/park", {})
        status, _ = await here.call("PUT", f"/sessions/{name}", body | {"fence": 2})
        assert status == 200
        await here.call("DELETE", f"/sessions/{name}")


async def test_what_a_newer_operator_says_besides_is_ignored(
    here: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "duplex_sidecar.admin.api")
    more = {"fieldOfTheNextRelease": "a secret of some kind", "another one": 1}
    terms = Terms("context")
    status, view = await here.put("newer", terms, fence=3, **more)
    assert (status, view["fence"]) == (200, 3)
    assert (await here.put("newer", terms, fence=3)) == (200, view)
    assert await here.call("POST", "/sessions/newer/park", more) == (200, {"parked": True})
    dead = {"podUID": "nobody"}
    assert await here.call("POST", "/dead-replicas", dead | more) == (200, dead)
    await here.put("newer", terms, fence=4, **more)
    end = {"reason": "Deleted"} | more
    assert await here.call("DELETE", "/sessions/newer", end) == (200, {"ended": True})
    assert await here.call("POST", "/erase/newer", more) == (200, {"erased": True})
    drained = {"draining": True, "sessions": 0}
    assert await here.call("POST", "/drain", {"graceSeconds": 5} | more) == (200, drained)
    told = [vars(record)["fields"] for record in caplog.records if "unknown" in record.message]
    assert told == [{"unknown": 2, "names": "fieldOfTheNextRelease"}] * 6
    assert "a secret" not in caplog.text


async def test_a_session_that_is_handed_over(
    here: Pod, valkey: EmbeddedValkey, certificate: tuple[Path, Path]
) -> None:
    terms = Terms("context")
    manifest = terms.manifest().model_dump_json(by_alias=True, exclude_none=True)
    ready = {"manifest": manifest, "tokenHash": token_sha256(TOKEN), "fence": 4}
    async with pod(valkey.url, "target-of-hand-over", certificate, slots=2) as there:
        order = {"target": there.name, "fence": 4}
        for path, body in (("prepare", ready), ("hand-over", order)):
            status, error = await there.call("POST", f"/sessions/handed/{path}", body)
            assert (status, error["code"]) == (404, "session_not_found")
        await here.put("handed", terms, fence=3)
        caller = Caller("handed")
        await caller.dial(here.replica)
        await caller.talk(3)
        status, error = await here.call("POST", "/sessions/handed/hand-over", order)
        assert (status, error["code"]) == (409, "not_prepared")
        for fence in (2, 3):
            stale = ready | {"fence": fence}
            status, error = await there.call("POST", "/sessions/handed/prepare", stale)
            assert (status, error["code"]) == (409, "stale_fence")
        for _ in range(2):
            answer = await there.call("POST", "/sessions/handed/prepare", ready)
            assert answer == (200, {"prepared": True, "fence": 4, "units": 3})
        for _ in range(2):
            answer = await here.call("POST", "/sessions/handed/hand-over", order)
            assert answer == (200, {"handedOver": True, "fence": 4})
        status, view = await there.put("handed", terms, fence=4)
        assert (status, view["fence"], view["units"]) == (200, 4, 3)
        await caller.dial(there.replica)
        await caller.talk(5)
        view = (await there.call("GET", "/sessions/handed"))[1]
        assert view["lastRebuild"]["cause"] == "move"
        async with listening(here) as feed:
            left = await feed.until(session="handed")
            assert (left["phase"], left["reason"]) == ("gone", "handed_over")


async def test_a_voice_that_comes_with_its_session(here: Pod, tmp_path: Path) -> None:
    config = MODEL.config.token2wav
    # Without a clip: the fake encoder has one length for all.
    silent = replace(seeded_voice("x", 20, 0, config), reference_16khz=np.zeros(0, np.float32))
    content = save_voice(tmp_path, silent).read_bytes()
    terms = Terms("context", voice=given_voice_name(content))
    file = base64.b64encode(content).decode()
    assert (await here.put("spoken", terms, voiceFile=file))[0] == 200
    assert (await here.put("spoken", terms, voiceFile=file))[0] == 200
    caller = Caller("spoken")
    await caller.dial(here.replica)
    await caller.talk(2)

    other = save_voice(tmp_path, replace(silent, speaker=-silent.speaker)).read_bytes()
    renamed = replace(terms, voice=given_voice_name(other))
    noise = base64.b64encode(b"no voice").decode()
    noisy = replace(terms, voice=given_voice_name(b"no voice"))
    large = base64.b64encode(b"\0" * (MAX_GIVEN_VOICE_BYTES + 1)).decode()
    answers = {
        "another": await here.put("spoken", renamed, voiceFile=base64.b64encode(other).decode()),
        "no file": await here.put("s", terms),
        "another's file": await here.put("s", renamed, voiceFile=file),
        "a plain name's": await here.put("s", Terms("context"), voiceFile=file),
        "no voice": await here.put("s", noisy, voiceFile=noise),
        "too large": await here.put("s", noisy, voiceFile=large),
        "no base64": await here.put("s", noisy, voiceFile="*"),
    }
    assert {what: (status, error["code"]) for what, (status, error) in answers.items()} == {
        "another": (409, "manifest_conflict"),
        "no file": (422, "unserved_manifest"),
        "another's file": (422, "unserved_manifest"),
        "a plain name's": (422, "unserved_manifest"),
        "no voice": (422, "unserved_manifest"),
        "too large": (422, "invalid_request"),
        "no base64": (422, "unserved_manifest"),
    }


async def test_a_token_by_its_hash_alone(here: Pod) -> None:
    status, _ = await here.put("hashed", Terms("context"), tokenHash=token_sha256(TOKEN))
    assert status == 200
    await Caller("hashed").dial(here.replica)


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("PUT", "/sessions/x", {"manifest": "m"}),
        ("PUT", "/sessions/x", {"manifest": "m", "token": "t", "tokenHash": "0" * 64}),
        ("PUT", "/sessions/x", {"manifest": "m", "tokenHash": "0" * 63}),
        ("PUT", "/sessions/x", {"manifest": "m", "tokenHash": "G" * 64}),
        ("PUT", "/sessions/x", {"manifest": "m", "token": "t", "fence": 0}),
        ("PUT", "/sessions/x", {"manifest": "m", "token": "t", "fence": 2**60}),
        ("POST", "/drain", {}),
        ("POST", "/drain", {"graceSeconds": -1}),
        ("POST", "/drain", {"graceSeconds": 10**9}),
        ("POST", "/dead-replicas", {}),
        ("POST", "/dead-replicas", {"replica": "a", "podUID": "b"}),
        ("POST", "/sessions/x/prepare", {"manifest": "m", "token": "t"}),
        ("POST", "/sessions/x/hand-over", {"target": "r"}),
        ("POST", "/sessions/x/hand-over", {"fence": 2}),
        ("POST", "/sessions/x/hand-over", {"target": "r", "fence": 2, "graceSeconds": 21}),
        ("DELETE", "/sessions/x", {"reason": "two words"}),
    ],
)
async def test_what_is_malformed(here: Pod, method: str, path: str, body: Any) -> None:
    status, error = await here.call(method, path, body)
    assert (status, error["code"]) == (422, "invalid_request")
    (problem,) = error["problems"]
    assert problem["path"] in error["message"]
    assert problem["message"] in error["message"]


@pytest.mark.parametrize("name", ["%00", "a" * 65, "a{b}", "%F0%9F%98%80", "a%20b"])
async def test_a_name_that_the_ledger_does_not_take(here: Pod, name: str) -> None:
    assert (await here.put(name, Terms("context")))[0] == 400
    for method, path, body in (
        ("GET", f"/sessions/{name}", None),
        ("POST", f"/sessions/{name}/park", {}),
        ("DELETE", f"/sessions/{name}", None),
        ("POST", f"/erase/{name}", None),
    ):
        status, error = await here.call(method, path, body)
        assert (status, error["code"], error["param"]) == (400, "invalid_event", "session"), path


@pytest.mark.parametrize(
    "content",
    [
        b"{",
        b'{"manifest": "\xff"}',
        b'{"manifest":' + b"[" * 200_000 + b"]" * 200_000 + b"}",
        b'{"fence":' + b"9" * 5_000 + b"}",
    ],
    ids=["cut off", "not UTF-8", "nested without end", "an absurd number"],
)
async def test_a_body_that_is_no_json(here: Pod, content: bytes) -> None:
    headers = {"content-type": "application/json"}
    answer = await here.client.put("/admin/v1/sessions/x", content=content, headers=headers)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (422, "invalid_request")
    assert [problem["path"] for problem in error["problems"]] == [""]
    assert error["message"] == error["problems"][0]["message"] != ""


async def test_what_is_not_there_is_refused_by_type(here: Pod) -> None:
    status, error = await here.call("GET", "/nowhere")
    assert (status, error["code"]) == (404, "not_served")
    status, error = await here.call("PUT", "/drain", {})
    assert (status, error["code"]) == (405, "not_served")


@pytest.fixture
def no_old_garbage() -> Iterator[None]:
    """As `duplex serve` does: a full collection does not look through all that is imported."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("no_old_garbage")
async def test_sessions_go_on_while_a_manifest_is_read(
    here: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted in turns of the loop that the sessions share: how long they take is the machine's."""
    turns = 0
    at: list[int] = []
    read = admin_api.load_manifests

    def counted(text: str) -> Any:
        at.append(turns)
        try:
            return read(text)
        finally:
            at.append(turns)

    monkeypatch.setattr(admin_api, "load_manifests", counted)
    text = f"x: [{'1,' * 40_000}1]\n"
    call = asyncio.create_task(here.call("PUT", "/sessions/x", {"manifest": text, "token": "t"}))
    while not call.done():
        turns += 1
        await asyncio.sleep(0)
    status, error = await call
    assert (status, error["code"]) == (422, "invalid_manifest")
    begun, ended = at
    assert ended - begun > 30


async def test_a_pods_death_frees_its_sessions(here: Pod, valkey: EmbeddedValkey) -> None:
    async with replica(valkey.url, "uid-9-b007") as dead:
        await dead.open("orphan", Terms("context"))
        await dead.registry.live["orphan"]._keeper.stop()
        told = {"podUID": "uid-9"}
        assert await here.call("POST", "/dead-replicas", told) == (200, told)
        async with asyncio.timeout(PATIENCE_S):
            status, view = await here.put("orphan", Terms("context"), fence=9)
        assert (status, view["fence"]) == (200, 9)


# --- who gets in ----------------------------------------------------------------------------------

EVERYTHING = (
    ("PUT", "/admin/v1/sessions/x"),
    ("GET", "/admin/v1/sessions"),
    ("GET", "/admin/v1/sessions/x"),
    ("POST", "/admin/v1/sessions/x/park"),
    ("POST", "/admin/v1/sessions/x/prepare"),
    ("POST", "/admin/v1/sessions/x/hand-over"),
    ("DELETE", "/admin/v1/sessions/x"),
    ("POST", "/admin/v1/erase/x"),
    ("POST", "/admin/v1/drain"),
    ("POST", "/admin/v1/dead-replicas"),
    ("GET", "/admin/v1/feed"),
    ("GET", "/"),
    ("GET", "/metrics"),
    ("GET", "/openapi.json"),
    ("GET", "/nowhere"),
)


@pytest.mark.parametrize("token", ["", "Bearer", "Bearer wrong", f"Basic {ADMIN}", ADMIN])
async def test_nobody_gets_in_without_the_token(here: Pod, token: str) -> None:
    headers = {"authorization": token}
    for method, path in EVERYTHING:
        answer = await here.client.request(method, path, headers=headers, content=b"{}")
        assert answer.status_code == 401, (method, path)
        assert answer.json()["error"]["code"] == "unauthorized"
    assert here.replica.registry.departures.draining is False


async def test_numbers_are_not_for_strangers() -> None:
    app = FastAPI()

    @app.get("/metrics")
    @app.get("/statusz")
    @app.get("/readyz")
    async def page() -> str:
        return "numbers"

    app.add_middleware(AdminGuard, token=FixedToken(ADMIN), guarded=guards_status)
    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://pod") as client:
        for path, status in (("/metrics", 401), ("/statusz", 401), ("/readyz", 200)):
            assert (await client.get(path)).status_code == status
            right = await client.get(path, headers={"authorization": f"Bearer {ADMIN}"})
            assert right.status_code == 200


async def test_another_version_is_refused_by_name(here: Pod) -> None:
    answer = await here.client.get("/admin/v1/sessions", headers={"duplex-admin-version": "2"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_version")
    assert answer.headers["duplex-admin-version"] == "1"
    answer = await here.client.get("/admin/v1/sessions", headers={"duplex-admin-version": "1"})
    assert answer.status_code == 200


# --- the feed -------------------------------------------------------------------------------------


class Listener:
    def __init__(self, lines: AsyncIterator[str]) -> None:
        self._lines = lines
        self.heard: list[dict[str, Any]] = []

    async def until(self, **wanted: Any) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            async for text in self._lines:
                line = json.loads(text)
                self.heard.append(line)
                if wanted.items() <= line.items():
                    return line
        raise AssertionError(f"the feed ended before {wanted}")


@asynccontextmanager
async def listening(here: Pod) -> AsyncIterator[Listener]:
    async with here.client.stream("GET", "/admin/v1/feed") as answer:
        assert answer.status_code == 200
        assert answer.headers["content-type"] == "application/x-ndjson"
        yield Listener(answer.aiter_lines())


async def test_the_feed_tells_what_happens(here: Pod) -> None:
    await here.put("early", Terms("context"), fence=2)
    async with listening(here) as one, listening(here) as two:
        for listener in (one, two):
            assert (await listener.until(kind="hello"))["replica"] == here.name
            line = await listener.until(kind="session", session="early")
            assert (line["phase"], line["fence"], line["units"]) == ("ready", 2, 0)
            assert line["changed_ms"] > 1_700_000_000_000
        caller = Caller("early")
        await caller.dial(here.replica)
        await caller.talk(2)
        line = await one.until(session="early", phase="active", units=2)
        in_time = caller.units[-1].wall_ms <= UNIT_MS  # as a rule, but this machine may stand still
        told = (line["attached"], line["ledgerDurable"], line["keepingPace"])
        assert told == (True, True, in_time)
        await here.call("POST", "/sessions/early/park", {})
        line = await two.until(session="early", phase="parked")
        assert (line["reason"], line["fence"], line["units"]) == ("requested", 2, 2)
        await here.put("early", Terms("context"), fence=3)
        await two.until(session="early", phase="active", fence=3)
        await here.call("DELETE", "/sessions/early", {"reason": "deleted"})
        await one.until(session="early", phase="ended", reason="deleted")
        await here.call("POST", "/drain", {"graceSeconds": 0})
        assert await one.until(kind="pod", draining=True)
        await one.until(kind="beat")
        here.feed.close()
        with pytest.raises(AssertionError, match="the feed ended"):
            await one.until(kind="never")
    said = json.dumps(one.heard + two.heard)
    assert TOKEN not in said
    assert "transcript" not in said


async def test_a_unit_that_hangs_is_told_of_while_it_hangs(
    here: Pod, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "duplex_sidecar.session.lateness")
    await here.put("slow", Terms("context"))
    caller = Caller("slow")
    await caller.dial(here.replica)
    await caller.talk(1)
    hang = here.replica.stages.thinker.pause(2)
    async with listening(here) as listener:
        await caller.say(2)
        await hang.reached.wait()
        await listener.until(session="slow", units=1, keepingPace=False)
        _, view = await here.call("GET", "/sessions/slow")
        assert (view["units"], view["keepingPace"]) == (1, False)
        assert view["unitUnderWayMs"] > UNIT_MS
        assert any(each.levelno == logging.WARNING for each in caplog.records)
        hang.go.set()
        await caller.until_unit(2)
        await caller.talk(3)
        await listener.until(session="slow", units=3)
    _, view = await here.call("GET", "/sessions/slow")
    assert view["unitUnderWayMs"] is None


async def test_a_listener_that_comes_later_learns_who_left(here: Pod) -> None:
    await here.put("left", Terms("context"), fence=8)
    await here.call("POST", "/sessions/left/park", {})
    async with listening(here) as late:
        line = await late.until(kind="session", session="left")
        assert (line["phase"], line["fence"]) == ("parked", 8)


async def test_a_listener_that_leaves_makes_room(
    here: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("duplex_sidecar.admin.feed.MAX_LISTENERS", 1)
    async with listening(here) as one:
        await one.until(kind="beat")
        status, error = await here.call("GET", "/feed")
        assert (status, error["code"]) == (429, "no_slot")
    async with asyncio.timeout(PATIENCE_S):
        while here.feed.full:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    async with listening(here) as two:
        await two.until(kind="beat")


async def test_a_listener_that_takes_nothing_is_dropped(
    here: Pod, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def stuck(_: bytes) -> None:
        await asyncio.Event().wait()

    with monkeypatch.context() as patch:
        patch.setattr("duplex_sidecar.admin.feed.SEND_TIMEOUT_S", 0.2)
        with pytest.raises(TimeoutError):
            await here.feed.pour(stuck)
    async with listening(here) as other:
        await other.until(kind="beat")
