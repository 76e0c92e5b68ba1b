"""Carries out what a client says of a reply, between two units: one write to the ledger, then the
streams. What it makes of the conversation is decided in `session.cuts`.

The Thinker's stream that holds what was taken back is never patched: the next append is planned as
a rebuild (`Conversation.prompt_changed`) and rendered from the same records as any other.
"""

from msgspec import structs

from duplex_api.window import WindowMode
from duplex_sidecar.ledger.client_calls import Cut
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.protocol.commands import CancelReply, TruncateReply
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Sequenced, encode_sequenced
from duplex_sidecar.session import cuts
from duplex_sidecar.session.conversation import (
    Conversation,
    Speech,
    encode_conversation,
    encode_speech,
)
from duplex_sidecar.session.durable import DurableSession
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.prompting import history_from_ledger
from duplex_sidecar.session.rows import RetainedUnits
from duplex_sidecar.session.speaking import Speaker
from duplex_sidecar.session.thinking import ThinkerDriver
from duplex_sidecar.window.parts import HistoryUnit


class ReplyCutter:
    """Of one session. Holds no state of the conversation: takes snapshots, returns the next ones.
    Not to be used while a unit is under way."""

    def __init__(
        self,
        facts: SessionFacts,
        retained: RetainedUnits,
        durable: DurableSession,
        thinker: ThinkerDriver,
        speaker: Speaker,
    ) -> None:
        self._facts = facts
        self._retained = retained
        self._durable = durable
        self._thinker = thinker
        self._speaker = speaker

    async def cancel(
        self, known: Conversation, speech: Speech, command: CancelReply, client_applied: str
    ) -> tuple[Conversation, Speech, list[Sequenced]]:
        """Stop the reply under way. client_applied: see `client_calls.Cut`. Raises ClientError
        (nothing has changed), LedgerError."""
        return await self._carry_out(
            speech, cuts.cancelled(known, speech, command.turn), client_applied
        )

    async def truncate(
        self, known: Conversation, speech: Speech, command: TruncateReply, client_applied: str
    ) -> tuple[Conversation, Speech, list[Sequenced]]:
        """Take back what was not heard of a reply. Raises as `cancel` does."""
        units = cuts.units_of(speech, command.turn)
        taken = cuts.taken_back(
            units,
            cuts.said_units(await self._durable.entries()),
            command.heard_ms,
            self._facts.layout_ids.audio_slot,
            self._facts.vocabulary,
        )
        closed = await self._closed(known, taken.first)
        cut = cuts.truncated(self._facts, known, speech, command.heard_ms, taken, closed)
        return await self._carry_out(speech, cut, client_applied)

    async def _closed(self, known: Conversation, first: int | None) -> list[HistoryUnit]:
        """The units before the last one that the next prompt shows. Raises ClientError when `first`
        is not among them."""
        if self._facts.policy.mode is WindowMode.OFF:
            loaded = await self._durable.load()
            wanted = range(1, known.seq)
            return [unit for unit, _ in history_from_ledger(loaded, wanted, self._facts.vocabulary)]
        seqs = [unit.seq for unit in known.window.units]
        if first is not None and first not in (*seqs, known.seq):
            raise ClientError(ErrorCode.PLAYBACK_ACK_TOO_LATE, param="audio_end_ms")
        return self._retained.history(seqs)

    async def _carry_out(
        self, before: Speech, cut: cuts.CutReply, client_applied: str
    ) -> tuple[Conversation, Speech, list[Sequenced]]:
        first = before.last_sequence + 1
        events = [Sequenced(number, body) for number, body in enumerate(cut.bodies, first)]
        speech = structs.replace(cut.speech, last_sequence=events[-1].sequence)
        await self._durable.cut(
            Cut(
                draft=cut.draft,
                state=encode_conversation(cut.conversation),
                voice_state=encode_speech(speech),
                events=JournalBatch(
                    unit=cut.conversation.seq,
                    first_seq=first,
                    events=tuple(encode_sequenced(event) for event in events),
                ),
                client_applied=client_applied,
            )
        )
        if cut.stops:
            self._speaker.stop()
        if cut.changed:
            if self._facts.policy.mode is not WindowMode.OFF:
                for unit in cut.changed:
                    self._retained.complete(unit)
            await self._thinker.prompt_changed(cut.conversation)
        return cut.conversation, speech, events
