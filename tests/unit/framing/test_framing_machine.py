"""How the client slices its audio, and who frames it, never changes an output."""

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex_sidecar.framing.append import Append, FramerState
from duplex_sidecar.framing.frames import Frame
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.framing.vad import VadEvent
from duplex_sidecar.model.minicpmo45.framing import FrameSize

pytestmark = pytest.mark.unit

CONTEXT_POSITIONS = 20
RATES = (8_000, 11_025, 16_000, 44_100)


@dataclass(frozen=True)
class Piece:
    """What a client sends as one event: milliseconds of audio, then maybe a commit."""

    ms: int
    loud: bool
    frames: int
    is_speech: bool | None
    force_listen: bool
    commit: bool


pieces = st.builds(
    Piece,
    ms=st.integers(0, 900) | st.sampled_from((0, 50, 950, 1_000, 1_050)),
    loud=st.booleans(),
    frames=st.sampled_from((0, 0, 1, 2)),
    is_speech=st.sampled_from((None, None, True, False)),
    force_listen=st.sampled_from((False, False, True)),
    commit=st.sampled_from((False, False, False, True)),
)


def audio_of(piece: Piece, index: int, rate_hz: int) -> np.ndarray:
    noise = np.random.default_rng(index).standard_normal(piece.ms * rate_hz // 1000)
    return (noise * (0.1 if piece.loud else 0.0005)).astype(np.float32)


def frames_of(piece: Piece, index: int) -> tuple[Frame, ...]:
    return tuple(Frame(bytes([index, n]), FrameSize(32, 24)) for n in range(piece.frames))


class Client:
    """Feeds pieces in slices; at some slice the framer is replaced by one of the same snapshot."""

    def __init__(self, framer: UnitFramer, rate_hz: int) -> None:
        self.framer, self.rate_hz = framer, rate_hz
        self.appends: list[Append] = []
        self.events: list[VadEvent] = []

    def send(self, piece: Piece, index: int, cuts: Sequence[int], skip: int = 0) -> None:
        audio, frames = audio_of(piece, index, self.rate_hz)[skip:], frames_of(piece, index)
        at = 0
        for length in [*cuts, len(audio)]:
            self.events += self.framer.push(
                audio[at : at + length],
                self.rate_hz,
                () if at or skip else frames,
                is_speech=piece.is_speech,
                force_listen=piece.force_listen,
            )
            at += length
            if at >= len(audio):
                break
        if piece.commit:
            self.framer.flush()

    def replace(self) -> None:
        packed = msgspec.msgpack.encode(self.framer.snapshot())
        state = msgspec.msgpack.decode(packed, type=FramerState)
        self.framer = UnitFramer(CONTEXT_POSITIONS, state=state)

    def take(self) -> None:
        while (append := self.framer.take()) is not None:
            self.appends.append(append)


def run_whole(script: Sequence[Piece], rate_hz: int) -> Client:
    client = Client(UnitFramer(CONTEXT_POSITIONS), rate_hz)
    for index, piece in enumerate(script):
        client.send(piece, index, ())
    client.take()
    return client


@settings(max_examples=60, deadline=None)
@given(
    st.lists(pieces, min_size=1, max_size=6),
    st.sampled_from(RATES),
    st.lists(st.integers(1, 20_000), max_size=4),
    st.integers(1, 3),
)
def test_slices_and_snapshots_change_nothing(
    script: list[Piece], rate_hz: int, cuts: list[int], every: int
) -> None:
    whole = run_whole(script, rate_hz)
    sliced = Client(UnitFramer(CONTEXT_POSITIONS), rate_hz)
    for index, piece in enumerate(script):
        sliced.send(piece, index, cuts)
        if index % every == 0:
            sliced.replace()
            sliced.take()
    sliced.take()
    assert sliced.appends == whole.appends
    assert sliced.events == whole.events
    assert sliced.framer.snapshot() == whole.framer.snapshot()
    check_sequence(whole.appends)


def check_sequence(appends: Sequence[Append]) -> None:
    assert [append.seq for append in appends] == list(range(1, len(appends) + 1))
    position = 0
    for append in appends:
        assert append.client_from_samples == position
        position = append.client_to_samples
        assert append.client_to_samples - append.client_from_samples <= append.rate_hz
        padding = 2 * 560 if append.seq == 1 else 0
        assert len(append.pcm_s16le) == padding + 2 * append.new_samples
        blocks = len(append.reservation.blocks)
        context = CONTEXT_POSITIONS if append.seq == 1 else 0
        assert append.reservation.slots == (11 if append.seq == 1 else 13) + 66 * blocks + context


@settings(max_examples=60, deadline=None)
@given(st.lists(pieces, min_size=2, max_size=6), st.sampled_from(RATES), st.data())
def test_a_successor_goes_on_from_the_acknowledged_position(
    script: list[Piece], rate_hz: int, data: st.DataObject
) -> None:
    """The replica dies after some append was accepted; the client sends everything from there."""
    whole = run_whole(script, rate_hz)
    if not whole.appends:
        return
    lost_after = data.draw(st.integers(0, len(whole.appends) - 1))
    accepted = whole.appends[lost_after]
    successor = Client(UnitFramer(CONTEXT_POSITIONS, state=accepted.resume), rate_hz)
    position = 0
    for index, piece in enumerate(script):
        length = piece.ms * rate_hz // 1000
        skip = max(0, accepted.client_to_samples - position)
        position += length
        if skip < length or skip == length == 0:
            successor.send(piece, index, (), skip)
    successor.take()
    assert [fields(a) for a in successor.appends] == [
        fields(a) for a in whole.appends[lost_after + 1 :]
    ]


def fields(append: Append) -> tuple[object, ...]:
    return (
        append.seq,
        append.pcm_s16le,
        append.frames,
        append.client_from_samples,
        append.client_to_samples,
        append.is_speech,
        append.force_listen,
        append.final,
        append.resume,
    )
