"""The admin API, as an operator or `duplex run` uses it: what it refuses, and how it says so."""

import asyncio
import http.client
import json
import secrets
from typing import Any

import pytest
from support.material import manifest
from support.realtime import dialled, joined, new_session

from duplex_sidecar.admin.guard import MAX_BODY_BYTES
from duplex_sidecar.client.local_sidecar import ApiError, LocalSidecar

pytestmark = pytest.mark.client


def request(
    sidecar: LocalSidecar,
    method: str,
    path: str,
    body: bytes | None = None,
    token: str | None = None,
) -> tuple[int, dict[str, Any]]:
    """(status, typed body). token None: the right one."""
    connection = http.client.HTTPConnection("127.0.0.1", sidecar.settings.port, timeout=60)
    token = sidecar.settings.admin_token if token is None else token
    headers = {"content-type": "application/json"}
    if token:
        headers["authorization"] = f"Bearer {token}"
    try:
        connection.request(method, f"/admin/v1{path}", body, headers)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())
    finally:
        connection.close()


def refused_manifest(sidecar: LocalSidecar, text: str) -> dict[str, Any]:
    with pytest.raises(ApiError) as refusal:
        sidecar.open_session("never", text, "token")
    assert refusal.value.status == 422
    return refusal.value.body["error"]


WINDOWS: list[tuple[str, dict[str, Any], str, str, str]] = [
    (
        "inverted",
        {"mode": "basic", "basicWindowHighTokens": 100, "basicWindowLowTokens": 200},
        "spec.window.basicWindowLowTokens",
        "less than 100",
        "invalid_manifest",
    ),
    (
        "equal",
        {"mode": "basic", "basicWindowHighTokens": 100, "basicWindowLowTokens": 100},
        "spec.window.basicWindowLowTokens",
        "less than 100",
        "invalid_manifest",
    ),
    (
        "below the default low mark",
        {"mode": "basic", "basicWindowHighTokens": 100},
        "spec.window.basicWindowHighTokens",
        "6001 or more",
        "invalid_sliding_window_config",
    ),
    (
        "zero",
        {"mode": "basic", "basicWindowHighTokens": 0},
        "spec.window.basicWindowHighTokens",
        "greater than or equal to 1",
        "invalid_manifest",
    ),
    (
        "negative",
        {"mode": "context", "contextMaxUnits": -4},
        "spec.window.contextMaxUnits",
        "greater than or equal to 1",
        "invalid_manifest",
    ),
    (
        "a boolean",
        {"mode": "context", "contextMaxUnits": True},
        "spec.window.contextMaxUnits",
        "a valid integer",
        "invalid_manifest",
    ),
    (
        "a text",
        {"mode": "context", "contextPreviousMaxTokens": "200"},
        "spec.window.contextPreviousMaxTokens",
        "a valid integer",
        "invalid_manifest",
    ),
    (
        "a fraction",
        {"mode": "basic", "basicWindowHighTokens": 1000.5, "basicWindowLowTokens": 10},
        "spec.window.basicWindowHighTokens",
        "a valid integer",
        "invalid_manifest",
    ),
    (
        "above the model's length",
        {"mode": "basic", "basicWindowHighTokens": 2048, "basicWindowLowTokens": 100},
        "spec.window.basicWindowHighTokens",
        "1 to 2047",
        "invalid_sliding_window_config",
    ),
    (
        "previous text above the model's length",
        {"mode": "context", "contextPreviousMaxTokens": 100_000},
        "spec.window.contextPreviousMaxTokens",
        "1 to 2047",
        "invalid_sliding_window_config",
    ),
    (
        "a mode that YAML reads as a boolean",
        {"mode": False},
        "spec.window.mode",
        "off",
        "invalid_manifest",
    ),
    (
        "an unknown mode",
        {"mode": "endless"},
        "spec.window.mode",
        "'off', 'basic' or 'context'",
        "invalid_manifest",
    ),
    (
        "an unknown field",
        {"mode": "basic", "basicWindowHighToken": 10},
        "spec.window.basicWindowHighToken",
        "basicWindowHighTokens",
        "invalid_manifest",
    ),
    (
        "a strategy that is not served",
        {"mode": "context", "strategy": "shift"},
        "spec.window.strategy",
        "reprefill",
        "unserved_manifest",
    ),
]


