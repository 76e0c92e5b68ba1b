"""Client audio and frames to units (contract section A, design of reproducible input).

A unit is the client samples [k * rate, (k + 1) * rate) after the last commit. Its 16 kHz samples
are a function of one fixed window: the unit and 100 ms on each side (none at 16 kHz, where nothing
is resampled and a unit closes at once). How the client slices its audio never changes an output.
"""

from collections import deque
from collections.abc import Sequence
from typing import Final

import msgspec
import numpy as np

from duplex_sidecar.framing.append import (
    NEW_FRAMER,
    Append,
    FlagRun,
    FrameGroup,
    FramerState,
    ReadyUnit,
)
from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.frames import Frame
from duplex_sidecar.framing.pcm import (
    F32_BYTES,
    S16_BYTES,
    Samples,
    context_samples,
    require_rate,
    resample_window,
    to_s16le,
)
from duplex_sidecar.framing.vad import VadEvent, VadPolicy, VadState, advance_vad, spoke_since
from duplex_sidecar.model.minicpmo45.constants import MAX_FRAMES_PER_APPEND, UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.framing import reserve_append, split_chunks


class FramerLimits(msgspec.Struct, frozen=True):
    """max_pending_bytes: audio (as float32, closed units as s16le) and frames that wait.
    max_pending_groups: groups of frames that wait for a unit. max_state_frame_bytes: frames that
    wait behind the oldest group. Where a unit closes they go into its `resume` state, and with it
    into the ledger, whose states have a limit of their own (twice as much)."""

    max_pending_bytes: int = 16 * 1024 * 1024
    max_pending_groups: int = 16
    max_state_frame_bytes: int = 2 * 1024 * 1024


DEFAULT_LIMITS: Final = FramerLimits()
DEFAULT_VAD: Final = VadPolicy()


