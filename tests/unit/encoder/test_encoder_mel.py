"""The incremental mel front end against plain recomputation of the whole buffer each second."""

import numpy as np
import pytest
import torch

from duplex_sidecar.stages.encoder.chunks import cut
from duplex_sidecar.stages.encoder.filters import slaney_filters
from duplex_sidecar.stages.encoder.mel import MelFrontEnd, empty_mel

pytestmark = pytest.mark.unit


class WholeBuffer:
    """The public rule, written down without any reuse: keep the samples, recompute everything."""

    def __init__(self) -> None:
        self.samples = np.zeros(0, np.float32)
        self.dropped_frames = 0
        self.emitted_frames = 0

    def step(self, pcm_s16le: bytes) -> torch.Tensor:
        new = np.frombuffer(pcm_s16le, "<i2").astype(np.float32) / 32768
        self.samples = np.concatenate([self.samples, new])
        if len(self.samples) >= 480_000:
            self.samples = self.samples[160_000:]
            self.dropped_frames += 1_000
        spectrum = torch.stft(
            torch.from_numpy(self.samples),
            n_fft=400,
            hop_length=160,
            window=torch.hann_window(400),
            return_complex=True,
        )
        power = (
            torch.from_numpy(slaney_filters(16_000, 400, 80, 8_000)).T @ spectrum[:, :-1].abs() ** 2
        )
        logs = power.clamp(min=1e-10).log10()
        floor = logs.max() - 8 if len(self.samples) >= 80_000 else torch.tensor(-10.0)
        features = (torch.maximum(logs, floor) + 4) / 4
        begin = max(0, self.emitted_frames - 2) - self.dropped_frames
        self.emitted_frames += 100
        return features[:, begin : self.emitted_frames + 2 - self.dropped_frames]


def test_features_equal_those_of_the_whole_buffer_over_75_seconds(make_sound):
    front_end, whole = MelFrontEnd(80), WholeBuffer()
    state = empty_mel(0)
    pcm = make_sound(75, 1).tobytes()
    floors = 0
    for second, chunk in enumerate(
        (*cut(pcm[: 2 * 816_560], True), *cut(pcm[2 * 816_560 :], False))
    ):
        state, features = front_end.step(state, chunk)
        expected = whole.step(chunk)
        assert features.shape == expected.shape == (80, 102 if second == 0 else 104)
        assert (features - expected).abs().max() <= 1e-5
        floors += bool((features == features.min()).sum() > 10)
    assert floors > 20, "the sound should reach the level floor often"
    assert whole.dropped_frames == 5_000
    assert state.start_samples == 800_000


def test_a_step_leaves_the_state_it_started_from_alone(make_sound):
    front_end = MelFrontEnd(80)
    first, *later = cut(make_sound(31, 2).tobytes(), True)
    state, _ = front_end.step(empty_mel(0), first)
    for chunk in later[:-1]:
        before = (state.pcm.copy(), state.frame_peaks.copy(), state.start_samples)
        new_state, features = front_end.step(state, chunk)
        assert np.array_equal(state.pcm, before[0])
        assert np.array_equal(state.frame_peaks, before[1])
        assert state.start_samples == before[2]
        again, same_features = front_end.step(state, chunk)
        assert torch.equal(features, same_features)
        assert np.array_equal(again.frame_peaks, new_state.frame_peaks)
        state = new_state


def test_the_buffer_never_holds_30_seconds(make_sound):
    front_end, state = MelFrontEnd(80), empty_mel(0)
    silence = bytes(32_000)
    lengths = []
    state, _ = front_end.step(state, bytes(33_120))
    for _ in range(60):
        state, _ = front_end.step(state, silence)
        lengths.append(len(state.pcm))
        assert len(state.frame_peaks) == len(state.pcm) // 160
    assert max(lengths) < 480_000
    assert min(lengths[30:]) > 320_000


def test_silence_has_the_lowest_features():
    _, features = MelFrontEnd(80).step(empty_mel(0), bytes(33_120))
    assert features.eq((-10 + 4) / 4).all()


def test_filters_cover_the_band_with_equal_areas():
    filters = slaney_filters(16_000, 400, 80, 8_000)
    assert filters.shape == (201, 80)
    assert (filters >= 0).all()
    assert filters[0].max() == 0
    peaks = filters.argmax(0)
    assert (np.diff(peaks) >= 0).all()
    # 40 Hz between lines: a triangle of area 1 sums to about 1 / 40 where it is wide enough.
    assert np.allclose(filters[:, 40:].sum(0), 1 / 40, rtol=0.1)
