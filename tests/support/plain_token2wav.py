"""Codes to sound, written once more and plainly: what Code2Wav's streams are compared with.

A whole turn behind its voice's prompt in one pass: no caches, no stream, no batch, and nothing of
the product. Weights are read by their public names (`flow.pt`, `hift.pt`), the arithmetic is that
of the public modules in torch. A turn comes in chunks all the same, and where their borders are is
heard; what a border does is said here by rules over the whole turn (model contract, section E):

- *Look-ahead.* A code sees the three after it. Behind the turn's last one there is silence; behind
  the prompt's last one stand the prompt's own first three, and not the turn.
- *Attention.* The conformer's frames see those of their own chunk and of all chunks before, the
  prompt is the first. Frames of the flow see their own chunk and what is kept of those before:
  the prompt's length and 100 more, counted from the newest chunk to the oldest, of which the first
  ones and the last 100 stay. (So it is the beginning of the prompt that stays, as in the public
  code, and its end that goes.)
  What the product alone does is not here: after a minute of a turn the conformer forgets.
- *Noise.* The flow begins a chunk from one fixed noise, at the place of the number of frames kept.
- *Vocoder.* It takes a chunk together with the eight frames before. The harmonic source of those is
  the one that was made for them first. Both sounds of the eight frames fade into each other.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

AHEAD_CODES = 3
KEPT_FRAMES = 100
FRAMES_A_CODE = 2
MEL_BINS = 80
FRAME_SAMPLES = 480
FADE_FRAMES = 8
RATE_HZ = 24_000
HARMONICS = 9
RATES, KERNELS, DILATIONS = (8, 5, 3), (3, 7, 11), (1, 3, 5)
SOURCE_RATES, SOURCE_KERNELS = (15, 3, 1), (7, 7, 11)


@dataclass(frozen=True)
class PlainVoice:
    """prompt_codes [P], prompt_mel [2P, 80], speaker [192]."""

    prompt_codes: Tensor
    prompt_mel: Tensor
    speaker: Tensor


@dataclass(frozen=True)
class PlainTurn:
    """codes: all of a turn, the silence before its first one included. chunks: how many of them
    each chunk adds. seed: names the turn."""

    codes: Sequence[int]
    chunks: Sequence[int]
    seed: str

    def __post_init__(self) -> None:
        assert sum(self.chunks) == len(self.codes)


class PlainToken2Wav:
    """The two state dicts as they lie in their files; the settings of the flow."""

    def __init__(
        self,
        flow: Mapping[str, Tensor],
        hift: Mapping[str, Tensor],
        *,
        ode_steps: int = 10,
        guidance: float = 0.7,
        noise_seed: int = 0,
    ) -> None:
        self.flow = dict(flow)
        self.hift = _without_weight_norm(hift)
        self.ode_steps = ode_steps
        self.guidance = guidance
        generator = torch.Generator().manual_seed(noise_seed)
        self.noise = torch.randn(1, MEL_BINS, 30_000, generator=generator)[0].T

    @torch.inference_mode()
    def sound(self, voice: PlainVoice, turn: PlainTurn) -> Tensor:
        """All samples of the turn, 960 a code."""
        return self._vocode(self.mel(voice, turn), turn)

    @torch.inference_mode()
    def mel(self, voice: PlainVoice, turn: PlainTurn) -> Tensor:
        """[2 frames a code, 80]"""
        prompt = len(voice.prompt_codes)
        blocks = _blocks([prompt, *turn.chunks])
        mu = self._encode(voice.prompt_codes, torch.tensor(list(turn.codes)), blocks)
        speaker = _linear(self.flow, "spk_embed_affine_layer", F.normalize(voice.speaker, dim=0))
        shown = torch.zeros_like(mu)
        shown[: FRAMES_A_CODE * prompt] = voice.prompt_mel
        condition = torch.cat([mu, speaker.expand_as(mu), shown], 1)
        frames = self._integrate(condition, [FRAMES_A_CODE * n for n in (prompt, *turn.chunks)])
        return frames[FRAMES_A_CODE * prompt :]

    # --- codes to the mean of the flow: a conformer ----------------------------------------------

    def _encode(self, prompt: Tensor, codes: Tensor, blocks: Tensor) -> Tensor:
        """[2 frames a code of prompt and turn, 80]"""
        w, table = self.flow, self.flow["input_embedding.weight"]
        before = self._embed("encoder.embed", table[torch.cat([prompt, prompt[:AHEAD_CODES]])])
        after = F.pad(self._embed("encoder.embed", table[codes]), (0, 0, 0, AHEAD_CODES))
        ahead = "encoder.pre_lookahead_layer"
        seen = torch.cat([_conv_of(w, f"{ahead}.conv1", part) for part in (before, after)])
        x = torch.cat([before[:-AHEAD_CODES], after[:-AHEAD_CODES]])
        x = x + _causal_conv(w, f"{ahead}.conv2", F.leaky_relu(seen))
        x = self._conformer("encoder.encoders", x, blocks)
        x = x.repeat_interleave(FRAMES_A_CODE, 0)
        x = self._embed("encoder.up_embed", _causal_conv(w, "encoder.up_layer.conv", x))
        blocks = blocks.repeat_interleave(FRAMES_A_CODE)
        x = self._conformer("encoder.up_encoders", x, blocks)
        return _linear(w, "encoder_proj", _norm(w, "encoder.after_norm", x))

    def _embed(self, name: str, x: Tensor) -> Tensor:
        x = _norm(self.flow, f"{name}.out.1", _linear(self.flow, f"{name}.out.0", x))
        return x * math.sqrt(x.shape[1])

    def _conformer(self, name: str, x: Tensor, blocks: Tensor) -> Tensor:
        sees = blocks[:, None] >= blocks[None]
        for layer in range(_count(self.flow, name)):
            key = f"{name}.{layer}"
            y = _norm(self.flow, f"{key}.norm_mha", x, 1e-12)
            x = x + self._relative_attention(f"{key}.self_attn", y, sees)
            y = _norm(self.flow, f"{key}.norm_ff", x, 1e-12)
            y = F.silu(_linear(self.flow, f"{key}.feed_forward.w_1", y))
            x = x + _linear(self.flow, f"{key}.feed_forward.w_2", y)
        return x

    def _relative_attention(self, name: str, x: Tensor, sees: Tensor) -> Tensor:
        w, (length, size) = self.flow, x.shape
        heads, width = w[f"{name}.pos_bias_u"].shape
        query, key, value = (
            _linear(w, f"{name}.linear_{part}", x).view(length, heads, width).transpose(0, 1)
            for part in ("q", "k", "v")
        )
        # One sinusoid for each distance from one frame to another, sine and cosine by turns.
        distance = torch.arange(-(length - 1), length, dtype=x.dtype)
        rates = torch.exp(torch.arange(0, size, 2).float() * -(math.log(10_000.0) / size))
        angles = distance[:, None] * rates.to(x.dtype)
        sinusoids = torch.stack([angles.sin(), angles.cos()], -1).view(len(distance), size)
        places = F.linear(sinusoids, w[f"{name}.linear_pos.weight"])
        places = places.view(len(distance), heads, width).transpose(0, 1)
        number = torch.arange(length)
        which = number[:, None] - number[None] + length - 1
        by_content = (query + w[f"{name}.pos_bias_u"][:, None]) @ key.transpose(1, 2)
        by_place = (query + w[f"{name}.pos_bias_v"][:, None]) @ places.transpose(1, 2)
        by_place = by_place.gather(2, which.expand(heads, -1, -1))
        scores = (by_content + by_place) / math.sqrt(width)
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        return _linear(w, f"{name}.linear_out", (weights @ value).transpose(0, 1).flatten(1))

    # --- from noise to mel: Euler steps through a transformer's field -----------------------------

    def _integrate(self, condition: Tensor, chunks: Sequence[int]) -> Tensor:
        sees, kept = _kept_frames(chunks)
        x = torch.cat(
            [self.noise[n : n + frames] for n, frames in zip(kept, chunks, strict=True)]
        ).to(condition.dtype)
        nothing = torch.zeros_like(condition)
        knots = 1 - torch.cos(torch.linspace(0, 1, self.ode_steps + 1) * 0.5 * math.pi)
        time, step = knots[0], knots[1] - knots[0]
        for number in range(1, self.ode_steps + 1):
            guided = self._velocity(x, condition, float(time), sees)
            free = self._velocity(x, nothing, float(time), sees)
            x = x + step * ((1 + self.guidance) * guided - self.guidance * free)
            time = time + step
            if number < self.ode_steps:
                step = knots[number + 1] - time
        return x

    def _velocity(self, x: Tensor, condition: Tensor, time: float, sees: Tensor) -> Tensor:
        w, name = self.flow, "decoder.estimator"
        rates = torch.exp(-math.log(10_000.0) * torch.arange(128).float() / 128)
        angles = rates * time * 1_000.0
        y = torch.cat([angles.cos(), angles.sin()]).to(x.dtype)
        y = F.silu(_linear(w, f"{name}.t_embedder.mlp.0", y))
        when = F.silu(_linear(w, f"{name}.t_embedder.mlp.2", y))
        x = _linear(w, f"{name}.in_proj", torch.cat([x, condition], 1))
        for block in range(_count(w, f"{name}.blocks")):
            x = self._block(f"{name}.blocks.{block}", x, when, sees)
        shift, scale = _linear(w, f"{name}.final_layer.adaLN_modulation.1", when).chunk(2)
        return _linear(w, f"{name}.final_layer.linear", _modulated(x, shift, scale))

    def _block(self, name: str, x: Tensor, when: Tensor, sees: Tensor) -> Tensor:
        w = self.flow
        shifts = _linear(w, f"{name}.adaLN_modulation.1", when).chunk(9)
        y = _modulated(x, shifts[0], shifts[1])
        x = x + shifts[2] * self._attention(f"{name}.attn", y, sees)
        y = _modulated(x, shifts[6], shifts[7])
        y = F.mish(_norm(w, f"{name}.conv.block.3", _causal_conv(w, f"{name}.conv.block.1", y)))
        x = x + shifts[8] * _causal_conv(w, f"{name}.conv.block.6", y)
        y = _linear(w, f"{name}.mlp.fc1", _modulated(x, shifts[3], shifts[4]))
        return x + shifts[5] * _linear(w, f"{name}.mlp.fc2", F.gelu(y, approximate="tanh"))

    def _attention(self, name: str, x: Tensor, sees: Tensor) -> Tensor:
        w, (length, _) = self.flow, x.shape
        width = len(w[f"{name}.q_norm.weight"])
        query, key, value = (
            _linear(w, f"{name}.to_{part}", x).view(length, -1, width).transpose(0, 1)
            for part in ("q", "k", "v")
        )
        query, key = _norm(w, f"{name}.q_norm", query), _norm(w, f"{name}.k_norm", key)
        scores = query @ key.transpose(1, 2) / math.sqrt(width)
        weights = scores.masked_fill(~sees, float("-inf")).softmax(-1)
        return _linear(w, f"{name}.proj", (weights @ value).transpose(0, 1).flatten(1))

    # --- mel to samples: harmonics and noise, shaped by convolutions ------------------------------

    def _vocode(self, mel: Tensor, turn: PlainTurn) -> Tensor:
        """mel [T, 80] of the whole turn."""
        sound = mel.new_zeros(FRAME_SAMPLES * len(mel))
        source = mel.new_zeros(FRAME_SAMPLES * len(mel))
        fade_samples = FADE_FRAMES * FRAME_SAMPLES
        fade = torch.hamming_window(2 * fade_samples, periodic=False, dtype=torch.float64)
        begun = 0
        for chunk in turn.chunks:
            first = FRAMES_A_CODE * begun
            end, start = first + FRAMES_A_CODE * chunk, max(0, first - FADE_FRAMES)
            frames = mel[start:end].T
            seed = _noise_seed(turn.seed, begun)
            own = self._source(self._pitch(frames), seed)
            known = FRAME_SAMPLES * (first - start)
            source[FRAME_SAMPLES * first : FRAME_SAMPLES * end] = own[known:]
            piece = source[FRAME_SAMPLES * start : FRAME_SAMPLES * end]
            made = self._shape(frames, piece)
            if known:
                before = sound[FRAME_SAMPLES * start : FRAME_SAMPLES * first]
                both = made[:known] * fade[:fade_samples] + before * fade[fade_samples:]
                made[:known] = both.to(made.dtype)
            sound[FRAME_SAMPLES * start : FRAME_SAMPLES * end] = made
            begun += chunk
        return sound

    def _pitch(self, mel: Tensor) -> Tensor:
        """mel [80, T] -> [T] in Hz."""
        x = mel
        for layer in range(5):
            x = F.elu(_conv(self.hift, f"f0_predictor.condnet.{2 * layer}", x, padding=1))
        return _linear(self.hift, "f0_predictor.classifier", x.T)[:, 0].abs()

    def _source(self, pitch: Tensor, seed: int) -> Tensor:
        """Nine harmonics and noise, mixed to one: [480 T]."""
        generator = torch.Generator().manual_seed(seed)
        phase = torch.rand(HARMONICS, generator=generator)
        phase[0] = 0
        noise = torch.randn(HARMONICS, FRAME_SAMPLES * len(pitch), generator=generator)
        hz = pitch.repeat_interleave(FRAME_SAMPLES)
        cycles = torch.arange(1, HARMONICS + 1)[:, None] * hz / RATE_HZ % 1
        cycles[:, 0] += phase.to(hz.dtype)
        # Summed up frame by frame and drawn out again, as the public module does.
        slow = F.interpolate(cycles[None], scale_factor=1 / FRAME_SAMPLES, mode="linear")
        angle = slow.cumsum(2) * (2 * math.pi) * FRAME_SAMPLES
        sine = F.interpolate(angle, scale_factor=float(FRAME_SAMPLES), mode="linear")[0].sin()
        voiced = (hz > 10).to(hz.dtype)
        level = 0.003 * voiced + 0.1 / 3 * (1 - voiced)
        mixed = 0.1 * sine * voiced + level * noise.to(hz.dtype)
        return _linear(self.hift, "m_source.l_linear", mixed.T)[:, 0].tanh()

    def _shape(self, mel: Tensor, source: Tensor) -> Tensor:
        """mel [80, T], source [480 T] -> samples [480 T]."""
        w, window = self.hift, torch.hann_window(16).to(mel.dtype)
        spectrum = torch.stft(source, 16, 4, 16, window, return_complex=True)
        spectrum = torch.cat([spectrum.real, spectrum.imag])
        x = _conv(w, "conv_pre", mel, padding=3)
        for stage, rate in enumerate(RATES):
            weight = w[f"ups.{stage}.weight"]
            padding = (weight.shape[2] - rate) // 2
            x = F.conv_transpose1d(
                F.leaky_relu(x, 0.1)[None], weight, w[f"ups.{stage}.bias"], rate, padding
            )[0]
            if stage == len(RATES) - 1:
                x = F.pad(x, (1, 0), mode="reflect")
            stride = SOURCE_RATES[stage]
            down = _conv(w, f"source_downs.{stage}", spectrum, padding=stride // 2, stride=stride)
            x = x + self._residual(f"source_resblocks.{stage}", down, SOURCE_KERNELS[stage])
            several = [
                self._residual(f"resblocks.{len(KERNELS) * stage + number}", x, kernel)
                for number, kernel in enumerate(KERNELS)
            ]
            x = torch.stack(several).mean(0)
        x = _conv(w, "conv_post", F.leaky_relu(x), padding=3)
        magnitude, phase = x[:9].exp().clip(max=100.0), x[9:].sin()
        bins = torch.complex(magnitude * phase.cos(), magnitude * phase.sin())
        return torch.istft(bins, 16, 4, 16, window).clamp(-0.99, 0.99)

    def _residual(self, name: str, x: Tensor, kernel: int) -> Tensor:
        w = self.hift
        for step, dilation in enumerate(DILATIONS):
            y = _snake(w[f"{name}.activations1.{step}.alpha"], x)
            padding = (kernel - 1) * dilation // 2
            y = _conv(w, f"{name}.convs1.{step}", y, padding=padding, dilation=dilation)
            y = _snake(w[f"{name}.activations2.{step}.alpha"], y)
            x = x + _conv(w, f"{name}.convs2.{step}", y, padding=(kernel - 1) // 2)
        return x


# --- borders --------------------------------------------------------------------------------------


def _blocks(sizes: Sequence[int]) -> Tensor:
    """The number of its block for each place."""
    return torch.arange(len(sizes)).repeat_interleave(torch.tensor(list(sizes)))


def _kept_frames(chunks: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Which frame of the flow sees which, [T, T]; and how many are kept when each chunk begins. The
    first chunk is the prompt."""
    prompt, total = chunks[0], sum(chunks)
    sees = torch.zeros(total, total, dtype=torch.bool)
    kept: list[int] = []
    counts: list[int] = []
    begun = 0
    for frames in chunks:
        counts.append(len(kept))
        all_seen = [*range(begun, begun + frames), *kept]
        sees[begun : begun + frames, all_seen] = True
        cut = len(all_seen) > prompt + KEPT_FRAMES
        kept = [*all_seen[:prompt], *all_seen[-KEPT_FRAMES:]] if cut else all_seen
        begun += frames
    return sees, counts


