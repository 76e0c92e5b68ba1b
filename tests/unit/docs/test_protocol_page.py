"""docs/protocol.md says what the realtime door does: every code, event, field and limit."""

import json
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest

from duplex_sidecar.doors import openai_events, openai_wire
from duplex_sidecar.protocol import events
from duplex_sidecar.protocol.errors import ERRORS, ErrorCode

pytestmark = pytest.mark.unit

PAGE = (Path(__file__).parents[3] / "docs" / "protocol.md").read_text(encoding="utf-8")

_FACTS = events.UnitDone(
    unit=1,
    turn=1,
    decision=events.Decision.SPEAK,
    tokens=8,
    window_tokens=90,
    rebuild_cause=None,
    rebuild_ms=None,
    dropped_units=0,
    head=2,
    epoch=0,
    stage2_sequence=0,
    audio_samples=20_160,
    wall_ms=100.0,
    stage_ms={},
    replica="one",
)
_BODIES: tuple[events.SequencedBody, ...] = (
    *(events.TurnMark(step, 1, 1, 0, "") for step in events.TurnStep),
    events.Transcript(1, 1, "yes"),
    events.Audio(1, 1, 0, 0, 0, b""),
    events.TurnTruncated(1, 1, 840, 7),
    _FACTS,
)
_OPENED = events.SessionOpened("one", False, 1, 1, 0, 0, 0, "off", 24_000)
EVENTS: tuple[events.Event, ...] = (
    _OPENED,
    msgspec.structs.replace(_OPENED, resumed=True),
    events.ResyncRequired(1, 2),
    events.InputAccepted(1, 0, 16_000),
    events.InputCleared(),
    events.InputFormatSet("pcm16", 16_000),
    events.PlaybackAcknowledged(1, 20_160),
    events.CommandApplied(1, "mine"),
    events.Alive("mine"),
    events.Failure(ErrorCode.INVALID_EVENT, "no"),
    events.Closed(ErrorCode.SESSION_ENDED, "closed"),
    *(events.Sequenced(number, body) for number, body in enumerate(_BODIES, start=1)),
)


def wire(event: events.Event) -> dict[str, Any]:
    return json.loads(openai_events.render_event(event, "one", "duplex"))


def names_of(event: events.Event) -> set[str]:
    """Type and our own fields of a rendered event."""
    body = wire(event)
    found = {body["type"], *body.get("duplex", {}), *body.get("error", {})}
    if body["type"] == "duplex.unit":
        found |= set(body) - {"type", "event_id"}
    return found


def test_every_kind_of_event_is_looked_at() -> None:
    kinds = {type(event) for event in EVENTS} | {type(body) for body in _BODIES}
    assert kinds == {*get_args(events.Event), *get_args(events.SequencedBody)}


@pytest.mark.parametrize("event", EVENTS, ids=lambda event: wire(event)["type"])
def test_every_server_event_and_our_fields_of_it_are_on_the_page(event: events.Event) -> None:
    assert sorted(name for name in names_of(event) if f"`{name}`" not in PAGE) == []


def test_every_client_event_and_field_is_on_the_page() -> None:
    known = openai_wire._WIRE_TYPES
    fields = {field for kind in known.values() for field in kind.__struct_fields__}
    names = {*known, *openai_wire.UNSUPPORTED_TYPES, *openai_wire._ENCODINGS, *fields - {"session"}}
    assert sorted(name for name in names if f"`{name}`" not in PAGE) == []


@pytest.mark.parametrize("code", ErrorCode)
def test_every_error_code_has_its_line(code: ErrorCode) -> None:
    entry = ERRORS[code]
    answers = {True: "yes", False: "no"}
    cells = (
        f"`{code}`",
        f"`{entry.type}`",
        answers[entry.retryable],
        entry.close_code or "stays open",
        answers[entry.ends_session],
        entry.sentence,
    )
    assert f"| {' | '.join(map(str, cells))} |" in PAGE.splitlines()


def test_the_page_names_no_code_that_is_gone() -> None:
    table = PAGE.partition("## Errors")[2].partition("## Close codes")[0]
    rows = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert rows == [code.value for code in ERRORS]


def test_every_close_code_is_explained() -> None:
    table = PAGE.partition("## Close codes")[2].partition("## Limits")[0]
    explained = {line.split("|")[1].strip() for line in table.splitlines() if line.startswith("|")}
    sent = {entry.close_code for entry in ERRORS.values()} - {None}
    assert {int(code) for code in explained if code.isdigit()} == sent
