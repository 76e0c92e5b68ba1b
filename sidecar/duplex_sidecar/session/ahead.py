"""Rebuild ahead: when the next plan is sure to slide, its stream is opened right after the commit.

That stream gets context and closed units, the one just answered included, while nobody waits; the
next append then only extends it. What is certain is decided by `foresee`, with the planner itself.
A stream that turns out to hold something else than the plan wants is replaced as any other one, so
that being wrong costs time, never a token.
"""

import asyncio
import logging
from dataclasses import dataclass

from duplex_api.window import WindowMode
from duplex_sidecar.model.minicpmo45.constants import CLOSURE_POSITIONS, UNIT_APPEND_POSITIONS
from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    UnitRules,
    encode_rules,
    initial_state,
)
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.prompting import Prompter, plan_after
from duplex_sidecar.session.recording import Planned, predicted_rebuild_ms
from duplex_sidecar.session.rows import RowsMissing
from duplex_sidecar.session.streams import ThinkerStream
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.telemetry.names import RebuildCause as TracedCause
from duplex_sidecar.telemetry.traces import SessionTrace
from duplex_sidecar.window.render import RenderError
from duplex_sidecar.window.state import Rebuild, RebuildCause, WindowState

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Foreseen:
    """The slide of the next append. window: after that append's admission, of which its length
    alone is a guess. history_tokens: positions of context and closed units; of the append's own
    reservation the closure is among them."""

    rebuild: Rebuild
    window: WindowState
    history_tokens: int

    def fits(self, planned: Planned, append_tokens: int) -> bool:
        """Whether the plan wants exactly the units and the text that were foreseen. append_tokens:
        that the append reserves. Mode `off` names no units: there the length tells whether
        something was taken back meanwhile."""
        return (
            isinstance(planned.plan, Rebuild)
            and planned.window.units == self.window.units
            and planned.window.previous_ids == self.window.previous_ids
            and planned.plan.replacement_tokens
            == self.history_tokens + append_tokens - CLOSURE_POSITIONS
        )


@dataclass(frozen=True)
class OpenedAhead:
    """A stream that was opened ahead and what it holds. elapsed_ms: what it took."""

    foreseen: Foreseen
    elapsed_ms: float


def foresee(facts: SessionFacts, after: Conversation) -> Foreseen | None:
    """The rebuild that the next append brings, whatever it is; None where it may not bring one.

    It is sure behind a truncation, and when the shortest append slides already. How much it drops
    may still depend on its length (mode `basic`): the last append's is taken for likely. Mode `off`
    has no rows at hand to render from.
    """
    if facts.policy.mode is WindowMode.OFF or after.seq == 0:
        return None
    if after.prompt_changed:
        return foresee_rebuild(facts, after, RebuildCause.TRUNCATION)
    shortest, _ = plan_after(facts, after, UNIT_APPEND_POSITIONS, None)
    if not isinstance(shortest, Rebuild):
        return None
    return foresee_rebuild(facts, after, None)


def foresee_rebuild(
    facts: SessionFacts, after: Conversation, cause: RebuildCause | None
) -> Foreseen | None:
    """The next append's rebuild, whatever it is: the slide that is due, or `cause`. None before the
    first unit, and where the model has no room for another one."""
    if after.seq == 0:
        return None
    start = after.window.open_start
    last = after.window.prompt_tokens - (facts.layout.context_tokens if start is None else start)
    likely = max(UNIT_APPEND_POSITIONS, last + CLOSURE_POSITIONS)
    rebuild, window = plan_after(facts, after, likely, cause)
    if not isinstance(rebuild, Rebuild):  # that append would not fit into the model any more
        return None
    history_tokens = rebuild.replacement_tokens - (likely - CLOSURE_POSITIONS)
    return Foreseen(rebuild, window, history_tokens)


class RebuildAhead:
    """The one stream that a session may be opening ahead."""

    def __init__(
        self,
        facts: SessionFacts,
        stream: ThinkerStream,
        prompter: Prompter,
        trace: SessionTrace,
        *,
        enabled: bool,
        taken_up: OpenedAhead | None = None,
    ) -> None:
        """taken_up: what the stream holds already, where this replica made it ready before the
        session was its own."""
        self._facts = facts
        self._stream = stream
        self._prompter = prompter
        self._trace = trace
        self._enabled = enabled
        self._opening: asyncio.Task[OpenedAhead | None] | None = None
        self._taken_up = taken_up

    @property
    def holds_taken_up(self) -> bool:
        """Whether the stream still holds what was made ready before the session was taken up."""
        return self._taken_up is not None

    def start(self, after: Conversation) -> None:
        """The unit of `after` is committed, or cut: open the next one's stream if it is sure to be
        needed and there is a seat for it. Returns at once."""
        if not self._enabled or not self._stream.live or self._opening is not None:
            return
        foreseen = foresee(self._facts, after)
        if foreseen is not None:
            self._opening = asyncio.create_task(self._open(after, foreseen))

    async def opened(self) -> OpenedAhead | None:
        """What the session's stream holds if it was opened ahead, None if it is the old one. Waits
        for one under way; each is told once."""
        taken_up, self._taken_up = self._taken_up, None
        if taken_up is not None:
            return taken_up
        opening, self._opening = self._opening, None
        return None if opening is None else await opening

    async def part(self) -> OpenedAhead | None:
        """The same for a session that stops here now: nothing is waited for."""
        if self._taken_up is None and self._opening is not None and not self._opening.done():
            await self.close()
        return await self.opened()

    async def close(self) -> None:
        """Give up one under way; its stream is closed with the session's."""
        self._taken_up = None
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)

    async def _open(self, after: Conversation, foreseen: Foreseen) -> OpenedAhead | None:
        rebuild = foreseen.rebuild
        try:
            parts = self._prompter.history(foreseen.window, after.seq, foreseen.history_tokens)
            if not self._stream.may_open_beside:
                return None
            with self._trace.rebuild(
                after.seq + 1,
                self._facts.policy.mode,
                TracedCause(rebuild.cause),
                rebuild.drop_units,
                rebuild.dropped_tokens,
                foreseen.history_tokens,
                predicted_rebuild_ms(after, foreseen.history_tokens),
                ahead=True,
            ) as span:
                await self._stream.open_beside(after.seq, parts, prefill_rules(self._facts))
        except (StageError, RenderError, RowsMissing) as error:
            # The old stream is as it was: the next append rebuilds as if nothing had been tried,
            # and meets the same trouble by name if it is still there.
            log.warning("no stream opened ahead: %s", type(error).__name__)
            return None
        return OpenedAhead(foreseen, span.elapsed_ms)


def prefill_rules(facts: SessionFacts) -> bytes:
    """Rules of a feed that only fills the cache: one token, which a stream drops in any case (it
    keeps all of an answer but the last) and nobody reads."""
    return encode_rules(
        UnitRules(
            policy=initial_state(seeded_text=False),
            is_speech=False,
            force_listen=False,
            max_tokens=None,
            sampling=GREEDY_SAMPLING,
            seed="",
            forced_ids=(facts.vocabulary.listen,),
        )
    )
