"""Who is dialled, who waits, what a close means; tokens, patience, settings, certificates."""

import asyncio
import json
from typing import Any, cast

import msgspec
import pytest

from duplex_api.routes import RouteRecord
from duplex_api.session import SessionPhase
from duplex_gateway.credentials import FailedAttempts
from duplex_gateway.decide import (
    Dial,
    Finish,
    LeaseView,
    Over,
    Wait,
    WaitReason,
    after_close,
    decide,
)
from duplex_gateway.ending import Ended
from duplex_gateway.metrics import CallEnd
from duplex_gateway.resume import is_farewell
from duplex_gateway.routing import Directory, is_newer, token_matches
from duplex_gateway.settings import GatewaySettings, settings_from
from duplex_gateway.waiting import MOST_SHORT_CONNECTIONS, Patience
from duplex_gateway.watch import LeaseWatch, Watched
from duplex_gateway.wire import Kind, base64_bytes, read_client_message
from duplex_sidecar.doors.bearer import bearer_token
from duplex_sidecar.doors.openai_wire import MAX_CONTROL_BYTES, parse_message
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.token import token_sha256
from duplex_sidecar.protocol.errors import ERRORS, ClientError, ErrorCode

pytestmark = pytest.mark.unit


def route(phase: SessionPhase = SessionPhase.ACTIVE, **more: Any) -> RouteRecord:
    values = {"token_sha256": token_sha256("right"), "pool": "a/b", "session": "a/c"} | more
    return RouteRecord(phase=phase, **values)


def lease(left_ms: int = 2_000, address: str = "10.0.0.1:8765", **more: Any) -> LeaseView:
    values: dict[str, Any] = {"fence": 7, "phase": Phase.OPEN, "reason": ""} | more
    return LeaseView(remaining_ms=left_ms, address=address, **values)


@pytest.mark.parametrize("phase", list(SessionPhase))
def test_the_lease_is_the_truth(phase: SessionPhase) -> None:
    assert decide(route(phase), lease()) == Dial("10.0.0.1:8765", 7)
    assert decide(None, lease()) == Dial("10.0.0.1:8765", 7)


@pytest.mark.parametrize(
    ("record", "view", "wait"),
    [
        (route(SessionPhase.PENDING), None, Wait(WaitReason.STARTING, None, True)),
        (
            route(SessionPhase.QUEUED, queue_position=2),
            None,
            Wait(WaitReason.QUEUED, 2, True),
        ),
        (route(), lease(0), Wait(WaitReason.MOVING, None, True)),
        (route(), lease(-5_000), Wait(WaitReason.MOVING, None, True)),
        (route(), lease(0, phase=Phase.PARKED), Wait(WaitReason.PARKED, None, True)),
        (
            route(SessionPhase.QUEUED, queue_position=1),
            lease(0, phase=Phase.PARKED),
            Wait(WaitReason.QUEUED, 1, True),
        ),
        (route(SessionPhase.PARKED), lease(0), Wait(WaitReason.PARKED, None, True)),
        (
            route(SessionPhase.MOVING),
            lease(0, phase=Phase.PARKED),
            Wait(WaitReason.MOVING, None, True),
        ),
        (route(), lease(address=""), Wait(WaitReason.MOVING, None, False)),
        (None, lease(0), Wait(WaitReason.MOVING, None, False)),
    ],
)
def test_waiting(record: RouteRecord | None, view: LeaseView | None, wait: Wait) -> None:
    decision = decide(record, view)
    assert isinstance(decision, Wait)
    assert decision.fence in (0, 7)
    assert msgspec.structs.replace(decision, fence=0) == wait


def test_what_is_over() -> None:
    ended = lease(0, phase=Phase.ENDED, reason="session_expired")
    assert decide(route(), ended) == Over(ErrorCode.SESSION_EXPIRED, "the session has ended")
    for view in (lease(phase=Phase.ERASED), lease(0, phase=Phase.ENDED, reason="deleted")):
        decision = decide(route(), view)
        assert isinstance(decision, Over)
        assert decision.code is ErrorCode.SESSION_ENDED
    for phase in (SessionPhase.ENDING, SessionPhase.ENDED):
        assert isinstance(decide(route(phase), lease(0)), Over)
    assert isinstance(decide(None, None), Over)


