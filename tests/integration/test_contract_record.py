"""What a live session really did, recorded at its stages and checked from outside."""

import asyncio
import base64
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest

from duplex_sidecar.cli.contract import check, record
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.contract.check import check_file
from duplex_sidecar.contract.recorder import RECORDED
from duplex_sidecar.contract.recorder import record as write_traces
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.model.minicpmo45 import talker_context
from duplex_sidecar.session import prompting, speaking
from duplex_sidecar.session.rows import RetainedUnits
from duplex_sidecar.stages.errors import StageFault
from duplex_sidecar.window.parts import MediaKind, MediaPart
from duplex_sidecar.window.state import WindowState

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    Caller,
    Stages,
    Terms,
    check_events,
    frames_of,
    replica,
    with_camera,
)
from support.ledgers import committed_units, tokens_of
from support.material import manifest, picture, speech
from support.realtime import conversing
from support.sidecars import Bed

pytestmark = pytest.mark.integration
UNITS = 40


@dataclass
class Studio:
    """Tapes of one test, and what is made of them."""

    url: str
    folder: Path

    @property
    def tapes(self) -> list[Path]:
        return sorted(self.folder.glob("*.tape.jsonl"))

    @property
    def traces(self) -> Path:
        return self.folder / "traces"

    async def talk(
        self, session: str, terms: Terms, *, stages: Stages | None = None, camera: bool = False
    ) -> Caller:
        session = f"{self.folder.name}-{session}".replace("[", "-")
        async with replica(self.url, tapes=self.folder, stages=stages) as here:
            await here.open(session, terms)
            caller = Caller(session, frames=frames_of if camera else lambda _: ())
            await caller.dial(here)
            await caller.talk(UNITS)
            check_events(caller)
            await caller.close()
        return caller

    def differences(self) -> dict[str, int]:
        """Differences by kind, of all kinds that were written."""
        report = write_traces(self.tapes, self.traces)
        assert report.left_out == ()
        found = {path.stem: len(check_file(path).differences) for path, _ in report.files}
        if report.findings:
            found["findings"] = len(report.findings)
        return {kind: count for kind, count in found.items() if count}


@pytest.fixture
def studio(valkey: EmbeddedValkey, tmp_path: Path) -> Studio:
    return Studio(valkey.url, tmp_path)


# --- what a session did is what it should have done -----------------------------------------------


