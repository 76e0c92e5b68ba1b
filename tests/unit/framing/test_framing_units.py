"""Client audio and frames become units: closing, padding, flags, frames, limits, resuming."""

import io

import msgspec
import numpy as np
import pytest
from PIL import Image

from duplex_sidecar.framing.append import Append, FramerState
from duplex_sidecar.framing.errors import FramingError, FramingErrorCode
from duplex_sidecar.framing.frames import Frame, read_frame
from duplex_sidecar.framing.pcm import Samples
from duplex_sidecar.framing.units import FramerLimits, UnitFramer
from duplex_sidecar.framing.vad import VadEventKind
from duplex_sidecar.ledger.writing import MAX_STATE_BYTES

pytestmark = pytest.mark.unit

CONTEXT_POSITIONS = 20


def speech(seconds: float, rate_hz: int = 16_000, level: float = 0.2) -> Samples:
    time = np.arange(round(seconds * rate_hz)) / rate_hz
    return (level * np.sin(2 * np.pi * 220 * time)).astype(np.float32)


def quiet(seconds: float, rate_hz: int = 16_000) -> Samples:
    return np.zeros(round(seconds * rate_hz), np.float32)


def frame(width: int = 32, height: int = 24) -> Frame:
    out = io.BytesIO()
    Image.new("RGB", (width, height)).save(out, "PNG")
    return read_frame(out.getvalue())


def framer(state: FramerState | None = None, limits: FramerLimits | None = None) -> UnitFramer:
    made = UnitFramer(CONTEXT_POSITIONS, limits or FramerLimits())
    return made if state is None else UnitFramer(CONTEXT_POSITIONS, state=state)


def take_all(source: UnitFramer) -> list[Append]:
    appends = []
    while (append := source.take()) is not None:
        appends.append(append)
    return appends


def test_a_unit_closes_with_its_last_sample() -> None:
    source = framer()
    source.push(speech(1)[:-1], 16_000)
    assert source.take() is None
    source.push(speech(1)[-1:], 16_000)
    append = source.take()
    assert append is not None
    assert (append.seq, append.chunks, append.new_samples) == (1, 1, 16_000)
    assert (append.client_from_samples, append.client_to_samples) == (0, 16_000)
    assert not append.final


def test_the_first_append_is_padded_on_the_left() -> None:
    source = framer()
    source.push(speech(2), 16_000)
    first, second = take_all(source)
    assert len(first.pcm_s16le) == 2 * 16_560
    assert first.pcm_s16le[: 2 * 560] == bytes(2 * 560)
    assert (
        first.pcm_s16le[2 * 560 :] + second.pcm_s16le
        == np.rint(speech(2) * 32_768).astype("<i2").tobytes()
    )
    assert len(second.pcm_s16le) == 2 * 16_000


def test_reservations_are_exact() -> None:
    source = framer()
    source.push(speech(1), 16_000)
    source.push(speech(1), 16_000, [frame(900, 600), frame()])
    first, second = take_all(source)
    assert (first.reservation.slots, first.reservation.context_slots) == (31, CONTEXT_POSITIONS)
    assert (second.reservation.slots, second.reservation.vision_slots) == (277, 264)
    assert second.reservation.context_slots == 0


def test_without_high_resolution_no_frame_is_cut() -> None:
    source = UnitFramer(CONTEXT_POSITIONS, high_resolution=False)
    source.push(speech(1), 16_000, [frame(900, 600), frame()])
    (append,) = take_all(source)
    assert (append.reservation.vision_slots, append.high_resolution) == (132, False)


def test_a_commit_pads_the_tail_with_zeros() -> None:
    source = framer()
    source.push(speech(1.25), 16_000)
    assert source.flush() == 1
    assert source.flush() == 0
    first, last = take_all(source)
    assert (first.final, last.final) == (False, True)
    assert last.pcm_s16le[2 * 4_000 :] == bytes(2 * 12_000)
    assert (last.client_from_samples, last.client_to_samples) == (16_000, 20_000)
    assert last.reservation.slots == 13
    source.push(speech(1), 16_000)
    after = source.take()
    assert after is not None
    assert (after.client_from_samples, after.client_to_samples) == (20_000, 36_000)


