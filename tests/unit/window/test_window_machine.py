"""Random sessions: planner, records and renderer always agree.

The machine keeps what a session would keep, records of admitted appends, and what an engine would:
the positions of the stream. Every prompt that a plan implies is rendered from the records and
measured, every state is counted again from them, and what leaves the window is checked against the
policy's own words. However a stream came to be where it is, one that is made anew is the same:
after a preemption (the engine computes what it held once more), and when it is lost between the
plan and its commit (the append is admitted again).
"""

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.window.parts import (
    BlockKind,
    HistoryUnit,
    LayoutIds,
    MediaLengths,
    MediaPart,
    PromptContext,
    PromptPart,
    UnitInput,
    parts_length,
)
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.render import (
    append_parts,
    prompt_parts,
    render_append,
    render_prompt,
    unit_parts,
)
from duplex_sidecar.window.restate import restate
from duplex_sidecar.window.state import (
    EMPTY_WINDOW,
    Directive,
    Extend,
    Overflow,
    Plan,
    PlanLimits,
    Rebuild,
    RebuildCause,
    WindowAppend,
    WindowLayout,
    WindowState,
)

pytestmark = pytest.mark.unit

IDS = LayoutIds(1, 2, 11, 1, 0, 12, 13, 14, 15)
LENGTHS = MediaLengths(audio_chunk=10, image_block=64)
SPECIAL = frozenset(range(20))
LISTEN, CHUNK_EOS = 3, 8

policies = st.builds(
    lambda mode, low, gap, previous, count: WindowPolicy(mode, low + gap, low, previous, count),
    st.sampled_from(WindowMode),
    st.integers(1, 200),
    st.integers(1, 120),
    st.integers(1, 12),
    st.integers(1, 5),
)
contexts = st.builds(
    PromptContext,
    st.lists(st.integers(16, 99), max_size=5).map(tuple),
    st.integers(0, 4),
    st.lists(st.integers(16, 99), max_size=3).map(tuple),
    st.lists(st.integers(70, 79), max_size=3).map(tuple),
)
directives = st.builds(
    Directive,
    rebuild=st.sampled_from((None, None, None, RebuildCause.MOVE, RebuildCause.EVICTION)),
    hysteresis_units=st.integers(1, 3),
    boundary=st.sampled_from(WindowBoundary),
    boundary_limit_units=st.integers(0, 4),
)
losses = st.sampled_from(
    (RebuildCause.EVICTION, RebuildCause.ENGINE_RESTART, RebuildCause.REPLICA_RESTART)
)
answers = st.lists(st.integers(0, 60), max_size=6).map(tuple)
blocks = st.lists(st.sampled_from(BlockKind), max_size=3).map(tuple)
Position = int | tuple[str, int, int, int]
"""An id, or which row of which audio chunk or image block of which unit."""


def positions_of(parts: Sequence[PromptPart]) -> list[Position]:
    placed: list[Position] = []
    for part in parts:
        if isinstance(part, MediaPart):
            placed += [(part.kind, part.unit, part.index, row) for row in range(part.length)]
        else:
            placed += part.ids
    return placed


