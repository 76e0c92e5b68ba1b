"""What the demo says of its kill: told apart from what only looks like it."""

import subprocess
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs
from rich.console import Console
from session_kit import MODEL, VOCABULARY, WORD_IDS, Terms

from duplex_api.resolve import resolve_session
from duplex_api.window import WindowBoundary, WindowLimits
from duplex_sidecar.cli.demo import Kill, summary
from duplex_sidecar.cli.demo_checks import epoch_begins_anew
from duplex_sidecar.client.conversation import Replies, Talk
from duplex_sidecar.ledger.export import Line
from duplex_sidecar.ledger.records import (
    Accepted,
    Committed,
    MediaRefs,
    PlanAction,
    PlanFacts,
    Record,
    UnitInput,
)
from duplex_sidecar.model.minicpmo45.constants import (
    CLOSURE_POSITIONS,
    IMAGE_BLOCK_POSITIONS,
    UNIT_APPEND_POSITIONS,
)
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.opening import facts_of, opening_of
from duplex_sidecar.session.prompting import plan_after
from duplex_sidecar.session.same_window import window_is_the_same
from duplex_sidecar.window import parts
from duplex_sidecar.window.state import Overflow

pytestmark = pytest.mark.unit

COMMON: dict[str, Any] = {"schema": 1, "at_ms": 5, "prev_hash": "0" * 64}
WINDOW_UNITS = 4


# --- the window -----------------------------------------------------------------------------------


@pytest.fixture
def facts() -> SessionFacts:
    terms = Terms("context", max_units=WINDOW_UNITS)
    resolved = resolve_session(terms.manifest().spec, None, WindowLimits())
    return facts_of(opening_of("s", resolved, MODEL, "")[0], MODEL)


def talked(facts: SessionFacts, units: int) -> Conversation:
    """A conversation whose every second unit spoke three words."""
    resolved = resolve_session(Terms("off").manifest().spec, None, WindowLimits())
    now = opening_of("s", resolved, MODEL, "")[1]
    for seq in range(1, units + 1):
        first = facts.layout.context_tokens - CLOSURE_POSITIONS if seq == 1 else 0
        plan, window = plan_after(facts, now, UNIT_APPEND_POSITIONS + first, None)
        assert not isinstance(plan, Overflow)
        said = (WORD_IDS[0],) * 3 if seq % 2 else ()
        now = structs.replace(
            now,
            seq=seq,
            window=window,
            completed=parts.HistoryUnit(parts.UnitInput(seq, 1, ()), said, VOCABULARY.listen),
            completed_ends=WindowBoundary.UNIT,
        )
    return now


def recorded(seq: int, prompt_tokens: int, dropped: int) -> list[Record]:
    plan = PlanFacts(
        PlanAction.REBUILD, "context", "replica_restart", dropped, 13, 0, prompt_tokens
    )
    draft: dict[str, Any] = {"seq": seq, "epoch": 0, "turn": 1, "plan": plan, **COMMON}
    given = UnitInput(16_000, 1, 0, 16_000, True, False, False)
    return [
        Accepted(
            input=given,
            directive="",
            strategy="reprefill",
            seed=1,
            traceparent="",
            media=MediaRefs(None, None, ()),
            state_sha256=None,
            attempts=1,
            replica="one",
            **draft,
        ),
        Committed(
            token_ids=(VOCABULARY.listen,),
            sampled_ids=(VOCABULARY.listen,),
            terminator=None,
            decision="listen",
            turn_end=False,
            state_sha256="",
            replica="two",
            **draft,
        ),
    ]


@pytest.mark.parametrize("units", [1, 2, WINDOW_UNITS + 1, WINDOW_UNITS + 6])
@pytest.mark.parametrize("frames", [0, 1])
def test_the_window_is_what_its_owner_would_have_made_of_it(
    facts: SessionFacts, units: int, frames: int
) -> None:
    before = talked(facts, units)
    update = UNIT_APPEND_POSITIONS + frames * IMAGE_BLOCK_POSITIONS
    _, window = plan_after(facts, before, update, None)
    dropped = 1 if units > WINDOW_UNITS else 0

    def same(tokens: int, units_dropped: int, number: int = units + 1) -> bool:
        return window_is_the_same(facts, before, frames, recorded(number, tokens, units_dropped))

    assert same(window.prompt_tokens, dropped)
    assert not same(window.prompt_tokens + 1, dropped)
    assert not same(window.prompt_tokens - IMAGE_BLOCK_POSITIONS, dropped)
    assert not same(window.prompt_tokens, dropped + 1)
    assert not same(window.prompt_tokens, dropped, units + 2), "the next unit was never answered"


# --- the epoch ------------------------------------------------------------------------------------


def chunk(unit: int, turn: int, epoch: int, sequence: int, from_sample: int) -> Replies:
    return Replies(float(unit), turn, epoch, sequence, from_sample, bytes(2 * 24_000))


