"""The small pure parts: acceptance, route records, tokens, manifests, settings, numbers."""

import base64
import json
import traceback
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_api.ledger_address import SentinelAddress
from duplex_api.manifest import load_manifest
from duplex_api.routes import RouteRecord, call_key, route_key, route_uid
from duplex_api.session import SessionPhase
from duplex_api.window import DEFAULT_WINDOW
from duplex_operator.decide.acceptance import Accepted, RefusalReason, Refused, judge
from duplex_operator.decide.status import camel_reason, status_patch
from duplex_operator.health import metric_lines
from duplex_operator.kube.connection import Throttle
from duplex_operator.ledger_server import read_address
from duplex_operator.main import end_all_timeout_s
from duplex_operator.manifests import manifest_text
from duplex_operator.objects import PoolObject, SessionObject, read_pool, read_session
from duplex_operator.settings import OperatorSettings
from duplex_operator.texts import cut_bytes
from duplex_operator.tokens import TokenUnusableError, token_hash

pytestmark = pytest.mark.unit


def pool(**spec: Any) -> PoolObject:
    found = read_pool(
        {
            "metadata": {"name": "x", "namespace": "models"},
            "spec": {"checkpoint": {"path": "/model"}, "slots": 2, **spec},
        }
    )
    assert found is not None
    return found


def session(namespace: str = "models", **spec: Any) -> SessionObject:
    reference = {"name": "x", "namespace": "models"}
    found = read_session(
        {
            "metadata": {"name": "talk", "namespace": namespace, "uid": "u"},
            "spec": {"poolRef": reference, **spec},
        }
    )
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("allowed", "namespace", "accepted"),
    [
        (None, "models", True),
        (None, "others", False),
        ({"from": "All"}, "others", True),
        ({"from": "Same"}, "others", False),
        ({"from": "Listed", "names": ["others"]}, "others", True),
        ({"from": "Listed", "names": ["others"]}, "third", False),
        ({"from": "Listed", "names": ["others"]}, "models", True),
    ],
)
def test_whose_sessions_a_pool_takes(
    allowed: dict[str, Any] | None, namespace: str, accepted: bool
) -> None:
    spec = {} if allowed is None else {"allowedNamespaces": allowed}
    verdict = judge(session(namespace), pool(**spec))
    if accepted:
        assert isinstance(verdict, Accepted)
    else:
        assert isinstance(verdict, Refused)
        assert verdict.reason is RefusalReason.NAMESPACE_NOT_ALLOWED


def test_the_window_is_resolved_by_the_pool_and_then_pinned() -> None:
    presets = {"long": {"mode": "context", "contextMaxUnits": 60}}
    with_preset = pool(windowPresets=presets, defaultWindowPreset="long")
    verdict = judge(session(), with_preset)
    assert isinstance(verdict, Accepted)
    assert verdict.window.context_max_units == 60
    assert isinstance(judge(session(windowPreset="none"), with_preset), Refused)
    pinned = session()
    status = pinned.status.model_copy(update={"window": DEFAULT_WINDOW.as_policy()})
    verdict = judge(SessionObject(pinned.meta, pinned.spec, status), with_preset)
    assert verdict == Accepted(DEFAULT_WINDOW.as_policy())


def test_an_impossible_window_is_refused_with_its_field() -> None:
    window = {"basicWindowHighTokens": 100, "mode": "basic"}
    verdict = judge(session(window=window), pool())
    assert isinstance(verdict, Refused)
    assert verdict.reason is RefusalReason.INVALID_WINDOW
    assert "basicWindowHighTokens" in verdict.sentence


@pytest.mark.parametrize("source", ["secretRef", "configMapRef"])
def test_a_sidecar_gets_the_name_of_a_given_voice_and_not_where_it_came_from(source: str) -> None:
    found = session(voice={source: {"name": "mine"}})
    assert isinstance(judge(found, pool()), Accepted)
    text = manifest_text(found, DEFAULT_WINDOW.as_policy(), "given-0123")
    assert json.loads(text)["spec"]["voice"] == {"name": "given-0123"}