def test_another_rate_closes_100_ms_later() -> None:
    source = framer()
    source.push(speech(1.1, 48_000)[:-1], 48_000)
    assert source.ready_units == 0
    source.push(speech(1.1, 48_000)[-1:], 48_000)
    append = source.take()
    assert append is not None
    assert (append.client_to_samples, append.rate_hz) == (48_000, 48_000)
    heard = np.frombuffer(append.pcm_s16le[2 * 560 :], "<i2") / 32_768
    assert np.abs(heard[100:] - speech(1)[100:]).max() < 1e-3


def test_a_commit_within_the_right_context_closes_two_units() -> None:
    source = framer()
    source.push(speech(1.05, 48_000), 48_000)
    assert source.flush() == 2
    first, second = take_all(source)
    assert (first.client_to_samples, second.client_to_samples) == (48_000, 50_400)
    assert (first.final, second.final) == (False, True)


@pytest.mark.parametrize("rate_hz", [8_000, 11_025, 44_100, 48_000, 192_000])
def test_units_of_any_rate_join_without_a_seam(rate_hz: int) -> None:
    source = framer()
    source.push(speech(3.2, rate_hz), rate_hz)
    pcm = b"".join(append.pcm_s16le for append in take_all(source))
    heard = np.frombuffer(pcm[2 * 560 :], "<i2")[200:].astype(np.float64) / 32_768
    # A steady tone: any seam would stand out in the second difference.
    bend = np.abs(np.diff(heard, 2))
    assert bend.max() < 0.2 * (2 * np.pi * 220 / 16_000) ** 2 * 1.05 + 2 / 32_768


def test_the_client_or_the_detector_says_what_speech_is() -> None:
    source = framer()
    source.push(speech(1), 16_000)
    source.push(quiet(1), 16_000)
    source.push(speech(1), 16_000, is_speech=False)
    source.push(quiet(1), 16_000, is_speech=True)
    source.push(quiet(0.5), 16_000)
    source.push(quiet(0.5), 16_000, is_speech=True, force_listen=True)
    source.push(quiet(1), 16_000)
    appends = take_all(source)
    assert [append.is_speech for append in appends] == [True, False, False, True, True, False]
    assert [append.force_listen for append in appends] == [False] * 4 + [True, False]


def test_speech_is_reported_as_it_arrives() -> None:
    source = framer()
    assert source.push(quiet(0.5), 16_000) == ()
    (started,) = source.push(speech(0.2), 16_000)
    assert started.kind is VadEventKind.STARTED
    assert abs(started.at_samples - 3_200) <= 320


def test_frames_wait_for_units_in_order() -> None:
    source = framer()
    images = [frame(32 + step, 24) for step in range(4)]
    source.push(quiet(0.25), 16_000, images[:2])
    source.push(quiet(0.25), 16_000, images[2:3])
    source.push(quiet(2.5), 16_000)
    source.push(quiet(0), 16_000, images[3:])
    assert [append.frames for append in take_all(source)] == [
        tuple(images[:2]),
        (images[2],),
        (),
    ]
    source.flush()
    assert source.take() is None
    source.push(quiet(1), 16_000)
    last = source.take()
    assert last is not None
    assert last.frames == (images[3],)


def test_frames_of_the_right_context_go_to_the_next_unit() -> None:
    source = framer()
    source.push(quiet(1.05, 48_000), 48_000)
    source.push(quiet(1.05, 48_000), 48_000, [frame()])
    assert [len(append.frames) for append in take_all(source)] == [0, 1]


def test_clear_forgets_what_waits() -> None:
    source = framer()
    source.push(speech(2.5), 16_000, [frame()])
    source.clear()
    assert source.pending_bytes == 0
    assert source.flush() == 0
    assert source.take() is None
    source.push(speech(1), 16_000)
    append = source.take()
    assert append is not None
    assert (append.seq, append.client_from_samples, append.frames) == (1, 40_000, ())


