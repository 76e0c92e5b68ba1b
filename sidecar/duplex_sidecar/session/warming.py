"""Streams of a session that another replica runs: made ready here, and kept ready, from its ledger.

The Thinker's stream is given context and closed units as with a rebuild ahead, and each unit that
the owner commits meanwhile; the encoder hears the same PCM. What is fed is rendered from the
records by the planner and renderer themselves, and the unit that comes first here is compared with
it as with any stream opened ahead: being wrong costs time, never a token.
"""

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.session.ahead import OpenedAhead, foresee_rebuild, prefill_rules
from duplex_sidecar.session.conversation import Conversation, decode_conversation
from duplex_sidecar.session.facts import SessionFacts
from duplex_sidecar.session.hearing import EncoderDriver
from duplex_sidecar.session.prompting import Prompter, history_from_ledger, history_seqs
from duplex_sidecar.session.rows import RetainedUnits, decode_reference
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.session.streams import ThinkerStream, thinker_stream
from duplex_sidecar.stages.envelope import Ids, ThinkerPart
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.window.state import RebuildCause


@dataclass(frozen=True)
class WarmStreams:
    """For the driver that takes the session up. ahead: what the Thinker's stream holds where it was
    filled ahead; None where it has answered the newest unit itself."""

    encoder: EncoderDriver
    thinker: ThinkerStream
    ahead: OpenedAhead | None


class Warmer:
    """One session's streams, behind its owner by no more than the ledger is."""

    def __init__(self, facts: SessionFacts, stages: StageSet, fence: int) -> None:
        """fence: under which the session is to run here; it names the streams."""
        self._facts = facts
        self._stream = thinker_stream(stages, facts.session, fence)
        self._encoder = EncoderDriver(
            stages.encoder, facts.session, self._pcm_of_units, stages.redo_gates.encoder
        )
        self._loaded: LoadedSession | None = None
        self._held: tuple[ThinkerPart, ...] = ()
        """What the Thinker's stream was fed."""
        self._ahead: OpenedAhead | None = None
        self._following = asyncio.Lock()
        self._taken = False
        self._conversation: Conversation | None = None
        """What is in the streams: an answer may be cut after it was committed."""
        self._index = -1
        """Of the chain's end when it was looked at last."""
        self.seq = -1
        """Newest unit that is in the streams; -1: none are open."""

    def behind(self, head: Head) -> bool:
        """Whether there may be something to follow."""
        more = head.open_seq is None and head.index > self._index
        return more or head.committed_seq > self.seq

    async def follow(self, loaded: LoadedSession) -> None:
        """Up to its last committed unit. May be called again while one is under way. Raises
        StageError, RenderError, RowsMissing, after which the next call begins anew."""
        async with self._following:
            conversation = decode_conversation(loaded.state)
            if self._taken or conversation.seq < self.seq or conversation == self._conversation:
                self._index = max(self._index, loaded.head.index)
                return
            self._loaded = loaded
            try:
                outcomes = await asyncio.gather(
                    self._encoder.follow(conversation.seq, conversation.encoder_mark_samples),
                    self._fill(loaded),
                    return_exceptions=True,  # neither goes on when this is over
                )
            finally:
                self._loaded = None
            for outcome in outcomes:
                if outcome is not None:
                    raise outcome
            self.seq, self._conversation = conversation.seq, conversation
            self._index = loaded.head.index

    def streams(self) -> WarmStreams:
        """For the taking; this one feeds them nothing any more."""
        self._taken = True
        return WarmStreams(self._encoder, self._stream, self._ahead)

    async def close(self) -> None:
        async with self._following:
            await self._stream.close()
            with contextlib.suppress(StageError):
                await self._encoder.close()

    async def _fill(self, loaded: LoadedSession) -> None:
        conversation = decode_conversation(loaded.state)
        foreseen = foresee_rebuild(self._facts, conversation, RebuildCause.MOVE)
        self._ahead = None
        if foreseen is None:
            # What it holds is of an earlier unit, and nobody would know.
            self._held = ()
            await self._stream.close()
            return
        blob = loaded.reference_rows
        retained = RetainedUnits(decode_reference(blob[0]) if blob else None)
        seqs = history_seqs(self._facts, foreseen.window, conversation.seq)
        for unit, rows in history_from_ledger(loaded, seqs, self._facts.vocabulary):
            retained.put_rows(unit.input.seq, rows)
            retained.complete(unit)

        async def load() -> LoadedSession:
            return loaded

        prompter = Prompter(self._facts, retained, load)
        parts = prompter.history(foreseen.window, conversation.seq, foreseen.history_tokens)
        started = time.perf_counter()
        more = remainder(self._held, parts) if self._stream.live else None
        held, self._held = positions_of(self._held), ()
        rules = prefill_rules(self._facts)
        if more is None:
            await self._stream.rebuild(conversation.seq, parts, rules)
        elif more:
            await self._stream.extend(conversation.seq, held, more, rules)
        self._held = parts
        self._ahead = OpenedAhead(foreseen, (time.perf_counter() - started) * 1000)

    async def _pcm_of_units(self, first: int, last: int) -> list[bytes]:
        assert self._loaded is not None  # asked for by `follow` alone
        return [self._loaded.media[seq].pcm for seq in range(first, last + 1)]


def positions_of(parts: Sequence[ThinkerPart]) -> int:
    """Positions of all parts."""
    return sum(len(p.ids) if isinstance(p, Ids) else p.rows.shape[0] for p in parts)


def remainder(
    held: Sequence[ThinkerPart], wanted: Sequence[ThinkerPart]
) -> tuple[ThinkerPart, ...] | None:
    """What is to be fed to a stream that holds `held` so that it holds `wanted`; None where it can
    not. Texts join, so the last one that is held may be a part of a longer one."""
    if not held:
        return None
    place = len(held) - 1
    if len(wanted) < len(held) or tuple(wanted[:place]) != tuple(held[:place]):
        return None
    last, at = held[place], wanted[place]
    rest = tuple(wanted[place + 1 :])
    if last == at:
        return rest
    if isinstance(last, Ids) and isinstance(at, Ids) and at.ids[: len(last.ids)] == last.ids:
        return (Ids(at.ids[len(last.ids) :]), *rest)
    return None