@pytest.mark.parametrize(
    ("close_code", "error", "finish"),
    [
        (1000, "session_ended", Finish(1000, "session_ended")),
        (1008, "session_not_found", Finish(1008, "session_not_found")),
        (1008, "a code of a later release", Finish(1008, "a code of a later release")),
        (1008, "ledger_unavailable", None),
        (1009, "event_too_large", Finish(1009, "event_too_large")),
        (4001, "session_taken_over", Finish(4001, "session_taken_over")),
        (4002, "session_expired", Finish(4002, "session_expired")),
        (4010, "", Finish(4010, "")),
        (4011, "unit_failed", Finish(4011, "unit_failed")),
        (1001, "", None),
        (1006, "", None),
        (1011, "", None),
        (1012, "lease_lost", None),
        (1013, "resource_exhausted", None),
        (4003, "parked", None),
        (4008, "slow_consumer", None),
    ],
)
def test_after_a_close(close_code: int, error: str, finish: Finish | None) -> None:
    assert after_close(close_code, error) == finish


def test_every_error_that_ends_a_connection_but_no_session_is_a_farewell() -> None:
    farewells = {code for code in ErrorCode if is_farewell(code)}
    assert ErrorCode.LEASE_LOST in farewells
    assert ErrorCode.LEDGER_UNAVAILABLE not in farewells
    assert not any(ERRORS[code].ends_session for code in farewells)
    assert not is_farewell(None)
    assert not is_farewell("of a later release")


def test_no_call_is_ever_closed_with_1011() -> None:
    for code in ErrorCode:
        ended = Ended.because(CallEnd.FAILED, code)
        assert ended.close_code is not None
        assert ended.close_code != 1011


# --- credentials ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("headers", "found"),
    [
        ({"authorization": "Bearer abc"}, ("abc", None)),
        ({"authorization": "bearer a b"}, ("a b", None)),
        ({"authorization": "Basic abc"}, ("", None)),
        ({}, ("", None)),
        (
            {"sec-websocket-protocol": "realtime, openai-insecure-api-key.abc"},
            ("abc", "realtime"),
        ),
        ({"sec-websocket-protocol": "openai-insecure-api-key.abc"}, ("abc", None)),
    ],
)
def test_tokens(headers: dict[str, str], found: tuple[str, str | None]) -> None:
    assert bearer_token(headers) == found


def test_token_matches() -> None:
    assert token_matches("right", route(), None)
    assert token_matches("next", route(token_sha256_next=token_sha256("next")), None)
    for token in ("", "wrong", "right ", "\ud800", "x" * 10_000):
        assert not token_matches(token, route(), lease())
    assert not token_matches("right", None, None)
    empty = route(token_sha256=token_sha256(""))
    assert not token_matches("", empty, None)


def in_use(token: str) -> LeaseView:
    """What the ledger has once somebody has talked under that token."""
    return lease(token_sha256=token_sha256(token))


def test_a_token_that_was_replaced_lets_nobody_in_once_the_next_one_is_in_use() -> None:
    """Before the operator notices it, and whatever was the one before."""
    changed = route(token_sha256_next=token_sha256("next"))
    for view in (None, lease(), in_use("right")):
        assert token_matches("right", changed, view)
        assert token_matches("next", changed, view)
    assert not token_matches("right", changed, in_use("next"))
    assert token_matches("next", changed, in_use("next"))
    changed_back = route(token_sha256_next=token_sha256("right"))
    assert token_matches("right", changed_back, in_use("right"))
    assert token_matches("right", route(), in_use("next")), "the operator's word counts"


def mark(number: str, token: str) -> str:
    return f"{number}.{token_sha256(token)[:16]}"


