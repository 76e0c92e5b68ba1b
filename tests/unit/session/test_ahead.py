"""What is foreseen of the next append comes true; a stream opened ahead is one like any other."""

import asyncio
import itertools
import logging
from dataclasses import replace

import pytest
from fake_stage import rows
from fake_thinker import FakeThinker
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from session_kit import MODEL, VOCABULARY, WORD_IDS, Mode, Terms

from duplex_api.resolve import resolve_session
from duplex_api.window import WindowBoundary, WindowLimits
from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.model.minicpmo45.constants import (
    CLOSURE_POSITIONS,
    IMAGE_BLOCK_POSITIONS,
    UNIT_APPEND_POSITIONS,
)
from duplex_sidecar.session.ahead import Foreseen, RebuildAhead, foresee, prefill_rules
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.opening import facts_of, opening_of
from duplex_sidecar.session.prompting import Prompter, plan_after
from duplex_sidecar.session.recording import Planned
from duplex_sidecar.session.rows import RetainedUnits, StoredRows
from duplex_sidecar.session.streams import EngineStream, StreamFeed, ThinkerStream
from duplex_sidecar.stages.envelope import (
    Ids,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    ThinkerPart,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.telemetry.names import SegmentReason
from duplex_sidecar.telemetry.settings import TelemetrySettings
from duplex_sidecar.telemetry.traces import Tracing
from duplex_sidecar.window.parts import HistoryUnit, UnitInput
from duplex_sidecar.window.state import EMPTY_WINDOW, Extend, Overflow, PlanLimits, Rebuild

pytestmark = pytest.mark.unit
LISTEN = VOCABULARY.listen
WORD = WORD_IDS[0]


def facts_for(terms: Terms, limit: int | None = 8192) -> SessionFacts:
    resolved = resolve_session(terms.manifest().spec, None, WindowLimits())
    draft, _ = opening_of("s", resolved, MODEL, "")
    return replace(facts_of(draft, MODEL), limits=PlanLimits(limit))


def before_anything(facts: SessionFacts) -> Conversation:
    resolved = resolve_session(Terms("off").manifest().spec, None, WindowLimits())
    return opening_of("s", resolved, MODEL, "")[1]


def next_unit(
    facts: SessionFacts, before: Conversation, update: int, said: tuple[int, ...]
) -> Conversation | None:
    """The next unit as a session commits it; None when it does not fit."""
    slots = update + (facts.layout.context_tokens - CLOSURE_POSITIONS if before.seq == 0 else 0)
    decision, window = plan_after(facts, before, slots, None)
    if isinstance(decision, Overflow):
        return None
    seq = before.seq + 1
    return structs.replace(
        before,
        seq=seq,
        window=window,
        completed=HistoryUnit(UnitInput(seq, 1, ()), said, LISTEN),
        completed_ends=WindowBoundary.UNIT,
    )


def talked(facts: SessionFacts, units: int, said: tuple[int, ...] = ()) -> Conversation:
    now = before_anything(facts)
    for _ in range(units):
        after = next_unit(facts, now, UNIT_APPEND_POSITIONS, said)
        assert after is not None
        now = after
    return now


# --- what is foreseen -----------------------------------------------------------------------------


def test_a_full_context_window_is_foreseen_to_slide_and_none_before() -> None:
    facts = facts_for(Terms("context", max_units=6))
    for units in range(1, 7):
        assert foresee(facts, talked(facts, units)) is None
    seen = foresee(facts, talked(facts, 7, (WORD,)))
    assert seen is not None
    assert (seen.rebuild.drop_units, seen.rebuild.previous_ids) == (1, (WORD,))
    assert [unit.seq for unit in seen.window.units] == [2, 3, 4, 5, 6, 7]


def test_a_basic_window_is_foreseen_where_the_shortest_append_passes_the_mark() -> None:
    facts = facts_for(Terms("basic", basic_high=320, basic_low=220))
    slides = [unit for unit in range(1, 60) if foresee(facts, talked(facts, unit)) is not None]
    kept = talked(facts, slides[0])
    assert kept.window.prompt_tokens + UNIT_APPEND_POSITIONS > 320
    assert talked(facts, slides[0] - 1).window.prompt_tokens + UNIT_APPEND_POSITIONS <= 320
    # Between two slides of a basic window there are some seconds.
    assert min(b - a for a, b in itertools.pairwise(slides)) > 5


def test_nothing_is_foreseen_in_mode_off_before_a_unit_or_where_nothing_fits() -> None:
    off = facts_for(Terms("off"))
    assert all(foresee(off, talked(off, units)) is None for units in (0, 1, 40))
    context = facts_for(Terms("context", max_units=3))
    assert foresee(context, before_anything(context)) is None
    full = talked(context, 5)
    assert foresee(context, full) is not None
    assert foresee(replace(context, limits=PlanLimits(60)), full) is None


LENGTHS = st.sampled_from(
    [
        UNIT_APPEND_POSITIONS + IMAGE_BLOCK_POSITIONS * blocks + 12 * second
        for blocks in (0, 1, 2, 4)
        for second in (0, 1)
    ]
)
ANSWERS = st.lists(st.sampled_from(WORD_IDS), max_size=19).map(tuple)
UNITS = st.lists(st.tuples(LENGTHS, ANSWERS), min_size=2, max_size=25)


@given(mode=st.sampled_from(["off", "basic", "context"]), units=UNITS, limit=st.integers(150, 900))
def test_what_is_foreseen_comes_true_whatever_the_next_append_is(
    mode: Mode, units: list[tuple[int, tuple[int, ...]]], limit: int
) -> None:
    facts = facts_for(Terms(mode, max_units=4, previous_max=20), limit)
    now = before_anything(facts)
    length = 0
    for length_before, (length, said) in zip([0, *(u[0] for u in units)], units, strict=False):
        seen = foresee(facts, now)
        if seen is not None:
            decision, window = plan_after(facts, now, length, None)
            assert isinstance(decision, Rebuild | Overflow), "a sure slide is no extension"
            if isinstance(decision, Rebuild):
                planned = Planned(decision, window)
                assert seen.fits(planned, length) or mode == "basic"
                less = structs.replace(window, prompt_tokens=window.prompt_tokens - 1)
                assert not seen.fits(Planned(decision, less), length), "something was taken back"
                if seen.fits(planned, length):
                    rest = length - CLOSURE_POSITIONS
                    assert decision.replacement_tokens == seen.history_tokens + rest
                else:
                    assert length != length_before, "as long as the last one: as foreseen"
        after = next_unit(facts, now, length, said)
        if after is None:
            return
        now = after


# --- the stream -----------------------------------------------------------------------------------


class Bench:
    """A session's stream over a Thinker of four seats; the session has just answered `talk.seq`
    units and its window is full."""

    def __init__(self, spare: int = 1, *, enabled: bool = True) -> None:
        self.stage = FakeThinker(VOCABULARY, WORD_IDS, seats=4)
        self.spare = SpareSeats(spare)
        self.facts = facts_for(Terms("context", max_units=3))
        self.talk = talked(self.facts, 5, (WORD,))
        self.stream: ThinkerStream = EngineStream(
            self.stage, "s/1", self._feed, self._close, self.spare
        )
        retained = RetainedUnits()
        for seq in range(1, 6):
            audio = rows(*(b"%d %d" % (seq, k) for k in range(10)))
            retained.put_rows(seq, StoredRows((), (audio,), ()))
            retained.complete(HistoryUnit(UnitInput(seq, 1, ()), (WORD,), LISTEN))

        async def never() -> object:
            raise AssertionError("all of it is in memory")

        trace = Tracing(TelemetrySettings(replica="r")).session("s", None, SegmentReason.OPENED)
        prompter = Prompter(self.facts, retained, never)
        self.ahead = RebuildAhead(self.facts, self.stream, prompter, trace, enabled=enabled)

    async def _feed(self, f: StreamFeed[ThinkerPart]) -> ThinkerAnswer:
        feed = ThinkerFeed("s", f.stream, f.unit, f.opens, f.position, f.parts, f.rules)
        return await self.stage.feed(feed)

    async def _close(self, stream: str) -> None:
        await self.stage.close(ThinkerClose(stream))

    async def opened_before(self) -> None:
        """A stream that the last unit was answered on."""
        await self.stream.rebuild(4, (Ids((0, 1)),), prefill_rules(self.facts))
        self.stage.opened_ahead.clear()

    @property
    def seen(self) -> Foreseen:
        seen = foresee(self.facts, self.talk)
        assert seen is not None
        return seen


async def settled() -> None:
    for _ in range(8):
        await asyncio.sleep(0)


async def test_the_stream_of_the_next_unit_takes_the_place_of_the_old_one() -> None:
    bench = Bench()
    await bench.opened_before()
    bench.ahead.start(bench.talk)
    assert bench.stream.live, "the old one, meanwhile"
    opened = await bench.ahead.opened()
    assert opened is not None
    assert opened.foreseen == bench.seen
    assert opened.elapsed_ms > 0
    (submission,) = bench.stage.opened_ahead
    assert len(submission.prompt) == bench.seen.history_tokens
    assert submission.emitted == (LISTEN,)
    await settled()
    assert (list(bench.stage.streams), bench.spare.free) == (["s/1/2"], 1)
    assert await bench.ahead.opened() is None, "told once"
    # It holds its prompt and nothing of the token that was sampled.
    rest = (*(Ids((k,)) for k in (0, 1)),)
    await bench.stream.extend(6, bench.seen.history_tokens, rest, prefill_rules(bench.facts))
    await bench.stream.close()
    assert not bench.stage.streams


@pytest.mark.parametrize(
    "reason", ["switched off", "no seat", "no stream", "nothing foreseen", "under way"]
)
async def test_nothing_is_opened_without_need_or_room(reason: str) -> None:
    bench = Bench(spare=0 if reason == "no seat" else 1, enabled=reason != "switched off")
    if reason != "no stream":
        await bench.opened_before()
    talk = talked(bench.facts, 2) if reason == "nothing foreseen" else bench.talk
    bench.ahead.start(talk)
    if reason == "under way":
        bench.ahead.start(talk)
    opened = await bench.ahead.opened()
    await settled()
    assert (opened is not None) == (reason == "under way")
    assert len(bench.stage.opened_ahead) == (reason == "under way")
    assert bench.stream.live == (reason != "no stream")
    await bench.ahead.close()
    await bench.stream.close()
    assert not bench.stage.streams


@pytest.mark.parametrize("fault", [f for f in StageFault if f is not StageFault.GONE])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_failure_leaves_the_old_stream_and_its_seat(
    fault: StageFault, after: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bench = Bench()
    await bench.opened_before()
    bench.stage.fail(5, fault, after=after)
    with caplog.at_level(logging.WARNING):
        bench.ahead.start(bench.talk)
        assert await bench.ahead.opened() is None
    assert "no stream opened ahead" in caplog.text
    await settled()
    assert bench.stream.live
    assert "s/1/2" not in bench.stage.streams
    assert bench.spare.free == 1


async def test_a_stage_that_dies_meanwhile_takes_both_streams() -> None:
    bench = Bench()
    await bench.opened_before()
    bench.stage.fail(5, StageFault.GONE, after=True)
    bench.ahead.start(bench.talk)
    assert await bench.ahead.opened() is None
    await bench.stage.health()
    assert not bench.stream.live
    await settled()
    assert bench.spare.free == 1


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("waiting", [False, True], ids=["between units", "a unit waits"])
async def test_giving_up_leaves_no_stream_behind(after: bool, waiting: bool) -> None:
    bench = Bench()
    await bench.opened_before()
    pause = bench.stage.pause(5, after=after)
    bench.ahead.start(bench.talk)
    await pause.reached.wait()
    assert bench.spare.free == 0
    if waiting:
        unit = asyncio.create_task(bench.ahead.opened())
        await asyncio.sleep(0)
        unit.cancel()
        await asyncio.gather(unit, return_exceptions=True)
    await bench.ahead.close()
    await bench.stream.close()
    assert (len(bench.stage.streams), bench.spare.free) == (0, 1)


async def test_a_session_that_closes_between_units_holds_nothing_of_it() -> None:
    bench = Bench()
    await bench.opened_before()
    bench.ahead.start(bench.talk)
    await bench.ahead.close()
    await bench.stream.close()
    assert (len(bench.stage.streams), bench.spare.free) == (0, 1)


async def test_beside_nothing_nothing_is_opened() -> None:
    bench = Bench()
    with pytest.raises(StageError) as refused:
        await bench.stream.open_beside(5, (Ids((0,)),), prefill_rules(bench.facts))
    assert refused.value.fault is StageFault.REFUSED


def test_the_plan_that_extends_fits_no_slide() -> None:
    bench = Bench()
    assert not bench.seen.fits(Planned(Extend(1, 14), EMPTY_WINDOW), 14)