class WindowSessions(RuleBasedStateMachine):
    @initialize(policy=policies, context=contexts, limit=st.none() | st.integers(60, 600))
    def open_session(self, policy: WindowPolicy, context: PromptContext, limit: int | None) -> None:
        self.policy, self.context, self.limits = policy, context, PlanLimits(limit)
        prefix = len(context.prefix_ids) + context.reference_positions
        self.layout = WindowLayout(
            prefix + len(context.suffix_ids),
            prefix,
            len(context.suffix_ids),
            len(context.marker_ids),
            SPECIAL,
        )
        self.state: WindowState = EMPTY_WINDOW
        self.history: list[HistoryUnit] = []
        self.said: list[int] = []
        self.pending: UnitInput | None = None
        self.stream: list[Position] | None = None

    @rule(
        answer=answers,
        chunks=st.integers(1, 3),
        frames=blocks,
        ends=st.sampled_from(WindowBoundary),
        directive=directives,
    )
    def append(
        self,
        answer: tuple[int, ...],
        chunks: int,
        frames: tuple[BlockKind, ...],
        ends: WindowBoundary,
        directive: Directive,
    ) -> None:
        unit, append = self.next_append(answer, chunks, frames, ends)
        if self.pending is not None and self.stream is None:
            directive = msgspec.structs.replace(directive, rebuild=RebuildCause.TRUNCATION)
        before = msgspec.msgpack.encode(self.state)
        decision, after = self.planned(append, directive)
        assert (decision, after) == self.planned(append, directive)
        assert msgspec.msgpack.encode(self.state) == before
        packed = msgspec.msgpack.encode((decision, after))
        assert msgspec.msgpack.decode(packed, type=tuple[Plan, WindowState]) == (decision, after)
        if isinstance(decision, Overflow):
            assert after is self.state
            assert self.limits.max_model_tokens is not None
            assert decision.projected_tokens + 1 > self.limits.max_model_tokens
            return
        self.admit(decision, after, unit, answer, directive)

    @precondition(lambda self: self.pending is None or self.stream is not None)
    @rule(
        answer=answers,
        chunks=st.integers(1, 3),
        frames=blocks,
        ends=st.sampled_from(WindowBoundary),
        directive=directives,
        loss=losses,
        times=st.integers(1, 2),
    )
    def stream_is_lost_between_plan_and_commit(
        self,
        answer: tuple[int, ...],
        chunks: int,
        frames: tuple[BlockKind, ...],
        ends: WindowBoundary,
        directive: Directive,
        loss: RebuildCause,
        times: int,
    ) -> None:
        """The append is admitted again, from the state that counts: that before it. It drops what
        it would have dropped, and the new stream holds what the lost one would have held."""
        unit, append = self.next_append(answer, chunks, frames, ends)
        first, state = self.planned(append, directive)
        again = msgspec.structs.replace(directive, rebuild=loss)
        for _ in range(times):
            second, after = self.planned(append, again)
            assert after == state
        if isinstance(first, Overflow) or isinstance(second, Overflow):
            assert isinstance(first, Overflow)
            assert isinstance(second, Overflow)
            assert first.projected_tokens == second.projected_tokens
            return
        assert isinstance(second, Rebuild)
        assert second.cause is loss
        if isinstance(first, Rebuild):
            assert msgspec.structs.replace(first, cause=loss) == second
        else:
            assert (second.drop_units, second.replacement_tokens) == (0, first.prompt_tokens)
        lost = self.stream_after(first, unit, answer)
        self.admit(second, after, unit, answer, again)
        assert self.stream == lost

    @precondition(lambda self: self.stream is not None)
    @rule()
    def preemption(self) -> None:
        """The engine gives the blocks away and computes its own request once more. Nobody plans:
        the records say of every position what it was."""
        assert self.pending is not None
        whole = prompt_parts(
            self.context, self.state.previous_ids, self.history, self.pending, IDS, LENGTHS
        )
        assert positions_of(whole) == self.stream
        assert len(self.stream) == self.state.prompt_tokens

    def next_append(
        self,
        answer: tuple[int, ...],
        chunks: int,
        frames: tuple[BlockKind, ...],
        ends: WindowBoundary,
    ) -> tuple[UnitInput, WindowAppend]:
        seq = self.pending.seq + 1 if self.pending else 1
        unit = UnitInput(seq, chunks, frames)
        update = parts_length(append_parts(unit, None, IDS, LENGTHS))
        update += 2 if self.pending else self.layout.context_tokens
        return unit, WindowAppend(seq, update, answer if self.pending else (), ends)

    def stream_after(
        self,
        decision: Extend | Rebuild,
        unit: UnitInput,
        answer: tuple[int, ...],
    ) -> list[Position]:
        """What the stream holds once that plan is carried out."""
        history = list(self.history)
        if self.pending is not None:
            history.append(HistoryUnit(self.pending, answer, CHUNK_EOS))
        if isinstance(decision, Extend) and self.pending is not None:
            assert self.stream is not None
            added = append_parts(unit, history[-1], IDS, LENGTHS)
            return [*self.stream, *answer, *positions_of(added)]
        previous_ids: tuple[int, ...] = ()
        if isinstance(decision, Rebuild):
            del history[: decision.drop_units]
            previous_ids = decision.previous_ids
        return positions_of(prompt_parts(self.context, previous_ids, history, unit, IDS, LENGTHS))

    def planned(self, append: WindowAppend, directive: Directive) -> tuple[Plan, WindowState]:
        return plan(self.state, append, self.policy, self.layout, self.limits, directive)

    def admit(
        self,
        decision: Extend | Rebuild,
        after: WindowState,
        unit: UnitInput,
        answer: tuple[int, ...],
        directive: Directive,
    ) -> None:
        self.stream = self.stream_after(decision, unit, answer)
        if self.pending is not None:
            self.history.append(HistoryUnit(self.pending, answer, CHUNK_EOS))
        if isinstance(decision, Rebuild):
            self.drop(decision, after, directive)
        elif self.pending is not None:
            update = decision.prompt_tokens - decision.position_tokens
            render_append(unit, self.history[-1], IDS, LENGTHS, update)
        # Whatever the plan, a fresh stream would get exactly the planned number of positions.
        render_prompt(
            self.context, after.previous_ids, self.history, unit, IDS, LENGTHS, after.prompt_tokens
        )
        if unit.seq > 1:  # before that no unit has ended, so nothing says where one begins
            again = restate(after, self.policy, self.layout, self.history, unit, IDS, LENGTHS)
            assert again == after
        self.state, self.pending = after, unit
        self.check_bounds(decision, directive)

    def drop(self, decision: Rebuild, after: WindowState, directive: Directive) -> None:
        dropped = self.history[: decision.drop_units]
        del self.history[: decision.drop_units]
        if not dropped:
            assert decision.cause is not RebuildCause.SLIDE
            assert decision.dropped_through_seq is None
            return
        assert decision.dropped_through_seq == dropped[-1].input.seq
        if directive.hysteresis_units == 1 and directive.boundary is WindowBoundary.UNIT:
            self.check_least(after, dropped[-1])
        for unit in dropped:
            self.said += [id_ for id_ in unit.ids if id_ not in SPECIAL]
        if self.policy.mode is WindowMode.CONTEXT:
            assert decision.previous_ids == tuple(
                self.said[-self.policy.context_previous_max_tokens :]
            )
        else:
            assert decision.previous_ids == ()

    def check_least(self, after: WindowState, last: HistoryUnit) -> None:
        """No unit leaves that could have stayed."""
        if self.policy.mode is WindowMode.CONTEXT:
            assert len(after.units) == self.policy.context_max_units
        else:
            tokens = parts_length(unit_parts(last, IDS, LENGTHS))
            assert after.prompt_tokens + tokens > self.policy.basic_low_tokens

    def check_bounds(self, decision: Extend | Rebuild, directive: Directive) -> None:
        units = len(self.state.units)
        if self.policy.mode is WindowMode.OFF:
            assert self.state.units == ()
        elif self.policy.mode is WindowMode.CONTEXT:
            assert units <= self.policy.context_max_units
        else:
            fits = self.state.prompt_tokens <= self.policy.basic_high_tokens
            assert fits or not units
            if isinstance(decision, Rebuild) and decision.drop_units:
                assert not units or self.state.prompt_tokens <= self.policy.basic_low_tokens
        if isinstance(decision, Rebuild) and decision.drop_units:
            assert decision.drop_units >= directive.hysteresis_units or not units

    @precondition(lambda self: self.history)
    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        """A barge-in: from some retained unit on nothing was heard, of that one a part was."""
        at = data.draw(st.integers(0, len(self.history) - 1))
        kept = data.draw(st.integers(0, len(self.history[at].ids)))
        cut = HistoryUnit(self.history[at].input, self.history[at].ids[:kept], CHUNK_EOS)
        unheard = [HistoryUnit(unit.input, (), LISTEN) for unit in self.history[at + 1 :]]
        self.history[at:] = [cut, *unheard]
        assert self.pending is not None
        self.stream = None
        self.state = restate(
            self.state, self.policy, self.layout, self.history, self.pending, IDS, LENGTHS
        )

    @invariant()
    def units_are_the_records(self) -> None:
        if not hasattr(self, "state") or self.policy.mode is WindowMode.OFF:
            return
        assert [unit.seq for unit in self.state.units] == [u.input.seq for u in self.history]
        assert self.state.unit_tokens == sum(unit.tokens for unit in self.state.units)


WindowSessions.TestCase.settings = settings(max_examples=80, stateful_step_count=20, deadline=None)
TestWindowSessions = WindowSessions.TestCase
