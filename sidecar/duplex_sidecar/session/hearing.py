"""The session's audio encoder: fed once a unit, restored from recorded PCM after a loss.

Committed rows are never encoded again. What a restore replays is the PCM since the encoder's last
reset, and only to bring its state back; the rows of that replay are discarded.
"""

import asyncio
from collections.abc import Awaitable, Callable

from duplex_sidecar.framing.append import Append
from duplex_sidecar.model.minicpmo45.constants import FIRST_CHUNK_SAMPLES, UNIT_SAMPLES
from duplex_sidecar.session.stages import alone_at
from duplex_sidecar.session.streams import LOST
from duplex_sidecar.stages.envelope import EncoderClose, EncoderFeed, EncoderOpen, EncoderRows
from duplex_sidecar.stages.errors import StageError
from duplex_sidecar.stages.interface import EncoderStage
from duplex_sidecar.telemetry.names import StageName

SAMPLE_BYTES = 2
FIRST_PAD_SAMPLES = FIRST_CHUNK_SAMPLES - UNIT_SAMPLES
MAX_TRIES = 3

PcmOfUnits = Callable[[int, int], Awaitable[list[bytes]]]
"""Encoder input (s16le) of the units first..last, both included, from the ledger."""


def first_unit_needed(mark_samples: int) -> int:
    """The oldest unit whose PCM a restore from `mark_samples` replays."""
    return max(1, mark_samples // UNIT_SAMPLES)


def cut_at_mark(pcm: bytes, mark_samples: int) -> bytes:
    """Encoder input from `mark_samples` on; `pcm` begins with the unit that holds it."""
    unit = first_unit_needed(mark_samples)
    begin = 0 if unit == 1 else FIRST_PAD_SAMPLES + UNIT_SAMPLES * (unit - 1)
    return pcm[SAMPLE_BYTES * (mark_samples - begin) :]


class EncoderDriver:
    """One session's encoder state, wherever its process stands."""

    def __init__(
        self, stage: EncoderStage, session: str, pcm_of_units: PcmOfUnits, redo_gate: asyncio.Lock
    ) -> None:
        """redo_gate: see `RedoGates`."""
        self._stage = stage
        self._redo_gate = redo_gate
        self._session = session
        self._pcm_of_units = pcm_of_units
        self._generation = 0
        """Of the stage that holds the present state; 0: none does."""
        self._opened = 0
        """Of the stage that this session was last opened at."""
        self._mark_samples = 0
        self._through = 0

    def _resume(self, through: int, mark_samples: int) -> None:
        """The state to restore before the next feed: all units up to `through` were heard."""
        self._generation = 0
        self._through = through
        self._mark_samples = mark_samples

    def adopt(self, other: "EncoderDriver") -> None:
        """Go on with what another driver of the same session has made the stage hold."""
        self._generation, self._opened = other._generation, other._opened
        self._through, self._mark_samples = other._through, other._mark_samples

    async def follow(self, through: int, mark_samples: int) -> None:
        """Bring the state to where it is after unit `through`, which another replica encoded: the
        units since the last call are heard and their rows dropped. mark_samples: as recorded with
        that unit. Raises StageError, after which the state is restored as a whole."""
        first = self._through + 1
        known = self._generation and self._generation == self._stage.generation
        if not known or through < self._through:
            self._resume(through, mark_samples)
            await self._restore_if_lost()
        elif first <= through:
            pieces = await self._pcm_of_units(first, through)
            if not all(pieces):  # too far behind: they are trimmed already
                self._resume(through, mark_samples)
                await self._restore_if_lost()
                return
            try:
                await self._stage.feed(self._replay(through, b"".join(pieces)))
            except BaseException:
                self._resume(through, mark_samples)
                raise
            self._through, self._mark_samples = through, mark_samples

    async def feed(self, append: Append) -> EncoderRows:
        """Rows of the next append. Waits for a restarting encoder and restores the session's state
        first. Raises StageError: undecodable (a frame; nothing has changed), refused, or gone."""
        request = EncoderFeed(
            session=self._session,
            unit=append.seq,
            pcm_s16le=append.pcm_s16le,
            frames=tuple(frame.data for frame in append.frames),
            high_resolution=append.high_resolution,
            discard=False,
        )
        for attempt in range(1, MAX_TRIES + 1):
            try:
                rows = await (self._feed(request) if attempt == 1 else self._feed_alone(request))
                break
            except StageError as error:
                if error.fault not in LOST or attempt == MAX_TRIES:
                    raise
                self._generation = 0
        else:
            raise AssertionError("the loop ends by break or raise")
        self._through = append.seq
        self._mark_samples = rows.reset_mark_samples
        return rows

    async def _feed(self, request: EncoderFeed) -> EncoderRows:
        await self._restore_if_lost()
        return await self._stage.feed(request)

    async def _feed_alone(self, request: EncoderFeed) -> EncoderRows:
        """The restore has its turn, too: another one's redo that ends the stage would cost it a
        try. What it needs of the ledger is read before, so nobody waits in the gate for that."""
        heard = await self._heard()
        async with alone_at(self._stage, StageName.ENCODER, self._redo_gate):
            await self._restore(heard)
            return await self._stage.feed(request)

    async def _restore_if_lost(self) -> None:
        if self._stage.generation != self._generation:
            await self._restore(await self._heard())

    async def _heard(self) -> bytes:
        """Encoder input (s16le) from the mark to the end of the newest unit."""
        if not self._through:
            return b""
        first = first_unit_needed(self._mark_samples)
        pcm = b"".join(await self._pcm_of_units(first, self._through))
        return cut_at_mark(pcm, self._mark_samples)

    async def _restore(self, heard: bytes) -> None:
        generation = self._stage.generation
        self._opened = generation
        await self._stage.open(EncoderOpen(self._session, self._mark_samples))
        if self._through:
            await self._stage.feed(self._replay(self._through, heard))
        self._generation = generation

    def _replay(self, unit: int, pcm: bytes) -> EncoderFeed:
        """What only changes the state; of its rows nobody hears."""
        return EncoderFeed(
            session=self._session,
            unit=unit,
            pcm_s16le=pcm,
            frames=(),
            high_resolution=False,
            discard=True,
        )

    async def close(self) -> None:
        """Let the stage forget the session, also when its state was not restored. Raises
        StageError."""
        if self._opened and self._opened == self._stage.generation:
            await self._stage.close(EncoderClose(self._session))
