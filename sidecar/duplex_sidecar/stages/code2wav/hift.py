"""Mel to 24 kHz samples: HiFT, a harmonic-plus-noise source shaped by up-sampling convolutions.

F0 is predicted from the mel, nine harmonics with seeded noise make the source, and its spectrum
joins every up-sampling stage. Rates 8 x 5 x 3, then an inverse 16-point transform with hop 4:
480 samples a mel frame (contract section H).
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from duplex_sidecar.stages.code2wav.layers import Conv, Weights

SAMPLE_RATE_HZ = 24_000
FRAME_SAMPLES = 480
_HARMONICS = 9
_RATES = (8, 5, 3)
_KERNELS = (3, 7, 11)
_SOURCE_KERNELS = (7, 7, 11)
_SOURCE_STRIDES = (15, 3, 1)
_DILATIONS = (1, 3, 5)
_FFT, _FFT_HOP, _FFT_BINS = 16, 4, 9
_F0_LAYERS = 5
_VOICED_ABOVE_HZ = 10
_SINE_AMPLITUDE = 0.1
_VOICED_NOISE = 0.003
_UNVOICED_NOISE = 0.1 / 3
_SLOPE = 0.1
_MAX_MAGNITUDE = 1e2
_MAX_SAMPLE = 0.99


class _Snake:
    """x + sin(a x)^2 / a, per channel."""

    def __init__(self, alpha: Tensor) -> None:
        self._alpha = alpha[:, None]
        self._inverse = 1.0 / (self._alpha + 1e-9)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.addcmul(x, self._inverse, (x * self._alpha).sin_().square_())


class _Residual:
    """Three dilated pairs of convolutions, each added to its input."""

    def __init__(self, weights: Weights, kernel: int) -> None:
        self._steps: list[tuple[_Snake, Conv, _Snake, Conv]] = [
            (
                _Snake(weights[f"activations1.{i}.alpha"]),
                weights.conv(
                    f"convs1.{i}", padding=(kernel - 1) * dilation // 2, dilation=dilation
                ),
                _Snake(weights[f"activations2.{i}.alpha"]),
                weights.conv(f"convs2.{i}", padding=(kernel - 1) // 2),
            )
            for i, dilation in enumerate(_DILATIONS)
        ]

    def __call__(self, x: Tensor) -> Tensor:
        for snake_1, conv_1, snake_2, conv_2 in self._steps:
            x = x + conv_2(snake_2(conv_1(snake_1(x))))
        return x


class _Stage:
    """One up-sampling step: mel branch up, source branch down, added, then three residuals."""

    def __init__(self, weights: Weights, index: int) -> None:
        self._weight = weights[f"ups.{index}.weight"]
        self._bias = weights[f"ups.{index}.bias"]
        self._rate = _RATES[index]
        self._padding = (self._weight.shape[2] - self._rate) // 2
        stride = _SOURCE_STRIDES[index]
        self._source = weights.conv(
            f"source_downs.{index}", stride=stride, padding=0 if stride == 1 else stride // 2
        )
        self._source_residual = _Residual(
            weights.under(f"source_resblocks.{index}"), _SOURCE_KERNELS[index]
        )
        self._residuals = [
            _Residual(weights.under(f"resblocks.{len(_KERNELS) * index + j}"), kernel)
            for j, kernel in enumerate(_KERNELS)
        ]
        self._pad_first = index == len(_RATES) - 1

    def __call__(self, x: Tensor, spectrum: Tensor) -> Tensor:
        x = F.conv_transpose1d(
            F.leaky_relu(x, _SLOPE), self._weight, self._bias, self._rate, self._padding
        )
        if self._pad_first:
            x = F.pad(x, (1, 0), mode="reflect")
        x = x + self._source_residual(self._source(spectrum))
        total = self._residuals[0](x)
        for residual in self._residuals[1:]:
            total = total + residual(x)
        return total / len(self._residuals)


class HiFT:
    """The vocoder of `hift.pt` (weight norm folded). Has no state: it is given what it kept."""

    def __init__(self, weights: Weights) -> None:
        self._f0 = [
            weights.conv(f"f0_predictor.condnet.{2 * i}", padding=1) for i in range(_F0_LAYERS)
        ]
        self._f0_out = weights.linear("f0_predictor.classifier")
        self._source_mix = weights.linear("m_source.l_linear")
        self._pre = weights.conv("conv_pre", padding=3)
        self._stages = [_Stage(weights, i) for i in range(len(_RATES))]
        self._post = weights.conv("conv_post", padding=3)
        device = self._f0_out.weight.device
        self._window = torch.hann_window(_FFT, device=device)
        self._orders = torch.arange(1, _HARMONICS + 1, device=device)

    def __call__(
        self, mel: Tensor, kept_source: Tensor, noise_seeds: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        """mel [B, 80, T] -> samples [B, 480 T], source [B, 1, 480 T].

        kept_source [B, 1, L]: the end of the last chunk's source; it replaces the beginning of
        this one. noise_seeds: one a stream; phase and noise come from nothing else.
        """
        source = self._make_source(self._predict_f0(mel), noise_seeds)
        source[:, :, : kept_source.shape[2]] = kept_source
        spectrum = torch.view_as_real(
            torch.stft(source[:, 0], _FFT, _FFT_HOP, _FFT, self._window, return_complex=True)
        )
        spectrum = torch.cat([spectrum[..., 0], spectrum[..., 1]], 1)
        x = self._pre(mel)
        for stage in self._stages:
            x = stage(x, spectrum)
        x = self._post(F.leaky_relu(x))
        magnitude = x[:, :_FFT_BINS].exp().clip(max=_MAX_MAGNITUDE)
        phase = torch.sin(x[:, _FFT_BINS:])
        bins = torch.complex(magnitude * phase.cos(), magnitude * phase.sin())
        samples = torch.istft(bins, _FFT, _FFT_HOP, _FFT, self._window)
        return samples.clamp(-_MAX_SAMPLE, _MAX_SAMPLE), source

    def _predict_f0(self, mel: Tensor) -> Tensor:
        """[B, T] in Hz."""
        x = mel
        for conv in self._f0:
            x = F.elu(conv(x))
        return self._f0_out(x.mT)[..., 0].abs()

    def _make_source(self, f0: Tensor, noise_seeds: Sequence[int]) -> Tensor:
        """Harmonic source [B, 1, 480 T] of f0 [B, T]."""
        hz = f0.repeat_interleave(FRAME_SAMPLES, 1)[..., None]
        phase, noise = _draw(noise_seeds, hz.shape[1], hz.device)
        turns = (hz * self._orders) / SAMPLE_RATE_HZ % 1
        turns[:, 0] += phase
        slow = F.interpolate(turns.mT, scale_factor=1 / FRAME_SAMPLES, mode="linear")
        angle = slow.cumsum(-1) * (2 * math.pi) * FRAME_SAMPLES
        fast = F.interpolate(angle, scale_factor=float(FRAME_SAMPLES), mode="linear")
        sine = torch.sin(fast).mT * _SINE_AMPLITUDE
        voiced = (hz > _VOICED_ABOVE_HZ).float()
        level = voiced * _VOICED_NOISE + (1 - voiced) * _UNVOICED_NOISE
        return torch.tanh(self._source_mix(sine * voiced + level * noise)).mT


def _draw(seeds: Sequence[int], samples: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First phase [B, 9] (the fundamental's is 0) and noise [B, samples, 9] of each stream. Drawn
    on the CPU, so that a device does not change them."""
    phases: list[Tensor] = []
    noises: list[Tensor] = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        phase = torch.rand(_HARMONICS, generator=generator)
        phase[0] = 0
        phases.append(phase)
        noises.append(torch.randn(_HARMONICS, samples, generator=generator).mT)
    return torch.stack(phases).to(device), torch.stack(noises).to(device)
