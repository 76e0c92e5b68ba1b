"""Random clients: what framing makes of their samples is what plain slicing of them makes.

At 16 kHz nothing is resampled, so the oracle is a list of samples and a few comparisons. The
machine takes the framer's place over (a snapshot, an accepted append's `resume`), and sends what
must be refused and leave no trace.
"""

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from duplex_sidecar.framing.append import Append, FramerState
from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.frames import Frame
from duplex_sidecar.framing.pcm import to_s16le
from duplex_sidecar.framing.units import FramerLimits, UnitFramer
from duplex_sidecar.model.minicpmo45.constants import MAX_FRAMES_PER_APPEND
from duplex_sidecar.model.minicpmo45.framing import FrameSize

pytestmark = pytest.mark.unit

RATE_HZ = 16_000
CONTEXT_POSITIONS = 20
LIMITS = FramerLimits(max_pending_bytes=400_000, max_pending_groups=3, max_state_frame_bytes=40)
NEXT_CODES = (FramingErrorCode.AUDIO_RATE_CHANGED, FramingErrorCode.AUDIO_RATE_UNSUPPORTED)


@dataclass(frozen=True)
class Run:
    """What the client said about its samples up to `end`."""

    end: int
    is_speech: bool
    force_listen: bool


@dataclass(frozen=True)
class Expected:
    begin: int
    end: int
    pcm: bytes
    frames: tuple[Frame, ...]
    groups: tuple[tuple[int, tuple[Frame, ...]], ...]
    is_speech: bool
    force_listen: bool
    final: bool


@dataclass
class Oracle:
    """samples: those that belong to no closed unit, from `begin` on."""

    begin: int = 0
    samples: np.ndarray = field(default_factory=lambda: np.zeros(0, np.float32))
    runs: list[Run] = field(default_factory=list)
    groups: deque[tuple[int, tuple[Frame, ...]]] = field(default_factory=deque)
    closed: deque[Expected] = field(default_factory=deque)
    next_seq: int = 1

    @property
    def received(self) -> int:
        return self.begin + len(self.samples)

    def push(self, samples: np.ndarray, frames: tuple[Frame, ...], run: Run) -> None:
        if frames:
            self.groups.append((self.received, frames))
        if len(samples):
            self.runs.append(run)
        self.samples = np.concatenate([self.samples, samples])
        while len(self.samples) >= RATE_HZ:
            self._close(RATE_HZ, final=False)

    def flush(self) -> int:
        if not len(self.samples):
            return 0
        self._close(len(self.samples), final=True)
        return 1

    def _close(self, count: int, *, final: bool) -> None:
        end = self.begin + count
        padded = np.zeros(RATE_HZ, np.float32)
        padded[:count] = self.samples[:count]
        # Runs lie end to end: one reaches into the unit if it ends behind its first sample and the
        # one before it ends ahead of its last.
        starts = [0, *(run.end for run in self.runs)]
        inside = [
            run
            for start, run in zip(starts, self.runs, strict=False)
            if run.end > self.begin and max(start, self.begin) < end
        ]
        own = self.groups and self.groups[0][0] < end
        frames = self.groups.popleft()[1] if own else ()
        self.closed.append(
            Expected(
                begin=self.begin,
                end=end,
                pcm=to_s16le(padded),
                frames=frames,
                groups=tuple(group for group in self.groups if group[0] < end),
                is_speech=any(run.is_speech for run in inside),
                force_listen=any(run.force_listen for run in inside),
                final=final,
            )
        )
        self.samples = self.samples[count:]
        self.begin = end

    def waiting_bytes(self) -> int:
        groups = sum(len(frame.data) for _, frames in self.groups for frame in frames)
        units = sum(len(u.pcm) + sum(len(f.data) for f in u.frames) for u in self.closed)
        return 4 * len(self.samples) + groups + units


