"""What framing hands to the session, and what it remembers: frozen and serialisable."""

import msgspec

from duplex_sidecar.framing.frames import Frame
from duplex_sidecar.framing.vad import VadState
from duplex_sidecar.model.minicpmo45.framing import Reservation


class FrameGroup(msgspec.Struct, frozen=True):
    """Frames that came together; at_samples: how many client samples had arrived before them."""

    at_samples: int
    frames: tuple[Frame, ...]


class FlagRun(msgspec.Struct, frozen=True):
    """What the client said about its samples up to end_samples (from the end of the run before).

    is_speech: None leaves it to the energy detector.
    """

    end_samples: int
    is_speech: bool | None
    force_listen: bool


class ReadyUnit(msgspec.Struct, frozen=True):
    """A closed unit that waits to be taken. pcm_s16le: its 16,000 samples. tail_f32le, vad and
    groups: where framing goes on from if everything behind this unit is lost."""

    pcm_s16le: bytes
    frames: tuple[Frame, ...]
    client_from_samples: int
    client_to_samples: int
    rate_hz: int
    is_speech: bool
    force_listen: bool
    final: bool
    tail_f32le: bytes
    vad: VadState
    groups: tuple[FrameGroup, ...]


class FramerState(msgspec.Struct, frozen=True):
    """A session's framing. Positions count client samples since the session began.

    next_seq: seq of the next append. rate_hz: 0 before the first audio. received_samples: end of
    what has arrived; unit_start_samples: where the unit that is being filled begins. buffer_f32le:
    left context, then the samples from unit_start_samples on. vad_at_unit_end: detector state where
    that unit ended, while its right context is still arriving.
    """

    next_seq: int
    rate_hz: int
    received_samples: int
    unit_start_samples: int
    buffer_f32le: bytes
    flags: tuple[FlagRun, ...]
    vad: VadState
    vad_at_unit_end: VadState | None
    groups: tuple[FrameGroup, ...]
    ready: tuple[ReadyUnit, ...]


class Append(msgspec.Struct, frozen=True):
    """One closed unit, ready for the encoder and the planner.

    pcm_s16le: 16 kHz mono exactly as the encoder gets it: new_samples new ones, before them, for
    seq 1, the left padding. chunks: encoder chunks that it closes. client_from_samples,
    client_to_samples: the client's samples behind it; `to` is the acknowledged position. final: the
    client committed here, the rest of the unit is zeros. resume: framing's state for a successor
    that gets the client's samples again from client_to_samples on. high_resolution: whether a frame
    may be cut into slices; reservation counts with it.
    """

    seq: int
    pcm_s16le: bytes
    new_samples: int
    chunks: int
    frames: tuple[Frame, ...]
    client_from_samples: int
    client_to_samples: int
    rate_hz: int
    is_speech: bool
    force_listen: bool
    final: bool
    reservation: Reservation
    resume: FramerState
    high_resolution: bool = True


NEW_FRAMER = FramerState(
    next_seq=1,
    rate_hz=0,
    received_samples=0,
    unit_start_samples=0,
    buffer_f32le=b"",
    flags=(),
    vad=VadState(),
    vad_at_unit_end=None,
    groups=(),
    ready=(),
)
"""Before the first audio of a session."""
