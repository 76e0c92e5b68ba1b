"""What a listener of the feed is told and when: pure, with the time given."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from duplex_sidecar.admin.api import OpenSession
from duplex_sidecar.admin.feed import Feed, FeedCursor, FeedResponse
from duplex_sidecar.admin.views import departed_line
from duplex_sidecar.app import Sidecar
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.session.ending import SHUT_DOWN, Ending, parked
from duplex_sidecar.session.parking import ParkReason
from duplex_sidecar.session.roster import Departed, Roster

pytestmark = pytest.mark.unit

POD = {
    "kind": "hello",
    "ready": True,
    "ledgerAway": False,
    "draining": False,
    "freeSlots": 4,
    "replica": "one",
}
BEAT = {"kind": "beat"}


def session(name: str = "a", phase: str = "active", fence: int = 1, units: int = 0) -> Any:
    return {"kind": "session", "session": name, "phase": phase, "fence": fence, "units": units}


def test_the_first_lines() -> None:
    left = Departed(1, parked(ParkReason.DRAIN), 7, 12, 3)
    lines = FeedCursor().lines(0.0, POD, {"a": session()}, {"b": left})
    assert lines[0] == POD
    assert [line["kind"] for line in lines] == ["hello", "session", "session", "beat"]
    told = {line["session"]: line["phase"] for line in lines if line["kind"] == "session"}
    assert told == {"a": "active", "b": "parked"}


def test_the_hello_names_what_may_be_said_beyond_the_first_release() -> None:
    stub: Any = SimpleNamespace(
        settings=SimpleNamespace(replica="r", pod_uid="u", pod_name="n", model_name="m", slots=2),
        roster=SimpleNamespace(free_slots=1),
        draining=False,
        problem=None,
        ledger_away=False,
    )
    hello = Sidecar.hello(stub)
    known = {field.alias or name for name, field in OpenSession.model_fields.items()}
    first_release = {"manifest", "token", "tokenHash", "fence"}
    assert set(hello["understands"]) <= known - first_release
    assert "resume" in hello["understands"]


def test_nothing_new_is_a_beat_a_second() -> None:
    cursor = FeedCursor()
    cursor.lines(0.0, POD, {"a": session()}, {})
    assert cursor.lines(0.5, POD, {"a": session()}, {}) == []
    assert cursor.lines(1.0, POD, {"a": session()}, {}) == [BEAT]


def test_numbers_are_told_once_a_second_and_phases_at_once() -> None:
    cursor = FeedCursor()
    cursor.lines(0.0, POD, {"a": session(phase="ready")}, {})
    assert cursor.lines(0.2, POD, {"a": session(phase="ready", units=1)}, {}) == []
    active = session(units=1)
    assert cursor.lines(0.4, POD, {"a": active}, {}) == [active]
    assert cursor.lines(1.3, POD, {"a": session(units=2)}, {}) == [BEAT]
    assert cursor.lines(1.5, POD, {"a": session(units=3)}, {}) == [session(units=3)]


def test_the_pod_changes() -> None:
    cursor = FeedCursor()
    cursor.lines(0.0, POD, {}, {})
    draining = POD | {"draining": True}
    told = {"kind": "pod", "ready": True, "ledgerAway": False, "draining": True, "freeSlots": 4}
    assert cursor.lines(0.1, draining, {}, {}) == [told]
    assert cursor.lines(0.2, draining, {}, {}) == []


@pytest.mark.parametrize(
    ("ending", "phase", "reason"),
    [
        (parked(ParkReason.PARK_AFTER), "parked", "park_after"),
        (Ending(ErrorCode.SESSION_ENDED, "", for_good=True, reason="deleted"), "ended", "deleted"),
        (Ending(ErrorCode.SESSION_ENDED, "", reason="erased"), "ended", "erased"),
        (Ending(ErrorCode.UNIT_FAILED, "", for_good=True), "ended", "unit_failed"),
        (SHUT_DOWN, "gone", "lease_lost"),
        (Ending(ErrorCode.LEDGER_CORRUPT, ""), "gone", "ledger_corrupt"),
    ],
)
def test_how_a_session_left(ending: Ending, phase: str, reason: str) -> None:
    line = departed_line("a", Departed(1, ending, 3, 9, 2))
    assert (line["phase"], line["reason"], line["fence"]) == (phase, reason, 3)


def test_a_session_that_left_and_came_back_is_told_in_that_order() -> None:
    cursor = FeedCursor()
    cursor.lines(0.0, POD, {"a": session()}, {})
    left = {"a": Departed(1, parked(ParkReason.REQUESTED), 1, 5, 0)}
    assert [line["phase"] for line in cursor.lines(0.1, POD, {}, left)] == ["parked"]
    assert cursor.lines(0.2, POD, {}, left) == []
    back = session(fence=2)
    assert cursor.lines(0.3, POD, {"a": back}, {}) == [back]
    # Gone and back between two looks: the fence tells.
    again = session(fence=3)
    assert cursor.lines(0.4, POD, {"a": again}, {}) == [again]


names = st.sampled_from("abc")
steps = st.lists(
    st.tuples(
        st.floats(min_value=0.01, max_value=2),
        st.dictionaries(names, st.tuples(st.sampled_from(["ready", "active"]), st.integers(0, 3))),
        st.booleans(),
    ),
    max_size=30,
)


@given(steps)
def test_a_listener_knows_in_the_end_how_things_stand(
    story: list[tuple[float, dict[str, tuple[str, int]], bool]],
) -> None:
    cursor = FeedCursor()
    now_s, known, draining = 0.0, {}, None
    told_at: dict[str, float] = {}
    departed: dict[str, Departed] = {}
    number, fences, here = 0, 0, {}
    live: dict[str, Any] = {}

    def listen(lines: list[Any]) -> None:
        nonlocal draining
        for line in lines:
            if line["kind"] == "session" and line["phase"] in ("ready", "active"):
                before = known.get(line["session"])
                if before and (before["phase"], before["fence"]) == (line["phase"], line["fence"]):
                    assert now_s - told_at[line["session"]] >= 1.0
                known[line["session"]], told_at[line["session"]] = line, now_s
            elif line["kind"] == "session":
                known.pop(line["session"], None)
            elif line["kind"] in ("hello", "pod"):
                draining = line["draining"]

    pod = POD
    for passed_s, present, drains in story:
        now_s += passed_s
        for name in live.keys() - present.keys():
            number += 1
            departed[name] = Departed(number, SHUT_DOWN, here[name], 0, 0)
        for name in present.keys() - live.keys():
            departed.pop(name, None)
            fences += 1
            here[name] = fences
        live = {n: session(n, phase, here[n], units) for n, (phase, units) in present.items()}
        pod = POD | {"draining": drains}
        listen(cursor.lines(now_s, pod, live, departed))
    now_s += 1.0
    listen(cursor.lines(now_s, pod, live, departed))
    assert known == live
    assert draining == pod["draining"]


async def test_a_feed_that_breaks_says_so_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    def pod() -> dict[str, Any]:
        raise ArithmeticError("nobody has thought of this")

    sent: list[str] = []

    async def send(message: Any) -> None:
        sent.append(message["type"])

    async def receive() -> Any:
        await asyncio.Event().wait()

    async with asyncio.timeout(60):
        await FeedResponse(Feed(Roster(1), pod))({"type": "http"}, receive, send)
    assert sent == ["http.response.start"]  # no end: whoever listens sees that it broke off
    assert "the feed broke off" in caplog.text