class UnitFramer:
    """The framing of one session. `push` and `flush` close units, `take` gives them in order.

    Deterministic and without I/O; `snapshot` is everything it knows.
    """

    def __init__(
        self,
        context_positions: int,
        limits: FramerLimits = DEFAULT_LIMITS,
        vad_policy: VadPolicy = DEFAULT_VAD,
        state: FramerState = NEW_FRAMER,
        *,
        high_resolution: bool = True,
    ) -> None:
        """context_positions: length of the session context, reserved with append 1. state: where to
        go on from (a snapshot, or `Append.resume`). high_resolution: whether a frame may be cut
        into slices."""
        self._context_positions = context_positions
        self._limits = limits
        self._vad_policy = vad_policy
        self._high_resolution = high_resolution
        self._next_seq = state.next_seq
        self._rate_hz = state.rate_hz
        self._received = state.received_samples
        self._unit_start = state.unit_start_samples
        self._flags = list(state.flags)
        self._vad = state.vad
        self._vad_at_unit_end = state.vad_at_unit_end
        self._groups = deque(state.groups)
        self._ready = deque(state.ready)
        self._buffer, self._fill = _new_buffer(state.rate_hz, state.buffer_f32le)

    # --- input ----------------------------------------------------------------------------------

    def push(
        self,
        samples: Samples,
        rate_hz: int,
        frames: Sequence[Frame] = (),
        *,
        is_speech: bool | None = None,
        force_listen: bool = False,
    ) -> tuple[VadEvent, ...]:
        """Take client samples and frames (which belong to the position of the first sample; each
        unit has the oldest group of frames that came before its last sample).

        is_speech and force_listen hold for these samples and so for every unit that has one of
        them. Returns where speech began or ended. Raises FramingError and then changes nothing.
        """
        self._check(samples, rate_hz, frames)
        if rate_hz != self._rate_hz:
            self._set_rate(rate_hz)
        if frames:
            self._groups.append(FrameGroup(self._received, tuple(frames)))
        if not len(samples):
            return ()
        self._note_flags(self._received + len(samples), is_speech, force_listen)
        events: list[VadEvent] = []
        done = 0
        while done < len(samples):
            count = min(len(samples) - done, self._next_cut() - self._fill)
            events += self._fill_with(samples[done : done + count])
            done += count
        return tuple(events)

    def flush(self) -> int:
        """The client committed: zero-pad what waits to whole units, the last of them final.

        Returns the number of units that this closed; 0 when nothing waited.
        """
        closed = 0
        while (waiting := self.waiting_samples) > 0:
            self._buffer[self._fill :] = 0
            self._close(final=waiting <= self._rate_hz)
            closed += 1
        if closed:
            self._fill = context_samples(self._rate_hz)
        return closed

    def clear(self) -> None:
        """Forget all that waits: samples, frames and closed units that were not taken."""
        self._buffer, self._fill = _new_buffer(self._rate_hz, b"")
        self._unit_start = self._received
        self._vad_at_unit_end = None
        self._flags.clear()
        self._groups.clear()
        self._ready.clear()

    # --- output ---------------------------------------------------------------------------------

    def take(self) -> Append | None:
        """The oldest closed unit as an append with the next seq; None when there is none."""
        if not self._ready:
            return None
        unit = self._ready.popleft()
        seq = self._next_seq
        self._next_seq += 1
        split = split_chunks(0, UNIT_SAMPLES, first=seq == 1)
        return Append(
            seq=seq,
            pcm_s16le=bytes(split.left_pad_samples * S16_BYTES) + unit.pcm_s16le,
            new_samples=UNIT_SAMPLES,
            chunks=split.chunks,
            frames=unit.frames,
            client_from_samples=unit.client_from_samples,
            client_to_samples=unit.client_to_samples,
            rate_hz=unit.rate_hz,
            is_speech=unit.is_speech,
            force_listen=unit.force_listen,
            final=unit.final,
            reservation=reserve_append(
                seq,
                UNIT_SAMPLES,
                [frame.size for frame in unit.frames],
                self._context_positions,
                high_resolution=self._high_resolution,
            ),
            resume=_resume_state(unit, self._next_seq),
            high_resolution=self._high_resolution,
        )

    def without_frames(self, append: Append) -> Append:
        """The same append with its sound alone: what is left when its frames cannot be decoded."""
        reservation = reserve_append(append.seq, append.new_samples, (), self._context_positions)
        return msgspec.structs.replace(append, frames=(), reservation=reservation)

    @property
    def ready_units(self) -> int:
        """Closed units that wait to be taken."""
        return len(self._ready)

    @property
    def received_samples(self) -> int:
        """Client samples that have arrived since the session began."""
        return self._received

    @property
    def waiting_samples(self) -> int:
        """Client samples that belong to no closed unit yet."""
        return self._received - self._unit_start

    @property
    def missing_samples(self) -> int:
        """Client samples until the next unit closes."""
        return len(self._buffer) - self._fill

    @property
    def pending_bytes(self) -> int:
        """Bytes of audio and frames that wait, as `FramerLimits` counts them."""
        frames = sum(len(f.data) for group in self._groups for f in group.frames)
        ready = sum(
            len(unit.pcm_s16le) + sum(len(f.data) for f in unit.frames) for unit in self._ready
        )
        return self.waiting_samples * F32_BYTES + frames + ready

    def snapshot(self) -> FramerState:
        """Everything that is needed to go on elsewhere."""
        return FramerState(
            next_seq=self._next_seq,
            rate_hz=self._rate_hz,
            received_samples=self._received,
            unit_start_samples=self._unit_start,
            buffer_f32le=_bytes(self._buffer[: self._fill]),
            flags=tuple(self._flags),
            vad=self._vad,
            vad_at_unit_end=self._vad_at_unit_end,
            groups=tuple(self._groups),
            ready=tuple(self._ready),
        )

    # --- inside ---------------------------------------------------------------------------------

    def _check(self, samples: Samples, rate_hz: int, frames: Sequence[Frame]) -> None:
        require_rate(rate_hz)
        if rate_hz != self._rate_hz and self.waiting_samples:
            raise FramingError(
                FramingErrorCode.AUDIO_RATE_CHANGED,
                f"{rate_hz} Hz after {self._rate_hz} Hz while {self.waiting_samples} samples wait",
            )
        if len(frames) > MAX_FRAMES_PER_APPEND:
            raise FramingError(
                FramingErrorCode.TOO_MANY_FRAMES,
                f"{len(frames)} frames at once; allowed are {MAX_FRAMES_PER_APPEND}",
            )
        if frames and len(self._groups) >= self._limits.max_pending_groups:
            raise FramingError(
                FramingErrorCode.INPUT_OVERFLOW,
                f"{len(self._groups)} groups of frames wait for audio to go with",
            )
        frame_bytes = sum(len(frame.data) for frame in frames)
        # The oldest group is never among what a closed unit leaves behind: the unit has it.
        behind = sum(len(f.data) for group in list(self._groups)[1:] for f in group.frames)
        if frames and self._groups and behind + frame_bytes > self._limits.max_state_frame_bytes:
            raise FramingError(
                FramingErrorCode.INPUT_OVERFLOW,
                f"{behind} bytes of frames wait for units to come and {frame_bytes} more came;"
                f" allowed are {self._limits.max_state_frame_bytes}",
            )
        more = len(samples) * F32_BYTES + frame_bytes
        if self.pending_bytes + more > self._limits.max_pending_bytes:
            raise FramingError(
                FramingErrorCode.INPUT_OVERFLOW,
                f"{self.pending_bytes} bytes wait and {more} more came;"
                f" allowed are {self._limits.max_pending_bytes}",
            )

    def _set_rate(self, rate_hz: int) -> None:
        self._rate_hz = rate_hz
        self._buffer, self._fill = _new_buffer(rate_hz, b"")
        self._vad = VadState(
            position_samples=self._received, speech_end_samples=self._vad.speech_end_samples
        )

    def _note_flags(self, end: int, is_speech: bool | None, force_listen: bool) -> None:
        run = FlagRun(end, is_speech, force_listen)
        if self._flags and _same_flags(self._flags[-1], run):
            self._flags[-1] = run
        else:
            self._flags.append(run)

    def _next_cut(self) -> int:
        """Fill at which something has to be done: the unit's end, then its right context's end."""
        whole = len(self._buffer)
        unit_end = whole - context_samples(self._rate_hz)
        return unit_end if self._fill < unit_end else whole

    def _fill_with(self, samples: Samples) -> tuple[VadEvent, ...]:
        """Samples up to the next cut at most, and what is due there."""
        self._buffer[self._fill : self._fill + len(samples)] = samples
        self._fill += len(samples)
        self._received += len(samples)
        self._vad, events = advance_vad(self._vad, self._vad_policy, samples, self._rate_hz)
        if self._received == self._unit_start + self._rate_hz:
            self._vad_at_unit_end = self._vad
        if self._fill == len(self._buffer):
            self._close(final=False)
        return events

    def _close(self, *, final: bool) -> None:
        """Close the unit whose whole window is in the buffer."""
        rate_hz, context = self._rate_hz, context_samples(self._rate_hz)
        end = min(self._unit_start + rate_hz, self._received)
        vad = self._vad if self._vad_at_unit_end is None else self._vad_at_unit_end
        pcm = to_s16le(resample_window(self._buffer, rate_hz, UNIT_SAMPLES))
        is_speech, force_listen = self._unit_flags(end, vad)
        # Frames that came behind the unit's last sample are not its own, not even at a commit:
        # whoever goes on from `end` gets them again.
        has_frames = self._groups and self._groups[0].at_samples < end
        frames = self._groups.popleft().frames if has_frames else ()
        self._ready.append(
            ReadyUnit(
                pcm_s16le=pcm,
                frames=frames,
                client_from_samples=self._unit_start,
                client_to_samples=end,
                rate_hz=rate_hz,
                is_speech=is_speech,
                force_listen=force_listen,
                final=final,
                tail_f32le=_bytes(self._buffer[rate_hz : rate_hz + context]),
                vad=vad,
                groups=tuple(group for group in self._groups if group.at_samples < end),
            )
        )
        self._buffer[: 2 * context] = self._buffer[rate_hz:].copy()
        self._fill = max(context, self._fill - rate_hz)
        self._unit_start = end
        self._vad_at_unit_end = None
        self._flags = [run for run in self._flags if run.end_samples > end]

    def _unit_flags(self, end: int, vad: VadState) -> tuple[bool, bool]:
        """(is_speech, force_listen) of the unit from the runs that reach into it."""
        is_speech = force_listen = False
        start = self._unit_start
        for run in self._flags:
            if start >= end:
                break
            heard = spoke_since(vad, self._unit_start) if run.is_speech is None else run.is_speech
            is_speech = is_speech or heard
            force_listen = force_listen or run.force_listen
            start = run.end_samples
        return is_speech, force_listen


def _new_buffer(rate_hz: int, filled_f32le: bytes) -> tuple[Samples, int]:
    """(room for one window, samples in it): the given ones, else a left context of zeros."""
    context = context_samples(rate_hz)
    buffer = np.zeros(rate_hz + 2 * context, np.float32)
    if not filled_f32le:
        return buffer, context
    filled = np.frombuffer(filled_f32le, "<f4")
    buffer[: len(filled)] = filled
    return buffer, len(filled)


def _bytes(samples: Samples) -> bytes:
    return samples.astype("<f4").tobytes()


def _same_flags(one: FlagRun, other: FlagRun) -> bool:
    return (one.is_speech, one.force_listen) == (other.is_speech, other.force_listen)


def _resume_state(unit: ReadyUnit, next_seq: int) -> FramerState:
    return FramerState(
        next_seq=next_seq,
        rate_hz=unit.rate_hz,
        received_samples=unit.client_to_samples,
        unit_start_samples=unit.client_to_samples,
        buffer_f32le=unit.tail_f32le,
        flags=(),
        vad=unit.vad,
        vad_at_unit_end=None,
        groups=unit.groups,
        ready=(),
    )