@pytest.mark.parametrize(
    ("window", "path", "allowed", "code"),
    [case[1:] for case in WINDOWS],
    ids=[case[0] for case in WINDOWS],
)
def test_windows_that_cannot_be_run(
    sidecar: LocalSidecar, window: dict[str, Any], path: str, allowed: str, code: str
) -> None:
    error = refused_manifest(sidecar, manifest(window=window))
    assert error["code"] == code
    found = {problem["path"]: problem["allowed"] for problem in error["problems"]}
    assert allowed in found[path]


@pytest.mark.parametrize(
    ("text", "path"),
    [
        (manifest(voice={"name": "nobody"}), "spec.voice.name"),
        (manifest(windowPreset="long-talk"), "spec.windowPreset"),
        (manifest(sampling={"greedy": True, "topK": 3}), "spec.sampling"),
        (manifest(camera={"framesPerUnit": 3}), "spec.camera.framesPerUnit"),
        (manifest(lifecycle={"idleTimeout": "soon"}), "spec.lifecycle.idleTimeout"),
        (manifest(prompt=None), "spec.prompt"),
        (manifest(nonsense=1), "spec.nonsense"),
        (manifest(prompt="x" * 40_000), "spec.prompt"),
        (manifest().replace("v1alpha1", "v7"), "apiVersion"),
        (manifest().replace("DuplexSession", "DuplexSofa"), "kind"),
        ("just text", ""),
        ("a: [", ""),
        (manifest() + "\n---\n" + manifest(), ""),
    ],
    ids=[
        "voice",
        "preset",
        "greedy-and-top-k",
        "three-frames",
        "duration",
        "null",
        "unknown",
        "long-prompt",
        "version",
        "kind",
        "text",
        "no-yaml",
        "two-sessions",
    ],
)
def test_manifests_that_cannot_be_opened(sidecar: LocalSidecar, text: str, path: str) -> None:
    error = refused_manifest(sidecar, text)
    (problem,) = error["problems"]
    assert problem["path"] == path
    assert problem["message"]
    assert "xxxxx" not in json.dumps(error), "a prompt is not sent back"


def test_an_unknown_voice_names_the_known_ones(sidecar: LocalSidecar) -> None:
    error = refused_manifest(sidecar, manifest(voice={"name": "nobody"}))
    assert "default" in error["problems"][0]["allowed"]


def test_several_problems_are_told_at_once(sidecar: LocalSidecar) -> None:
    text = manifest(voice={"name": "nobody"}, window={"strategy": "shift"})
    error = refused_manifest(sidecar, text)
    assert {problem["path"] for problem in error["problems"]} == {
        "spec.voice.name",
        "spec.window.strategy",
    }


@pytest.mark.parametrize("token", ["", "wrong", "wr\xf6ng"])
def test_nobody_gets_in_without_the_admin_token(sidecar: LocalSidecar, token: str) -> None:
    body = json.dumps({"manifest": manifest(), "token": "t"}).encode()
    for method, path, content in (
        ("PUT", "/sessions/x", body),
        ("PUT", "/sessions/x", b"no json"),
        ("GET", "/sessions", None),
        ("GET", "/sessions/x", None),
        ("DELETE", "/sessions/x", None),
        ("POST", "/dead-replicas", b"{}"),
        ("POST", "/drain", b'{"graceSeconds": 0}'),
        ("POST", "/erase/x", None),
        ("GET", "/feed", None),
        ("GET", "/nowhere", None),
    ):
        status, answer = request(sidecar, method, path, content, token)
        assert status == 401
        assert answer["error"]["code"] == "unauthorized"


@pytest.mark.parametrize(
    ("body", "path"),
    [
        (b"", ""),
        (b"no json", ""),
        (b"[]", ""),
        (b"{}", "manifest"),
        (json.dumps({"manifest": manifest()}).encode(), ""),
        (json.dumps({"manifest": 3, "token": "secret-token"}).encode(), "manifest"),
        (json.dumps({"manifest": manifest(), "token": "secret-token" * 99}).encode(), "token"),
        (json.dumps({"manifest": "x" * 300_000, "token": "secret-token"}).encode(), "manifest"),
    ],
    ids=["empty", "no-json", "list", "object", "no-token", "number", "long", "huge"],
)
def test_requests_that_are_malformed(sidecar: LocalSidecar, body: bytes, path: str) -> None:
    status, answer = request(sidecar, "PUT", "/sessions/x", body)
    assert status == 422
    assert answer["error"]["code"] == "invalid_request"
    assert answer["error"]["problems"][0]["path"].startswith(path)
    assert "secret-token" not in json.dumps(answer)