@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
async def test_recorded_sessions_of_all_modes_are_equal(
    studio: Studio, camera: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for mode in MODES:
        terms = Terms(mode)
        await studio.talk(mode, with_camera(terms) if camera else terms, camera=camera)
    assert record(*studio.tapes, output=studio.traces) == 0
    written = sorted(studio.traces.glob("*.jsonl"))
    assert {path.stem for path in written} == set(RECORDED)
    assert check(*written) == 0
    shown = capsys.readouterr().out
    assert shown.count("equal") == len(RECORDED)
    # Something was compared: each unit's plan, layout and hand-off, of three sessions.
    compared = {path.stem: check_file(path).comparisons for path in written}
    assert compared["planner_sessions"] == 3 * (UNITS - 1) * 9
    assert compared["layout_sessions"] == 3 * (UNITS * 7 + 1)
    assert min(compared.values()) > 50


async def test_a_tape_is_content_and_the_files_made_of_it_too(studio: Studio) -> None:
    await studio.talk("private", Terms("context"))
    assert studio.tapes[0].stat().st_mode & 0o077 == 0
    record(*studio.tapes, output=studio.traces)
    assert studio.traces.stat().st_mode & 0o077 == 0


async def test_a_session_with_trouble_on_the_way_is_recorded_as_it_went_on(studio: Studio) -> None:
    stages = Stages()
    for unit, fault in ((7, StageFault.UNKNOWN_STREAM), (13, StageFault.GONE)):
        stages.thinker.fail(unit, fault, after=True)
        stages.talker.fail(unit + 3, fault)
        stages.code2wav.fail(unit + 9, fault)
        stages.encoder.fail(unit + 5, fault)
    for unit in range(5, UNITS, 9):
        stages.code2wav.fail(unit, StageFault.OUT_OF_ORDER)
    caller = await studio.talk("trouble", Terms("context"), stages=stages)
    assert {unit.rebuild_cause for unit in caller.units} == {None, "slide", "engine_restart"}
    assert studio.differences() == {}


async def test_a_session_of_two_replicas_is_one_session(studio: Studio) -> None:
    terms = Terms("context")
    async with replica(studio.url, "first", tapes=studio.folder) as first:
        await first.open("moved", terms)
        caller = Caller("moved")
        await caller.dial(first)
        await caller.talk(15)
        await caller.hang_up()
    async with replica(studio.url, "second", tapes=studio.folder) as second:
        await second.open("moved", terms)
        await caller.dial(second)
        await caller.talk(UNITS)
        await caller.close()
    assert len(studio.tapes) == 2
    assert studio.differences() == {}


async def test_a_tape_that_begins_in_the_middle_is_left_out(studio: Studio) -> None:
    await studio.talk("whole", Terms("basic"))
    (tape,) = studio.tapes
    lines = tape.read_bytes().splitlines(keepends=True)
    fed = [line for line in lines if json.loads(line)["type"] == "thinker"]
    tape.write_bytes(b"".join([lines[0], *(line for line in lines[1:] if line != fed[0])]))
    assert record(tape, output=studio.traces) == 2


# --- a session that did something else ------------------------------------------------------------

Patch = Callable[[pytest.MonkeyPatch], None]


def another_previous(patch: pytest.MonkeyPatch) -> None:
    """The right number of other ids."""

    def wrong(function: Callable[..., Any]) -> Callable[..., Any]:
        def rendered(context: Any, previous_ids: Any, *rest: Any) -> Any:
            return function(context, tuple(reversed(previous_ids)), *rest)

        return rendered

    patch.setattr(prompting, "render_prompt", wrong(prompting.render_prompt))
    patch.setattr(prompting, "history_parts", wrong(prompting.history_parts))


def units_in_another_order(patch: pytest.MonkeyPatch) -> None:
    plain = RetainedUnits.history

    def history(self: RetainedUnits, seqs: Any) -> Any:
        units = plain(self, seqs)
        return [*units[:-2], *reversed(units[-2:])]

    patch.setattr(RetainedUnits, "history", history)


def rows_of_another_unit(patch: pytest.MonkeyPatch) -> None:
    plain = RetainedUnits._look_up

    def look_up(self: RetainedUnits, part: MediaPart) -> Any:
        named = replace_part(part) if part.unit - 1 in self._history else part
        return plain(self, named)

    def replace_part(part: MediaPart) -> MediaPart:
        unit = part.unit - 1 if part.kind is MediaKind.AUDIO else part.unit
        return MediaPart(part.kind, unit, part.index, part.length)

    patch.setattr(RetainedUnits, "_look_up", look_up)


def one_unit_more_leaves(patch: pytest.MonkeyPatch) -> None:
    plain = prompting.plan

    def plan(state: WindowState, append: Any, policy: Any, *rest: Any) -> Any:
        fewer = msgspec.structs.replace(policy, context_max_units=policy.context_max_units - 1)
        return plain(state, append, fewer, *rest)

    patch.setattr(prompting, "plan", plan)


def rows_of_the_token_before(patch: pytest.MonkeyPatch) -> None:
    plain = speaking.rows_of
    patch.setattr(
        speaking, "rows_of", lambda hidden, at: plain(hidden, tuple(max(0, i - 1) for i in at))
    )


def the_first_token_is_not_spoken(patch: pytest.MonkeyPatch) -> None:
    plain = speaking.select

    def select(*arguments: Any) -> Any:
        chosen = plain(*arguments)
        handoff = chosen.handoff
        if handoff is None or len(handoff.ids) < 3:
            return chosen
        shorter = msgspec.structs.replace(
            handoff, ids=handoff.ids[1:], row_indices=handoff.row_indices[1:]
        )
        return chosen._replace(handoff=shorter)

    patch.setattr(speaking, "select", select)


def every_condition_stands_alone(patch: pytest.MonkeyPatch) -> None:
    def plan_condition(context: Any, **given: Any) -> Any:
        return talker_context.plan_condition(context, **(given | {"turn_start": True}))

    patch.setattr(speaking, "plan_condition", plan_condition)


def silence_before_every_chunk(patch: pytest.MonkeyPatch) -> None:
    plain = speaking.produce_unit

    def produce_unit(state: Any, record: Any) -> Any:
        return plain(msgspec.structs.replace(state, context_codes=None), record)

    patch.setattr(speaking, "produce_unit", produce_unit)


MUTANTS: dict[str, tuple[Patch, set[str]]] = {
    "another previous": (another_previous, {"planner_sessions", "layout_sessions"}),
    "units in another order": (units_in_another_order, {"findings"}),
    "rows of another unit": (rows_of_another_unit, {"findings"}),
    "one unit more leaves": (one_unit_more_leaves, {"planner_sessions", "layout_sessions"}),
    "rows of the token before": (rows_of_the_token_before, {"handoff_sessions"}),
    "a token is not spoken": (the_first_token_is_not_spoken, {"handoff_sessions"}),
    "every condition alone": (every_condition_stands_alone, {"talker_context_sessions"}),
    "silence before a chunk": (silence_before_every_chunk, {"producer_sessions"}),
}


@pytest.mark.parametrize("name", MUTANTS)
async def test_a_sidecar_that_does_something_else_is_found_out(
    studio: Studio, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The fakes notice none of these: what is fed is valid, only wrong."""
    change, kinds = MUTANTS[name]
    with monkeypatch.context() as patch:
        change(patch)
        await studio.talk("mutant", Terms("context"))
    assert kinds <= set(studio.differences())
    assert record(*studio.tapes, output=studio.traces) == (1 if "findings" in kinds else 0)
    if "findings" not in kinds:
        assert check(*studio.traces.glob("*.jsonl")) == 1


# --- one recorded value that is another one -------------------------------------------------------


async def test_one_altered_value_of_a_trace_is_a_difference(studio: Studio) -> None:
    await studio.talk("altered", Terms("context"))
    assert studio.differences() == {}
    for kind in RECORDED:
        path = studio.traces / f"{kind}.jsonl"
        original = path.read_text()
        names: set[str] = set()
        for name, changed in alterations(json.loads(original)):
            path.write_text(json.dumps(changed) + "\n")
            assert check(path) == 1, f"{kind}: {name}"
            names.add(name)
        assert len(names) >= 2, kind
        path.write_text(original)


def alterations(case: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The case with one expected value altered, once for each name of a value."""
    steps = case.get("expected")
    if steps is None:
        steps = [one["expected"] for one in case.get("appends") or case["steps"]]
    done: set[str] = set()
    for expected in steps:
        for name, value in list(expected.items()):
            if value is None or name in done:
                continue
            done.add(name)
            expected[name] = altered(value)
            yield name, case
            expected[name] = value


def altered(value: Any) -> Any:
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, str):
        return f"{value}?"
    if isinstance(value, list):
        return [*value[:-1], altered(value[-1])] if value else [0]
    return value | {"seq": value["seq"] + 1}


# --- the real stages ------------------------------------------------------------------------------

REAL_UNITS = 36
CONTEXT = {"mode": "context", "contextMaxUnits": 6, "contextPreviousMaxTokens": 40}
BASIC = {"mode": "basic", "basicWindowHighTokens": 360, "basicWindowLowTokens": 220}
REAL: dict[str, dict[str, Any]] = {
    "off": {"window": {"mode": "off"}},
    "basic": {"window": BASIC},
    "context": {"window": CONTEXT},
    "camera": {"window": CONTEXT, "camera": {"framesPerUnit": 1}},
    "sampled": {"window": CONTEXT, "sampling": {"greedy": False, "seed": 11}},
}


async def test_the_real_stages_did_what_they_should_with_and_without_rebuild_ahead(
    bed: Bed, tmp_path: Path
) -> None:
    """Two sidecars on the tiny checkpoint, one of which makes no stream ahead: the same tokens, and
    on the tapes of both nothing but what the check computes."""
    said: dict[bool, list[list[list[int]]]] = {}
    for ahead in (True, False):
        folder = tmp_path / str(ahead)
        sidecar = bed.prepare(
            f"taped-{ahead}",
            rebuild_ahead=ahead,
            contract_tape_dir=str(folder),
            max_model_tokens=2048,
            slots=len(REAL),
        )
        sidecar.start()
        await asyncio.to_thread(sidecar.wait_ready)
        said[ahead] = await asyncio.gather(*(talked(sidecar, name) for name in REAL))
        await asyncio.to_thread(sidecar.stop)
        tapes = sorted(folder.glob("*.tape.jsonl"))
        report = write_traces(tapes, folder / "traces")
        assert (report.left_out, report.findings) == ((), ())
        assert [cases for _, cases in report.files] == [len(REAL)] * len(RECORDED)
        assert [check_file(path).differences for path, _ in report.files] == [()] * len(RECORDED)
        assert bool(opened_ahead(tapes)) == ahead
    assert said[True] == said[False]
    assert any(len({len(unit) for unit in units}) > 3 for units in said[True]), "it spoke"


async def talked(sidecar: LocalSidecar, name: str) -> list[list[int]]:
    """Tokens of a conversation of that kind."""
    spec = REAL[name]
    async with conversing(sidecar, manifest(**spec), name) as client:
        for unit in range(1, REAL_UNITS + 1):
            shown = base64.b64encode(picture(shade=unit * 5 % 256)).decode()
            camera = {"video_frames": [shown]} if "camera" in spec else {}
            await client.append(speech(1, unit - 1), **camera)
            await client.until_unit(unit)
        client.heard.assert_whole()
        assert client.heard.errors == []
        slides = [unit for unit in client.heard.units if unit["rebuild_cause"] == "slide"]
        assert len(slides) >= {"off": 0, "basic": 2}.get(name, REAL_UNITS - 7)
        return tokens_of(await committed_units(sidecar.settings.redis_url, client.session))


def opened_ahead(tapes: list[Path]) -> list[dict[str, Any]]:
    """Streams that got closed units alone, before their append was there."""
    entries = [json.loads(line) for tape in tapes for line in tape.read_text().splitlines()]
    fed = [entry for entry in entries if entry["type"] == "thinker"]
    return [entry for entry in fed if isinstance(entry["parts"][-1], list)]