def _noise_seed(seed: str, begun_codes: int) -> int:
    """Of a chunk's harmonic source. Ours: the public code takes what its process draws next."""
    digest = hashlib.blake2b(f"{seed}:{begun_codes}".encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


# --- layers by their public names -----------------------------------------------------------------

Named = Mapping[str, Tensor]


def _without_weight_norm(named: Named) -> dict[str, Tensor]:
    ends = (".parametrizations.weight.original0", ".parametrizations.weight.original1")
    plain = {name: value for name, value in named.items() if not name.endswith(ends)}
    for name, magnitude in named.items():
        if name.endswith(ends[0]):
            stem = name.removesuffix(ends[0])
            direction = named[stem + ends[1]]
            length = direction.flatten(1).norm(dim=1).view(-1, 1, 1)
            plain[f"{stem}.weight"] = direction / length * magnitude
    return plain


def _count(named: Named, name: str) -> int:
    return len(
        {key.removeprefix(f"{name}.").split(".")[0] for key in named if key.startswith(f"{name}.")}
    )


def _linear(named: Named, name: str, x: Tensor) -> Tensor:
    return F.linear(x, named[f"{name}.weight"], named.get(f"{name}.bias"))


def _norm(named: Named, name: str, x: Tensor, epsilon: float = 1e-5) -> Tensor:
    weight = named[f"{name}.weight"]
    return F.layer_norm(x, weight.shape, weight, named[f"{name}.bias"], epsilon)


def _modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return F.layer_norm(x, x.shape[1:], eps=1e-6) * (1 + scale) + shift


def _conv(
    named: Named, name: str, x: Tensor, *, padding: int = 0, stride: int = 1, dilation: int = 1
) -> Tensor:
    """[inputs, T] -> [outputs, T']"""
    weight, bias = named[f"{name}.weight"], named[f"{name}.bias"]
    return F.conv1d(x[None], weight, bias, stride, padding, dilation)[0]


def _conv_of(named: Named, name: str, x: Tensor) -> Tensor:
    """[T, inputs] -> [T - kernel + 1, outputs]"""
    return _conv(named, name, x.T).T


def _causal_conv(named: Named, name: str, x: Tensor) -> Tensor:
    """[T, inputs] -> [T, outputs]: silence before the first, none after the last."""
    kernel = named[f"{name}.weight"].shape[2]
    return _conv_of(named, name, F.pad(x, (0, 0, kernel - 1, 0)))


def _snake(alpha: Tensor, x: Tensor) -> Tensor:
    return x + (x * alpha[:, None]).sin() ** 2 / (alpha[:, None] + 1e-9)