class Framing(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.framer = UnitFramer(CONTEXT_POSITIONS, LIMITS)
        self.oracle = Oracle()
        self.accepted: Append | None = None
        self.pushed = 0

    # --- what a client does -----------------------------------------------------------------------

    @rule(is_speech=st.booleans(), force_listen=st.booleans(), frames=st.sampled_from((0, 1)))
    def push_to_the_units_end(self, is_speech: bool, force_listen: bool, frames: int) -> None:
        missing = RATE_HZ - len(self.oracle.samples)
        self.push(missing, frames, 2, is_speech, force_listen)

    @rule(frames=st.sampled_from((1, 2)))
    def push_frames_alone(self, frames: int) -> None:
        self.push(0, frames, 2, False, False)

    @rule(
        count=st.integers(0, 5_000) | st.sampled_from((0, 15_999, 16_000, 16_001, 33_000)),
        frames=st.sampled_from((0, 0, 0, 1, 2)),
        frame_bytes=st.sampled_from((2, 30)),
        is_speech=st.booleans(),
        force_listen=st.booleans(),
    )
    def push(
        self, count: int, frames: int, frame_bytes: int, is_speech: bool, force_listen: bool
    ) -> None:
        self.pushed += 1
        random = np.random.default_rng(self.pushed)
        samples = (random.random(count, np.float32) - 0.5) * np.float32(0.4)
        group = tuple(
            Frame(bytes([self.pushed % 256, n]) * (frame_bytes // 2), FrameSize(32, 24))
            for n in range(frames)
        )
        before = self.framer.snapshot()
        overflow = self._overflows(count, group)
        try:
            self.framer.push(
                samples, RATE_HZ, group, is_speech=is_speech, force_listen=force_listen
            )
        except FramingError as error:
            refused = error.code
        else:
            refused = None
            run = Run(self.oracle.received + count, is_speech, force_listen)
            self.oracle.push(samples, group, run)
        assert (refused is FramingErrorCode.INPUT_OVERFLOW) == overflow
        assert refused is None or self.framer.snapshot() == before

    def _overflows(self, count: int, group: tuple[Frame, ...]) -> bool:
        new = sum(len(frame.data) for frame in group)
        groups = self.oracle.groups
        behind = sum(len(f.data) for _, frames in list(groups)[1:] for f in frames)
        return (
            (bool(group) and len(groups) >= LIMITS.max_pending_groups)
            or (bool(group) and bool(groups) and behind + new > LIMITS.max_state_frame_bytes)
            or self.oracle.waiting_bytes() + 4 * count + new > LIMITS.max_pending_bytes
        )

    @rule()
    def flush(self) -> None:
        assert self.framer.flush() == self.oracle.flush()

    @precondition(lambda self: self.pushed % 5 == 4)
    @rule()
    def clear(self) -> None:
        self.framer.clear()
        received = self.oracle.received
        self.oracle = Oracle(begin=received, next_seq=self.oracle.next_seq)

    @rule(rate_hz=st.sampled_from((7_999, 8_000, 48_000, 192_001)))
    def push_what_is_refused(self, rate_hz: int) -> None:
        """Too many frames; no rate, or another one while samples wait."""
        before = self.framer.snapshot()
        if len(self.oracle.samples) or not 8_000 <= rate_hz <= 192_000:
            with pytest.raises(FramingError) as refused:
                self.framer.push(np.zeros(10, np.float32), rate_hz)
            assert refused.value.code in NEXT_CODES
            assert self.framer.snapshot() == before
        frames = (Frame(b"f", FrameSize(32, 24)),) * (MAX_FRAMES_PER_APPEND + 1)
        with pytest.raises(FramingError) as refused:
            self.framer.push(np.zeros(10, np.float32), RATE_HZ, frames)
        assert refused.value.code is FramingErrorCode.TOO_MANY_FRAMES
        assert self.framer.snapshot() == before

    # --- what the session does --------------------------------------------------------------------

    @rule(count=st.sampled_from((1, 9)))
    def take(self, count: int) -> None:
        """So many units, or as many as there are."""
        while self.oracle.closed and count:
            self._take_one(self.oracle.closed.popleft())
            count -= 1
        if not self.oracle.closed:
            assert self.framer.take() is None

    def _take_one(self, expected: Expected) -> None:
        append = self.framer.take()
        assert append is not None
        first = self.oracle.next_seq == 1
        assert append.seq == self.oracle.next_seq
        self.oracle.next_seq += 1
        assert append.pcm_s16le == (bytes(2 * 560) if first else b"") + expected.pcm
        assert append.chunks == 1
        assert (append.client_from_samples, append.client_to_samples) == (
            expected.begin,
            expected.end,
        )
        assert append.frames == expected.frames
        assert append.is_speech == expected.is_speech
        assert append.force_listen == expected.force_listen
        assert append.final == expected.final
        context = CONTEXT_POSITIONS if first else 0
        slots = (11 if first else 13) + 66 * len(expected.frames) + context
        assert append.reservation.slots == slots
        self.accepted = append
        self.resume_groups = expected.groups

    @rule()
    def go_on_elsewhere(self) -> None:
        state = _carried(self.framer.snapshot())
        self.framer = UnitFramer(CONTEXT_POSITIONS, LIMITS, state=state)

    @precondition(lambda self: self.accepted is not None and self.pushed % 3 == 2)
    @rule()
    def lose_all_behind_the_last_accepted_append(self) -> None:
        """The replica died; the client sends again from the acknowledged position, whatever."""
        append = self.accepted
        assert append is not None
        self.framer = UnitFramer(CONTEXT_POSITIONS, LIMITS, state=_carried(append.resume))
        self.oracle = Oracle(begin=append.client_to_samples, next_seq=append.seq + 1)
        self.oracle.groups.extend(self.resume_groups)

    # --- always -----------------------------------------------------------------------------------

    @invariant()
    def counts_agree(self) -> None:
        oracle, framer = self.oracle, self.framer
        assert framer.received_samples == oracle.received
        assert framer.waiting_samples == len(oracle.samples)
        assert framer.ready_units == len(oracle.closed)
        assert framer.pending_bytes == oracle.waiting_bytes()
        assert framer.pending_bytes <= LIMITS.max_pending_bytes + 32_000
        if framer.received_samples and framer.snapshot().rate_hz:
            assert framer.missing_samples == RATE_HZ - len(oracle.samples)


def _carried(state: FramerState) -> FramerState:
    """Through the ledger: packed and read again."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=FramerState)


TestFraming = Framing.TestCase
TestFraming.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