BETWEEN = [chunk(6, 1, 0, 0, 0), chunk(7, 1, 0, 1, 24_000), chunk(9, 2, 1, 0, 0)]
"""The kill after unit 8: the next turn, whole."""
WITHIN = [
    chunk(6, 1, 0, 0, 0),
    chunk(7, 1, 0, 1, 24_000),
    chunk(9, 1, 1, 2, 48_000),
    chunk(10, 1, 1, 3, 72_000),
]
"""The kill after unit 8, in mid-turn: two chunks that sounded are heard again first, muted."""


@pytest.mark.parametrize("replies", [BETWEEN, WITHIN, BETWEEN[:2], []])
def test_a_new_epoch_from_chunk_0(replies: list[Replies]) -> None:
    assert epoch_begins_anew(replies, 8)


@pytest.mark.parametrize(
    ("replies", "number", "change"),
    [
        (BETWEEN, 2, {"epoch": 0}),
        (BETWEEN, 2, {"sequence": 1}),
        (BETWEEN, 2, {"from_sample": 24_000}),
        (WITHIN, 2, {"epoch": 0}),
        (WITHIN, 2, {"sequence": 3}),
        (WITHIN, 2, {"sequence": 0}),
        (WITHIN, 2, {"from_sample": 24_000}),
        (WITHIN, 3, {"sequence": 4}),
    ],
)
def test_what_is_no_new_epoch_from_chunk_0(
    replies: list[Replies], number: int, change: dict[str, int]
) -> None:
    changed = [*replies]
    changed[number] = replace(replies[number], **change)
    assert not epoch_begins_anew(changed, 8)


# --- the verdict ----------------------------------------------------------------------------------


def unit(number: int, replica: str) -> dict[str, Any]:
    return {
        "unit": number,
        "decision": "listen",
        "wall_ms": 10.0,
        "rebuild_cause": None,
        "epoch": 0,
        "stage2_sequence": None,
        "audio_samples": 0,
        "replica": replica,
    }


HELD = Kill(resumed=1, same_window=True, new_epoch=True)


@pytest.mark.parametrize(
    ("kill", "replicas", "status"),
    [
        (HELD, ("one", "two"), 0),
        (None, ("one", "one"), 0),
        (HELD, ("one", "one"), 1),
        (replace(HELD, resumed=0), ("one", "two"), 1),
        (replace(HELD, same_window=False), ("one", "two"), 1),
        (replace(HELD, new_epoch=False), ("one", "two"), 1),
    ],
)
def test_the_demo_fails_where_something_claimed_does_not_hold(
    tmp_path: Any, kill: Kill | None, replicas: tuple[str, str], status: int
) -> None:
    units = [unit(1, replicas[0]), unit(2, replicas[1])]
    talk = Talk(units=units, done_at_s={1: 100.0, 2: 186.2})
    console = Console(record=True, width=300)
    assert summary(console, tmp_path, talk, kill, 1.0) == status
    told = console.export_text()
    assert told.strip().startswith("FAILED" if status else "OK")
    away = "away 86 s" if replicas[0] != replicas[1] else "away 0 s"
    assert (away in told) is (kill is not None)


def ledger_line(seq: int, action: PlanAction = PlanAction.REBUILD) -> bytes:
    plan = PlanFacts(action, "context", None, 0, 13, 0, 40)
    line = Line(
        kind="unit",
        session="s",
        seq=seq,
        epoch=0,
        turn=1,
        committed=True,
        token_ids=(),
        sampled_ids=(),
        terminator=None,
        decision="listen",
        turn_end=False,
        plan=plan,
        input=None,
        attempts=1,
        accepted_by="one",
        replica="one",
        at_ms=5,
        index=seq,
        prev_hash="0" * 64,
        hash="0" * 64,
        records=(msgspec.json.encode({"plan": plan}).decode(),),
    )
    return msgspec.json.encode(line) + b"\n"


def test_the_hint_counts_the_rebuilds_of_the_summary(tmp_path: Any) -> None:
    """Of the ledger: traces tell of those, too, that were made for a unit that never came."""
    console = Console(record=True, width=300)
    summary(console, tmp_path, Talk(units=[unit(1, "one")]), None, 1.0)
    hint = next(line for line in console.export_text().splitlines() if "rebuilds  " in line)
    lines = [ledger_line(seq) for seq in (1, 2, 3)] + [ledger_line(4, PlanAction.EXTEND)]
    (tmp_path / "ledger.jsonl").write_bytes(b"".join(lines))
    command = hint.strip().removeprefix("rebuilds").strip()
    counted = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert int(counted.stdout) == 3


def test_the_commands_at_the_end_are_called_alike(tmp_path: Any) -> None:
    console = Console(record=True, width=300)
    summary(console, tmp_path, Talk(units=[unit(1, "one")]), None, 1.0)
    lines = [line for line in console.export_text().splitlines() if "duplex " in line]
    assert len(lines) == 2
    assert all(".venv/bin/duplex " in line for line in lines)
