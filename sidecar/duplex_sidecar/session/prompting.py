"""From a plan to what the Thinker is fed: an extension, or a whole prompt from the same records.

Slide, truncation, eviction, engine restart, replica restart and move all come through
`whole_prompt`; what differs is where the history is read: from memory while the window holds it,
else from the ledger.
"""

from collections.abc import Awaitable, Callable, Iterable

from duplex_api.window import WindowMode
from duplex_sidecar.framing.append import Append
from duplex_sidecar.ledger.records import kept_tokens
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.model.minicpmo45.context import MEDIA_LENGTHS
from duplex_sidecar.model.minicpmo45.decode import answer_facts
from duplex_sidecar.model.minicpmo45.truncation import left_of
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.session.conversation import Conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.rows import RetainedUnits, StoredRows, decode_rows, history_of
from duplex_sidecar.stages.envelope import ThinkerPart
from duplex_sidecar.window.parts import HistoryUnit, UnitInput
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.render import (
    history_parts,
    render_append,
    render_prompt,
    require_length,
)
from duplex_sidecar.window.state import Plan, RebuildCause, WindowAppend, WindowState

LoadSession = Callable[[], Awaitable[LoadedSession]]


def plan_append(
    facts: SessionFacts, before: Conversation, append: Append, rebuild: RebuildCause | None
) -> tuple[Plan, WindowState]:
    """The plan of an append after the last committed unit, and the window after its admission."""
    return plan_after(facts, before, append.reservation.slots, rebuild)


def plan_after(
    facts: SessionFacts, before: Conversation, update_tokens: int, rebuild: RebuildCause | None
) -> tuple[Plan, WindowState]:
    """The same for any append that takes so many positions."""
    completed_ids = before.completed.ids if before.completed else ()
    return plan(
        before.window,
        WindowAppend(
            seq=before.seq + 1,
            update_tokens=update_tokens,
            completed_ids=completed_ids,
            completed_ends=before.completed_ends,
        ),
        facts.policy,
        facts.layout,
        facts.limits,
        facts.directive(rebuild),
    )


def history_seqs(facts: SessionFacts, window: WindowState, through: int) -> list[int]:
    """Which units a prompt renders, the newest of them `through`."""
    if facts.policy.mode is WindowMode.OFF:
        return list(range(1, through + 1))
    return [unit.seq for unit in window.units]


def unit_input(append: Append) -> UnitInput:
    return UnitInput(seq=append.seq, chunks=append.chunks, blocks=append.reservation.blocks)


class Prompter:
    """Renders for one session and finds the rows that a prompt names."""

    def __init__(self, facts: SessionFacts, retained: RetainedUnits, load: LoadSession) -> None:
        self._facts = facts
        self._retained = retained
        self._load = load

    @property
    def retained(self) -> RetainedUnits:
        return self._retained

    def extension(
        self, append: Append, completed: HistoryUnit | None, expected_tokens: int
    ) -> tuple[ThinkerPart, ...]:
        """What extends the stream: the closure of the unit before (None: the stream holds it closed
        already), then the append. Raises RenderError when its length is not the expected one."""
        parts = render_append(
            unit_input(append),
            completed,
            self._facts.layout_ids,
            MEDIA_LENGTHS,
            expected_tokens,
        )
        return self._retained.resolve(parts)

    def history(
        self, window: WindowState, through: int, expected_tokens: int
    ) -> tuple[ThinkerPart, ...]:
        """Context and closed units up to `through` alone, for a stream that is opened before its
        next append; from memory. Raises RenderError, RowsMissing."""
        parts = history_parts(
            self._facts.prompt,
            window.previous_ids,
            self._retained.history(history_seqs(self._facts, window, through)),
            self._facts.layout_ids,
            MEDIA_LENGTHS,
        )
        require_length(parts, expected_tokens)
        return self._retained.resolve(parts)

    async def whole_prompt(
        self, window: WindowState, pending: UnitInput
    ) -> tuple[ThinkerPart, ...]:
        """The prompt of a fresh stream whose last append is `pending`; `window` is the state after
        that append's admission. Raises RenderError, RowsMissing, LedgerError."""
        source = self._retained
        wanted = history_seqs(self._facts, window, pending.seq - 1)
        if not source.holds(wanted):
            source = self._with_ledger(wanted, await self._load(), pending.seq)
        parts = render_prompt(
            self._facts.prompt,
            window.previous_ids,
            source.history(wanted),
            pending,
            self._facts.layout_ids,
            MEDIA_LENGTHS,
            window.prompt_tokens,
        )
        return source.resolve(parts)

    def _with_ledger(self, seqs: list[int], loaded: LoadedSession, pending: int) -> RetainedUnits:
        """The named units out of the ledger, and the pending unit's rows from memory."""
        found = RetainedUnits(self._retained.reference)
        for unit, rows in history_from_ledger(loaded, seqs, self._facts.vocabulary):
            found.put_rows(unit.input.seq, rows)
            found.complete(unit)
        found.put_rows(pending, self._retained.rows_of(pending))
        return found


def history_from_ledger(
    loaded: LoadedSession, seqs: Iterable[int], vocabulary: Vocabulary
) -> list[tuple[HistoryUnit, StoredRows]]:
    """Committed units of a loaded session, in the form that is rendered, with their rows: what was
    taken back of them is not there."""
    wanted = set(seqs)
    kept = kept_tokens(loaded.entries)
    found: list[tuple[HistoryUnit, StoredRows]] = []
    for record in loaded.committed:
        if record.seq not in wanted:
            continue
        rows = decode_rows(loaded.media[record.seq].rows)
        facts = answer_facts(record.token_ids, vocabulary)
        left = left_of(facts.content_ids, facts.terminator, kept.get(record.seq), vocabulary)
        unit = history_of(record.seq, rows, left.ids, left.terminator)
        found.append((unit, rows))
    return found
