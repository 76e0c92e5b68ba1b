"""Input until it is a unit: what is refused leaves no trace."""

import pytest
from session_kit import RATE_HZ, png, second

from duplex_sidecar.framing.errors import FramingErrorCode
from duplex_sidecar.framing.units import UnitFramer
from duplex_sidecar.protocol.commands import AppendInput, AudioEncoding, SetInputFormat
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.session.framing_errors import framing_code
from duplex_sidecar.session.input import DEFAULT_INPUT_RATE_HZ, InputDesk

pytestmark = pytest.mark.unit


def desk(frames_per_unit: int = 2, rate_hz: int = RATE_HZ) -> InputDesk:
    return InputDesk(UnitFramer(5), rate_hz, frames_per_unit)


def refused(desk: InputDesk, command: AppendInput) -> ErrorCode:
    before = desk._framer.snapshot()
    with pytest.raises(ClientError) as error:
        desk.append(command)
    assert desk._framer.snapshot() == before
    return error.value.code


def test_a_second_is_a_unit() -> None:
    here = desk()
    assert (here.has_unit, here.take()) == (False, None)
    here.append(AppendInput(second(1), frames=(png(96, 1),), is_speech=True))
    assert here.has_unit
    append = here.take()
    assert append is not None
    assert (append.seq, append.is_speech, len(append.frames)) == (1, True, 1)
    assert here.without_frames(append).frames == ()
    assert (here.has_unit, here.received_samples) == (False, RATE_HZ)


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (AppendInput(b"\0\0\0"), ErrorCode.INVALID_AUDIO),
        (AppendInput(second(1), from_sample=1), ErrorCode.OUT_OF_ORDER_EVENT),
        (AppendInput(second(1), frames=(b"none",)), ErrorCode.INVALID_FRAME),
        (AppendInput(second(1), frames=(png(96, 1),) * 3), ErrorCode.TOO_MANY_FRAMES),
    ],
)
def test_what_is_refused_leaves_no_trace(command: AppendInput, code: ErrorCode) -> None:
    assert refused(desk(), command) == code


def test_a_session_without_a_camera_takes_no_frame() -> None:
    assert refused(desk(0), AppendInput(second(1), (png(96, 1),))) is ErrorCode.TOO_MANY_FRAMES


@pytest.mark.parametrize("begin", [0, 1, 8_000, 15_999, 16_000])
def test_what_is_held_already_is_cut_off(begin: int) -> None:
    here, whole = desk(), second(1) + second(2)
    here.append(AppendInput(whole[: 2 * RATE_HZ], from_sample=0, frames=(png(96, 1),)))
    here.append(AppendInput(whole[2 * begin :], from_sample=begin, frames=(png(96, 2),)))
    first, then = here.take(), here.take()
    assert first is not None
    assert then is not None
    assert then.pcm_s16le == second(2)
    # The frames of a piece that was here before were here before, too.
    assert [frame.data for frame in then.frames] == ([png(96, 2)] if begin == RATE_HZ else [])
    assert here.received_samples == 2 * RATE_HZ


def test_an_older_piece_that_is_held_whole_changes_nothing() -> None:
    here = desk()
    here.append(AppendInput(second(1)))
    before = here._framer.snapshot()
    here.append(AppendInput(second(1)[:2000], from_sample=100, frames=(png(96, 9),)))
    assert here._framer.snapshot() == before


def test_the_rate_is_fixed_by_the_first_input() -> None:
    here = desk(rate_hz=0)
    assert here.rate_hz == DEFAULT_INPUT_RATE_HZ
    assert here.set_format(SetInputFormat(AudioEncoding.PCM16, RATE_HZ)).rate_hz == RATE_HZ
    for rate_hz in (7_999, 192_001):
        with pytest.raises(ClientError) as error:
            here.set_format(SetInputFormat(AudioEncoding.PCM16, rate_hz))
        assert error.value.code is ErrorCode.INVALID_SAMPLE_RATE
    here.append(AppendInput(second(1)))
    here.set_format(SetInputFormat(AudioEncoding.FLOAT32, RATE_HZ))
    with pytest.raises(ClientError) as error:
        here.set_format(SetInputFormat(AudioEncoding.FLOAT32, 48_000))
    assert (error.value.code, here.rate_hz) == (ErrorCode.IMMUTABLE_SETTING, RATE_HZ)


@pytest.mark.parametrize(("heard", "rate_hz"), [(b"", 24_000), (b"\0\0\0\0", 48_000)])
def test_a_new_client_begins_with_the_default_format(heard: bytes, rate_hz: int) -> None:
    here = desk(rate_hz=0)
    here.set_format(SetInputFormat(AudioEncoding.FLOAT32, 48_000))
    here.append(AppendInput(heard))
    here.new_client()
    assert (here.sample_bytes, here.rate_hz) == (2, rate_hz)
    here.append(AppendInput(b"\0\0"))
    assert here.received_samples == len(heard) // 4 + 1


def test_commit_and_clear() -> None:
    here = desk()
    here.append(AppendInput(second(1)[:2_000]))
    here.clear()
    assert commit(here) is EMPTY
    assert not here.has_unit
    here.append(AppendInput(second(1)[:2_000]))
    here.commit()
    append = here.take()
    assert append is not None
    assert (append.client_from_samples, append.client_to_samples) == (1_000, 2_000)


def test_every_reason_of_framing_has_its_code() -> None:
    assert all(framing_code(code) in ErrorCode for code in FramingErrorCode)


EMPTY = ErrorCode.INPUT_AUDIO_BUFFER_COMMIT_EMPTY


def commit(desk: InputDesk) -> ErrorCode | None:
    """What it is refused with."""
    try:
        desk.commit()
    except ClientError as error:
        return error.code
    return None


def test_a_commit_of_nothing_is_refused() -> None:
    here = desk()
    assert commit(here) is EMPTY
    here.append(AppendInput(b""))
    assert commit(here) is EMPTY
    here.append(AppendInput(second(1)[:100]))
    assert commit(here) is None
    assert here.has_unit
    assert commit(here) is EMPTY
    here.append(AppendInput(second(1)[:100]))
    here.clear()
    assert commit(here) is EMPTY


def test_a_commit_of_a_whole_second_is_not_refused() -> None:
    here = desk()
    here.append(AppendInput(second(1)))
    assert here._framer.waiting_samples == 0  # the unit closed by itself, and is answered
    assert commit(here) is None
    assert here._framer.ready_units == 1


def test_whoever_resumes_may_commit_again() -> None:
    here = desk()
    here.append(AppendInput(second(1)))
    assert commit(here) is None
    here.new_client()
    here.append(AppendInput(second(1), from_sample=0))
    assert commit(here) is None
    here.append(AppendInput(second(1), from_sample=0))
    assert commit(here) is None
    here.new_client()
    assert commit(here) is None
    assert commit(here) is EMPTY


def test_a_commit_on_a_fresh_connection_to_a_fresh_session_is_refused() -> None:
    here = desk()
    here.new_client()
    assert commit(here) is EMPTY
