"""The energy detector."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from duplex_sidecar.framing.pcm import Samples
from duplex_sidecar.framing.vad import (
    VadEvent,
    VadEventKind,
    VadPolicy,
    VadState,
    advance_vad,
    spoke_since,
)

pytestmark = pytest.mark.unit

POLICY = VadPolicy()


def tone(ms: int, rate_hz: int, level: float = 0.1) -> Samples:
    return (level * np.sin(np.arange(ms * rate_hz // 1000) * 0.3)).astype(np.float32)


def silence(ms: int, rate_hz: int) -> Samples:
    return np.zeros(ms * rate_hz // 1000, np.float32)


@pytest.mark.parametrize("rate_hz", [8_000, 16_000, 44_100, 48_000])
def test_speech_starts_with_its_prefix_and_stops_after_silence(rate_hz: int) -> None:
    audio = np.concatenate((silence(640, rate_hz), tone(640, rate_hz), silence(640, rate_hz)))
    state, events = advance_vad(VadState(), POLICY, audio, rate_hz)
    assert [event.kind for event in events] == [VadEventKind.STARTED, VadEventKind.STOPPED]
    started, stopped = (event.at_samples * 1000 / rate_hz for event in events)
    assert started == pytest.approx(340, abs=33)
    assert stopped == pytest.approx(1280, abs=33)
    assert not state.speaking


def test_a_click_is_not_speech() -> None:
    audio = np.concatenate((silence(320, 16_000), tone(64, 16_000), silence(900, 16_000)))
    state, events = advance_vad(VadState(), POLICY, audio, 16_000)
    assert events == ()
    assert not spoke_since(state, 0)


def test_a_pause_shorter_than_the_silence_does_not_stop_speech() -> None:
    audio = np.concatenate((tone(320, 16_000), silence(448, 16_000), tone(320, 16_000)))
    state, events = advance_vad(VadState(), POLICY, audio, 16_000)
    assert events == (VadEvent(VadEventKind.STARTED, 0),)
    assert state.speaking
    assert spoke_since(state, 16_000)


def test_noise_below_the_threshold_is_silence() -> None:
    state, events = advance_vad(VadState(), POLICY, tone(2000, 16_000, 0.002), 16_000)
    assert events == ()
    assert not state.speaking


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 700), st.booleans()), max_size=6),
    st.lists(st.integers(1, 9_000), max_size=12),
)
def test_slicing_changes_nothing(parts: list[tuple[int, bool]], cuts: list[int]) -> None:
    rate_hz = 16_000
    audio = np.concatenate(
        [silence(0, rate_hz)]
        + [tone(ms, rate_hz) if loud else silence(ms, rate_hz) for ms, loud in parts]
    )
    whole = advance_vad(VadState(), POLICY, audio, rate_hz)
    state, events, at = VadState(), [], 0
    for length in [*cuts, len(audio)]:
        state, more = advance_vad(state, POLICY, audio[at : at + length], rate_hz)
        events += more
        at += length
    assert (state, tuple(events)) == whole