def test_what_a_sidecar_gets_is_a_manifest_without_what_is_not_its_business() -> None:
    found = session(
        priority=7,
        desiredState="Running",
        windowPreset="long",
        tokenSecretRef={"name": "mine"},
        prompt='Say "ja":\n{{ .Values }} \u2028 $(rm)',
    )
    text = manifest_text(found, DEFAULT_WINDOW.as_policy())
    assert text == manifest_text(found, DEFAULT_WINDOW.as_policy())
    loaded = load_manifest(text)
    assert loaded.spec.prompt == found.spec.prompt
    assert loaded.spec.window == DEFAULT_WINDOW.as_policy()
    assert set(json.loads(text)["spec"]) == {"poolRef", "prompt", "window"}


@given(st.text(max_size=200))
def test_any_prompt_reaches_the_sidecar_as_it_is(prompt: str) -> None:
    found = session()
    spec = found.spec.model_copy(update={"prompt": prompt})
    text = manifest_text(SessionObject(found.meta, spec, found.status), DEFAULT_WINDOW.as_policy())
    assert load_manifest(text).spec.prompt == prompt


def test_route_records_come_back_and_keys_are_ours_alone() -> None:
    record = RouteRecord(token_sha256="0" * 64, phase=SessionPhase.READY, pool="a/b", session="c/d")
    assert RouteRecord.from_hash(record.to_hash()) == record
    assert RouteRecord.from_hash({}) is None
    assert route_uid(route_key("u-1")) == "u-1"
    assert call_key("u-1") == "duplex:{u-1}:call"
    assert route_uid("duplex:{u-1}:meta") is None
    with pytest.raises(ValueError, match="session id"):
        route_key("a}b")


@pytest.mark.parametrize(
    ("value", "sentence"),
    [(None, "has no key"), (b"short", "16 to 512 bytes"), (b"x" * 600, "16 to 512 bytes")],
)
def test_a_token_that_will_not_do(value: bytes | None, sentence: str) -> None:
    data = {} if value is None else {"token": base64.b64encode(value).decode()}
    with pytest.raises(TokenUnusableError, match=sentence) as caught:
        token_hash({"data": data}, "token")
    assert "short" not in str(caught.value)


def test_a_token_is_taken_without_the_newline_of_a_file() -> None:
    one, other = (
        {"data": {"token": base64.b64encode(text).decode()}}
        for text in (b"a-token-long-enough", b"a-token-long-enough\n")
    )
    assert token_hash(one, "token") == token_hash(other, "token")


def test_a_status_patch_removes_what_is_gone() -> None:
    found = session().status
    before = found.model_copy(update={"queue_position": 3, "units": 1})
    after = found.model_copy(update={"queue_position": None, "units": 2})
    assert status_patch(before, after) == {"queuePosition": None, "units": 2}
    assert status_patch(after, after) == {}


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("client_away", "ClientAway"),
        ("", "Parked"),
        ("maxDuration", "MaxDuration"),
        ("!", "Parked"),
    ],
)
def test_words_of_a_sidecar_become_reasons(word: str, reason: str) -> None:
    assert camel_reason(word, "Parked") == reason


def test_settings_name_what_is_missing() -> None:
    with pytest.raises(ValueError, match="DUPLEX_REDIS_URL"):
        OperatorSettings.from_environment({"DUPLEX_NAMESPACE": "duplex"})
    settings = OperatorSettings.from_environment(
        {
            "DUPLEX_NAMESPACE": "duplex",
            "DUPLEX_REDIS_URL": "redis://ledger",
            "DUPLEX_WATCH_NAMESPACES": "b, a,,",
        }
    )
    assert settings.watch_namespaces == ("a", "b")
    assert settings.watches("a")
    assert not settings.watches("c")


REDIS = {"DUPLEX_NAMESPACE": "duplex", "DUPLEX_REDIS_URL": "redis://ledger"}