def test_a_body_without_end_is_not_read(sidecar: LocalSidecar) -> None:
    status, answer = request(sidecar, "PUT", "/sessions/x", bytes(MAX_BODY_BYTES + 1))
    assert status == 413
    assert answer["error"]["code"] == "event_too_large"


@pytest.mark.parametrize("name", ["a%7Bb%7D", "a%20b", "x" * 65, "%C3%B6"])
def test_a_name_that_the_ledger_cannot_hold(sidecar: LocalSidecar, name: str) -> None:
    body = json.dumps({"manifest": manifest(), "token": "t"}).encode()
    status, answer = request(sidecar, "PUT", f"/sessions/{name}", body)
    assert status == 400
    assert answer["error"]["param"] == "session"


def test_opening_is_idempotent_and_guarded_by_the_token(sidecar: LocalSidecar) -> None:
    session, token = new_session(sidecar, manifest())
    try:
        first = sidecar.admin("GET", f"/sessions/{session}")
        again = sidecar.open_session(session, manifest(), token)
        assert again == first
        assert first["phase"] == "ready"
        with pytest.raises(ApiError) as refusal:
            sidecar.open_session(session, manifest(), "another")
        assert refusal.value.status == 403
        with pytest.raises(ApiError) as refusal:
            sidecar.open_session(session, manifest(prompt="Another one."), token)
        assert refusal.value.status == 409
        assert refusal.value.body["error"]["code"] == "manifest_conflict"
        listed = sidecar.admin("GET", "/sessions")["sessions"]
        assert [view["session"] for view in listed].count(session) == 1
    finally:
        assert sidecar.admin("DELETE", f"/sessions/{session}") == {"ended": True}
    assert sidecar.admin("DELETE", f"/sessions/{session}") == {"ended": False}
    with pytest.raises(ApiError) as refusal:
        sidecar.admin("GET", f"/sessions/{session}")
    assert refusal.value.status == 404
    # What has ended stays ended.
    with pytest.raises(ApiError) as refusal:
        sidecar.open_session(session, manifest(), token)
    assert (refusal.value.status, refusal.value.body["error"]["code"]) == (410, "session_ended")


async def test_only_the_sessions_own_token_opens_its_door(sidecar: LocalSidecar) -> None:
    session, token = await asyncio.to_thread(new_session, sidecar, manifest())
    other, other_token = await asyncio.to_thread(new_session, sidecar, manifest())
    ended, ended_token = await asyncio.to_thread(new_session, sidecar, manifest())
    await asyncio.to_thread(sidecar.admin, "DELETE", f"/sessions/{ended}")
    answers: dict[str, tuple[str, int]] = {}
    for what, name, given in (
        ("no token", session, ""),
        ("wrong token", session, "wrong"),
        ("token of another session", session, other_token),
        ("admin token", session, sidecar.settings.admin_token),
        ("endless token", session, "x" * 5_000),
        ("unknown session", f"t-{secrets.token_hex(4)}", token),
        ("no session", "", token),
        ("no name at all", "%7B%7D%20", token),
        ("ended session, wrong token", ended, "wrong"),
        ("ended session", ended, ended_token),
    ):
        async with dialled(sidecar, name, given) as client:
            error = (await client.until("error"))["error"]
            code, _ = await client.until_closed()
            answers[what] = (error["code"], code)
    # Who has no right learns nothing: whether there is such a session, or what became of it.
    assert answers.pop("ended session") == ("session_ended", 1000)
    assert set(answers.values()) == {("session_not_found", 1008)}, answers
    for name, given in ((session, token), (other, other_token)):
        async with joined(sidecar, name, given) as client:
            await client.close_session()


def test_a_full_replica_refuses_by_name_and_has_room_again_after_an_end(
    sidecar: LocalSidecar,
) -> None:
    before = sidecar.admin("GET", "/sessions")
    opened = [new_session(sidecar, manifest()) for _ in range(before["freeSlots"])]
    try:
        with pytest.raises(ApiError) as refusal:
            new_session(sidecar, manifest())
        assert refusal.value.status == 429
        error = refusal.value.body["error"]
        assert (error["code"], error["retryable"]) == ("no_slot", True)
        sidecar.admin("DELETE", f"/sessions/{opened.pop()[0]}")
        opened.append(new_session(sidecar, manifest()))
    finally:
        for session, _ in opened:
            sidecar.admin("DELETE", f"/sessions/{session}")
    assert sidecar.admin("GET", "/sessions")["freeSlots"] == before["freeSlots"]