def test_which_call_is_the_newer_one() -> None:
    changed = route(token_sha256_next=token_sha256("next"))
    own, other = mark("1", "next"), mark("2", "right")
    for view in (None, in_use("right")):
        assert is_newer(other, own, changed, view)
        assert not is_newer(own, own, changed, view)
        assert not is_newer("", own, changed, view)
        assert not is_newer(other, "", changed, view)
    assert not is_newer(other, own, changed, in_use("next")), "its token opens no more"
    assert is_newer(mark("3", "next"), own, changed, in_use("next"))
    assert is_newer("of an earlier release", own, changed, in_use("next"))
    assert is_newer(other, own, None, in_use("next")), "nobody knows of its token any more"


@pytest.mark.parametrize(
    "event",
    [
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "session.close"},
        {"type": "session.heartbeat"},
        {"type": "session.update", "session": {"type": "realtime"}},
    ],
)
def test_events_without_sound_are_small(event: dict[str, Any]) -> None:
    def message(size: int) -> bytes:
        bare = json.dumps(event | {"event_id": "mine", "more": ""})
        return json.dumps(event | {"event_id": "mine", "more": "x" * (size - len(bare))}).encode()

    assert read_client_message(message(MAX_CONTROL_BYTES)).kind is not Kind.TOO_LARGE
    large = read_client_message(message(MAX_CONTROL_BYTES + 1))
    assert (large.kind, large.event_id, large.size_bytes) == (Kind.TOO_LARGE, "mine", 0)
    with pytest.raises(ClientError) as refused:
        parse_message(message(MAX_CONTROL_BYTES + 1))
    assert refused.value.code is ErrorCode.INVALID_EVENT


async def test_a_look_at_leases_that_fails_is_not_the_last_one() -> None:
    looks = 0

    class Broken:
        async def leases(self, _: Any) -> Any:
            nonlocal looks
            looks += 1
            raise ArithmeticError("nobody has thought of this")

    watch = LeaseWatch(period_s=0.0)
    with watch.watching("a", 1):
        task = asyncio.create_task(watch.run(cast("Directory", Broken())))
        async with asyncio.timeout(60):
            while looks < 3:  # noqa: ASYNC110
                await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    assert task.cancelled()


def test_failed_attempts() -> None:
    attempts = FailedAttempts(burst=3, refill_s=10.0, addresses=2)
    for _ in range(3):
        assert attempts.allowed("a", 0.0)
        attempts.failed("a", 0.0)
    assert not attempts.allowed("a", 9.0)
    assert attempts.allowed("a", 10.0)
    attempts.failed("a", 10.0)
    assert not attempts.allowed("a", 10.0)
    assert attempts.allowed("b", 10.0)
    attempts.failed("b", 10.0)
    attempts.failed("c", 10.0)
    assert len(attempts._debts) == 2
    assert attempts.allowed("b", 1000.0)
    assert len(attempts._debts) == 1


# --- patience -------------------------------------------------------------------------------------


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_pauses_grow_and_a_good_connection_resets_them() -> None:
    clock = Clock()
    patience = Patience(300.0, clock)
    pauses = [patience.next_pause_s() for _ in range(8)]
    assert pauses == [0.0, 0.05, 0.1, 0.2, 0.4, 0.5, 0.5, 0.5]
    clock.now += 11
    assert patience.next_pause_s() == 2.0
    assert not patience.moved
    patience.greeted()
    clock.now += 60
    patience.lost()
    assert patience.moved
    assert patience.next_pause_s() == 0.0


def test_connections_that_never_last_are_given_up() -> None:
    clock = Clock()
    patience = Patience(300.0, clock)
    for number in range(MOST_SHORT_CONNECTIONS + 1):
        assert not patience.exhausted, number
        patience.next_pause_s()
        patience.greeted()
        patience.lost()
    assert patience.exhausted


def test_waiting_ends() -> None:
    clock = Clock()
    patience = Patience(10.0, clock)
    patience.lost()  # nobody answered: that is no loss
    clock.now += 10.5
    assert patience.exhausted
    patience.rest()
    assert not patience.exhausted