def test_another_rate_needs_a_commit() -> None:
    source = framer()
    source.push(speech(0.5), 16_000)
    with pytest.raises(FramingError) as caught:
        source.push(speech(0.5, 24_000), 24_000)
    assert caught.value.code is FramingErrorCode.AUDIO_RATE_CHANGED
    source.flush()
    source.push(speech(1.1, 24_000), 24_000)
    _, append = take_all(source)
    assert (append.rate_hz, append.client_from_samples) == (24_000, 8_000)


def test_refused_input_leaves_no_trace() -> None:
    source = framer(limits=FramerLimits(max_pending_bytes=64_000, max_pending_groups=1))
    source.push(speech(0.5), 16_000, [frame()])
    before = source.snapshot()
    for samples, frames, code in (
        (speech(1), [], FramingErrorCode.INPUT_OVERFLOW),
        (speech(0.01), [frame()], FramingErrorCode.INPUT_OVERFLOW),
        (speech(0.01), [frame()] * 3, FramingErrorCode.TOO_MANY_FRAMES),
    ):
        with pytest.raises(FramingError) as caught:
            source.push(samples, 16_000, frames)
        assert caught.value.code is code
    with pytest.raises(FramingError):
        source.push(speech(0.1, 4_000), 4_000)
    assert source.snapshot() == before


def test_pending_bytes_count_everything_that_waits() -> None:
    source = framer()
    picture = frame()
    source.push(quiet(1.5), 16_000, [picture])
    source.push(quiet(0.1), 16_000, [picture])
    assert source.pending_bytes == 32_000 + 4 * 9_600 + 2 * len(picture.data)
    source.take()
    assert source.pending_bytes == 4 * 9_600 + len(picture.data)


def test_states_are_serialisable() -> None:
    source = framer()
    source.push(speech(2.3, 44_100), 44_100, [frame()], is_speech=True)
    packed = msgspec.msgpack.encode(source.snapshot())
    state = msgspec.msgpack.decode(packed, type=FramerState)
    assert state == source.snapshot()
    assert framer(state).snapshot() == state
    append = source.take()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(append), type=Append) == append


def picture(size_bytes: int) -> Frame:
    return msgspec.structs.replace(frame(), data=bytes(size_bytes))


def test_frames_that_wait_behind_a_unit_fit_into_the_ledgers_state() -> None:
    """Four appends in one second with a picture of 2.1 MB each: what of them is taken goes with the
    units, and no unit's `resume` is larger than the ledger takes."""
    source = framer()
    source.push(speech(0.25), 16_000, [picture(2_100_000)])
    for _ in range(3):
        with pytest.raises(FramingError) as full:
            source.push(speech(0.25), 16_000, [picture(2_100_000)])
        assert full.value.code is FramingErrorCode.INPUT_OVERFLOW
        source.push(speech(0.25), 16_000)
    (append,) = take_all(source)
    assert [len(each.data) for each in append.frames] == [2_100_000]
    source.push(speech(1), 16_000, [picture(2_100_000)])
    assert len(take_all(source)) == 1


def test_the_largest_state_that_framing_can_leave_behind_fits() -> None:
    limits = FramerLimits()
    source = framer()
    source.push(speech(0.01, 192_000), 192_000, [picture(4 * 1024 * 1024)])
    each = limits.max_state_frame_bytes // (limits.max_pending_groups - 1)
    for _ in range(limits.max_pending_groups - 1):
        source.push(speech(0.01, 192_000), 192_000, [picture(each)])
    with pytest.raises(FramingError) as full:
        source.push(speech(0.01, 192_000), 192_000, [picture(limits.max_state_frame_bytes)])
    assert full.value.code is FramingErrorCode.INPUT_OVERFLOW
    source.push(speech(2, 192_000), 192_000)
    append = source.take()
    assert append is not None
    assert len(append.resume.groups) == limits.max_pending_groups - 1
    state = msgspec.msgpack.encode(append.resume)
    assert len(state) < MAX_STATE_BYTES - 1024 * 1024  # the rest of a conversation has that much