@pytest.mark.parametrize(
    "url",
    [
        "redis://:sec#ret@ledger:6379",
        "redis://:sec/ret@ledger:6379",
        "redis://user:12/ret@ledger:6379",
        "redis://user:sec?ret@ledger:6379",
        "redis://ledger:sec-ret",
        "redis+sentinel://:sec#ret@a:26379/main",
        "redis+sentinel://a:sec-ret/main",
        "redis+sentinel://a/main?sec=ret",
        "rediss+sentinel://a",
        "http://sec:ret@ledger",
        "redis://[sec",
    ],
)
def test_a_ledger_address_is_refused_without_a_word_of_it(url: str) -> None:
    with pytest.raises(ValueError, match="DUPLEX_REDIS_URL") as caught:
        OperatorSettings.from_environment(REDIS | {"DUPLEX_REDIS_URL": url})
    text = "".join(traceback.format_exception(caught.value))
    assert "sec" not in text.replace("second", "")
    assert "ret@" not in text


def test_addresses_of_a_ledger() -> None:
    for url in ("redis://u:p%23@h:6379/0", "rediss://h", "unix:///run/valkey.sock?db=1"):
        assert read_address(url) == url
    assert read_address("rediss+sentinel://u:p%23w@a:1,[::1],b/main/3?sentinel_password=s") == (
        SentinelAddress(
            sentinels=(("a", 1), ("::1", 26379), ("b", 26379)),
            service="main",
            database=3,
            username="u",
            password="p#w",
            sentinel_username="",
            sentinel_password="s",
            tls=True,
        )
    )
    with pytest.raises(ValueError, match="Cluster") as caught:
        read_address("redis+cluster://u:hidden@a:1,b:2")
    assert "hidden" not in str(caught.value)
    settings = OperatorSettings.from_environment(REDIS | {"DUPLEX_REDIS_URL": "redis://:hidden@h"})
    assert "hidden" not in repr(settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("DUPLEX_LOG_LEVEL", "loud"),
        ("DUPLEX_HEALTH_PORT", "http"),
        ("DUPLEX_LEDGER_DURABILITY", "everysec"),
    ],
)
def test_a_wrong_setting_is_named(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=name):
        OperatorSettings.from_environment(REDIS | {name: value})


def test_unknown_arguments_are_refused() -> None:
    assert end_all_timeout_s([]) is None
    assert end_all_timeout_s(["end-all", "--timeout", "3"]) == 3.0
    for arguments in (["endall"], ["--timeout", "3"], ["end-all", "now"]):
        with pytest.raises(SystemExit) as caught:
            end_all_timeout_s(arguments)
        assert caught.value.code == 2


def test_a_throttle_lets_a_burst_through_and_then_paces() -> None:
    now_s = 10.0
    throttle = Throttle(10.0, 3, lambda: now_s)
    assert [round(throttle.delay_s(), 3) for _ in range(5)] == [0.0, 0.0, 0.0, 0.1, 0.2]
    now_s = 11.0
    assert throttle.delay_s() == 0.0


def test_numbers_are_told_as_prometheus_reads_them() -> None:
    text = "".join(metric_lines({'a_total{x="1"}': 3, 'a_total{x="2"}': 4, "b": 0.5}))
    assert text == (
        '# TYPE a_total counter\na_total{x="1"} 3\na_total{x="2"} 4\n# TYPE b gauge\nb 0.5\n'
    )


@given(st.text(max_size=40), st.integers(0, 60))
def test_a_text_is_cut_to_bytes_and_between_characters(text: str, most_bytes: int) -> None:
    cut = cut_bytes(text, most_bytes)
    assert text.startswith(cut)
    assert len(cut.encode()) <= most_bytes
    rest = text[len(cut) :]
    assert not rest or len((cut + rest[0]).encode()) > most_bytes


def test_half_a_surrogate_pair_can_be_sent_too() -> None:
    """JSON can say it, UTF-8 cannot."""
    assert cut_bytes("so \ud83d", 1024) == "so ?"