def test_notices_and_wakes_are_rare() -> None:
    clock = Clock()
    patience = Patience(300.0, clock)
    assert patience.wake_is_due(0)
    assert not patience.wake_is_due(0)
    assert patience.wake_is_due(4)
    assert not patience.notice_is_due("queued", 3)
    clock.now += 1.0
    assert patience.notice_is_due("queued", 3)
    assert not patience.wake_is_due(4)
    clock.now += 1.0
    assert not patience.notice_is_due("queued", 3)
    assert patience.notice_is_due("queued", 2)
    clock.now += 4.0
    assert not patience.notice_is_due("queued", 2)
    assert patience.wake_is_due(4)
    clock.now += 1.0
    assert patience.notice_is_due("queued", 2)
    assert patience.notice_is_due("parked", None, at_once=True) is False
    clock.now += 1.0
    assert patience.notice_is_due("parked", None, at_once=True)
    clock.now += 60.0
    assert not patience.notice_is_due("parked", None, at_once=True)


# --- the rest -------------------------------------------------------------------------------------


def test_a_watched_lease() -> None:
    watched = Watched("s", 7)
    watched.look(lease())
    watched.look(lease(0))
    watched.look(lease())
    watched.look(lease(-10))
    assert not watched.moved.is_set()
    watched.look(None)
    assert watched.moved.is_set()
    another = Watched("s", 6)
    another.look(lease())
    assert another.moved.is_set()


@pytest.mark.parametrize(
    ("text", "size"), [("", 0), ("AAAA", 3), ("AAA=", 2), ("AA==", 1), ("AAAAA", -1), ("A", -1)]
)
def test_base64_bytes(text: str, size: int) -> None:
    assert base64_bytes(text) == size


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (b'{"type":"input_audio_buffer.append","audio":"AAAA"}', Kind.APPEND),
        (b'{"type":"input_audio_buffer.append","audio":7}', Kind.OTHER),
        (b'{"type":"input_audio_buffer.commit"}', Kind.COMMIT),
        (b'{"type":"input_audio_buffer.clear"}', Kind.CLEAR),
        (b'{"type":"session.heartbeat"}', Kind.HEARTBEAT),
        (b'{"type":"session.close"}', Kind.CLOSE),
        (b'{"type":"session.update","session":{}}', Kind.FORMAT),
        (b'{"type":"session.update","session":{"instructions":"x"}}', Kind.OTHER),
        (b'{"type":"session.resume"}', Kind.OTHER),
        (b'{"type":"response.create"}', Kind.OTHER),
        (b"\xff\xfe", Kind.OTHER),
        (b'{"type":"session.heartbeat","x":' + b"[" * 5_000, Kind.OTHER),
        (b"", Kind.OTHER),
    ],
)
def test_kinds(message: bytes, kind: Kind) -> None:
    assert read_client_message(message).kind is kind


def test_settings_come_from_the_environment() -> None:
    environment = {"DUPLEX_REDIS_URL": "redis://x", "DUPLEX_PORT": "8443", "DUPLEX_OTHER": "1"}
    settings = settings_from(environment)
    assert (settings.redis_url, settings.port, settings.health_port) == ("redis://x", 8443, 8081)


@pytest.mark.parametrize(
    "wrong",
    [
        {"redis_url": "x", "port": 70_000},
        {"redis_url": "x", "tls_cert_file": "/nowhere/tls.crt"},
        {"redis_url": "x", "tls_cert_file": "/no/tls.crt", "tls_key_file": "/no/tls.key"},
        {"redis_url": "x", "max_calls": 0},
        {"redis_url": "x", "max_held_bytes": 1_000_000},
        {"redis_url": "x", "drain_grace_s": -1.0},
        {"redis_url": "x", "queue_wait_s": float("nan")},
        {"redis_url": "x", "log_level": "LOUD"},
    ],
)
def test_settings_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - each names its field
        GatewaySettings(**wrong)


def test_a_gateway_without_a_ledger_does_not_start() -> None:
    with pytest.raises(msgspec.ValidationError, match="redis_url"):
        settings_from({})
