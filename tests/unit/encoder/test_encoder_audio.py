"""The streaming audio encoder: equal to a whole pass, reset, restored, interleaved, batched."""

import numpy as np
import pytest
import torch
from torch.nn import functional
from transformers import WhisperFeatureExtractor

from duplex_sidecar.stages.encoder.audio import AudioState, open_state
from duplex_sidecar.stages.encoder.chunks import PcmFault, cut
from duplex_sidecar.stages.encoder.mel import MelFrontEnd, empty_mel

pytestmark = pytest.mark.unit


def chunks_of(pcm) -> list[bytes]:
    """As `cut`, without its limit."""
    data = pcm.tobytes()
    return [data[:33_120], *(data[at : at + 32_000] for at in range(33_120, len(data), 32_000))]


def run(audio, chunks, state: AudioState | None = None) -> tuple[list[torch.Tensor], AudioState]:
    state = open_state(0) if state is None else state
    rows = []
    for chunk in chunks:
        (step,) = audio.step([(state, chunk)])
        assert step.rows is not None
        rows.append(step.rows)
        state = step.state
    return rows, state


def whole_pass(encoders, chunks) -> torch.Tensor:
    """Rows of up to 29 chunks in one pass: every chunk sees itself and the earlier ones."""
    mel_front_end, state = MelFrontEnd(80), empty_mel(0)
    frames = []
    for chunk in chunks:
        state, mel = mel_front_end.step(state, chunk)
        conv = convolved(encoders, mel)
        frames.append(conv[:, (0 if len(frames) == 0 else 1) :][:, :50].T)
    return transformed(encoders, torch.cat(frames))


def convolved(encoders, mel) -> torch.Tensor:
    weights, conv = encoders.weights, mel[None]
    for name, stride in (("conv1", 1), ("conv2", 2)):
        conv = functional.gelu(
            functional.conv1d(
                conv,
                weights[f"apm.{name}.weight"],
                weights[f"apm.{name}.bias"],
                stride=stride,
                padding=1,
            )
        )
    return conv[0]


def transformed(encoders, hidden) -> torch.Tensor:
    """Rows of these frames of the CNN under a block mask of one second."""
    weights, shape = encoders.weights, encoders.shape
    count = len(hidden)
    hidden = hidden + weights["apm.embed_positions.weight"][:count]
    second = torch.arange(count) // 50
    blocked = second[:, None] < second[None, :]

    def linear(rows, name):
        return functional.linear(rows, weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def norm(rows, name):
        return functional.layer_norm(
            rows, rows.shape[-1:], weights[f"{name}.weight"], weights[f"{name}.bias"]
        )

    for layer in range(shape.audio_layers):
        name = f"apm.layers.{layer}"
        inner = norm(hidden, f"{name}.self_attn_layer_norm")
        query, key, value = (
            linear(inner, f"{name}.self_attn.{kind}_proj")
            .view(count, shape.audio_heads, -1)
            .permute(1, 0, 2)
            for kind in "qkv"
        )
        scores = query @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        mixed = scores.masked_fill(blocked, float("-inf")).softmax(-1) @ value
        mixed = mixed.permute(1, 0, 2).reshape(count, -1)
        hidden = hidden + linear(mixed, f"{name}.self_attn.out_proj")
        inner = functional.gelu(linear(norm(hidden, f"{name}.final_layer_norm"), f"{name}.fc1"))
        hidden = hidden + linear(inner, f"{name}.fc2")
    hidden = norm(hidden, "apm.layer_norm")
    rows = linear(hidden, "audio_projection_layer.linear1").relu()
    rows = linear(rows, "audio_projection_layer.linear2")
    return rows.view(-1, 5, shape.hidden_size).mean(1)


def test_chunk_by_chunk_equals_a_whole_pass_and_the_cache_is_dropped_after_29(encoders, make_sound):
    chunks = chunks_of(make_sound(31, 3))
    rows, _ = run(encoders.audio, chunks)
    assert all(row.shape == (10, 256) for row in rows)
    expected = whole_pass(encoders, chunks[:29])
    assert (torch.cat(rows[:29]) - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("samples", [1_600, 41_600, 96_000, 480_000])
def test_a_reference_clip_is_heard_whole_under_a_block_mask(encoders, make_sound, samples):
    """Against transformers' features of the padded clip. A rest of less than a row is cut off."""
    clip = make_sound(30, 5)[:480_000].astype(np.float32)[-samples:] / 32_768
    features = WhisperFeatureExtractor(feature_size=80)(
        clip, sampling_rate=16_000, return_tensors="pt", padding="max_length"
    )["input_features"][0, :, : samples // 160]
    expected = transformed(encoders, convolved(encoders, features).T)
    with_a_rest = np.concatenate([clip, np.ones(1_000 if samples < 480_000 else 0, np.float32)])
    rows = encoders.audio.reference(with_a_rest)
    assert rows.shape == (samples // 1_600, 256)
    assert (rows - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("samples", [0, 1_599, 481_600])
def test_a_clip_without_a_row_or_too_long_is_refused(encoders, samples):
    with pytest.raises(ValueError, match="reference clip"):
        encoders.audio.reference(np.zeros(samples, np.float32))


def test_resets_are_told_with_the_mark_to_restore_from(encoders, make_sound):
    state, resets = open_state(0), {}
    for second, chunk in enumerate(chunks_of(make_sound(121, 4))):
        (step,) = encoders.audio.step([(state, chunk)])
        state = step.state
        if step.reset:
            resets[second] = state.reset_mark_samples // 16_000
    # Every 29 chunks; the mark is the begin of the mel buffer, which slides by 10 s.
    assert resets == {29: 10, 58: 30, 87: 60, 116: 90}


def test_a_restore_at_every_second_up_to_120_gives_the_next_rows(encoders, make_sound):
    pcm = make_sound(122, 5)
    chunks = chunks_of(pcm)
    rows, marks, state = [], [], open_state(0)
    for chunk in chunks:
        marks.append(state.reset_mark_samples)
        (step,) = encoders.audio.step([(state, chunk)])
        rows.append(step.rows)
        state = step.state
    restored = []
    # A restore at second k + 1 replays what the one at k does and one chunk more, so one walk from
    # each mark passes through the restored states of all its seconds.
    for mark in sorted(set(marks)):
        seconds = [second for second in range(121) if marks[second] == mark]
        replay = cut(pcm[mark : 16_560 + 16_000 * seconds[-1]].tobytes(), first=True)
        assert not isinstance(replay, PcmFault)
        state = open_state(mark)
        for chunk in replay:
            second = state.next_chunk
            (step,) = encoders.audio.step([(state, chunk)])
            if second in seconds:
                assert step.rows is not None
                assert (step.rows - rows[second]).abs().max() <= 1e-5
                restored.append(second)
            state = step.state
    assert restored == list(range(121))


def test_before_the_replay_reaches_the_reset_there_are_no_rows(encoders, make_sound):
    state = open_state(160_000)
    for chunk in chunks_of(make_sound(19, 6)):
        (step,) = encoders.audio.step([(state, chunk)])
        assert step.rows is None
        state = step.state
    (step,) = encoders.audio.step([(state, bytes(32_000))])
    assert step.rows is not None
    assert step.reset
    assert step.state.reset_mark_samples == 160_000


@pytest.mark.parametrize("start", [-16_000, 1, 560, 16_560])
def test_a_start_within_a_second_is_refused(start):
    with pytest.raises(ValueError, match="multiple"):
        open_state(start)


def test_interleaved_sessions_have_the_rows_that_each_has_alone(short_encoders, make_sound):
    audio = short_encoders.audio
    sounds = [chunks_of(make_sound(8, seed)) for seed in (7, 8, 9)]
    alone = [run(audio, chunks)[0] for chunks in sounds]
    states = [open_state(0) for _ in sounds]
    for second in range(8):
        for session in range(3):
            (step,) = audio.step([(states[session], sounds[session][second])])
            assert torch.equal(step.rows, alone[session][second])
            states[session] = step.state


def test_a_batch_of_sessions_of_different_ages_equals_single_runs(short_encoders, make_sound):
    audio = short_encoders.audio
    sounds = [chunks_of(make_sound(9, seed)) for seed in (10, 11, 12)]
    alone = [run(audio, chunks)[0] for chunks in sounds]
    ages = [0, 1, 4]
    states = [run(audio, chunks[:age])[1] for age, chunks in zip(ages, sounds, strict=True)]
    for step_number in range(5):
        batch = [
            (state, chunks[age + step_number])
            for state, chunks, age in zip(states, sounds, ages, strict=True)
        ]
        steps = audio.step(batch)
        for session, step in enumerate(steps):
            expected = alone[session][ages[session] + step_number]
            assert (step.rows - expected).abs().max() <= 1e-5
        states = [step.state for step in steps]


def test_a_batch_may_hold_a_session_that_is_still_replaying(encoders, make_sound):
    chunks = chunks_of(make_sound(3, 13))
    alone, _ = run(encoders.audio, chunks)
    live, replaying = open_state(0), open_state(160_000)
    for second, chunk in enumerate(chunks):
        step, other = encoders.audio.step([(live, chunk), (replaying, chunk)])
        assert (step.rows - alone[second]).abs().max() <= 1e-5
        assert other.rows is None
        live, replaying = step.state, other.state


def test_a_step_that_is_forgotten_leaves_no_trace(short_encoders, make_sound):
    """Also across a reset: the old cache is not touched by a step that dropped it."""
    audio = short_encoders.audio
    chunks = chunks_of(make_sound(7, 14))
    others = chunks_of(make_sound(7, 15))
    expected, _ = run(audio, chunks)
    state = open_state(0)
    for second, chunk in enumerate(chunks):
        lost = state
        for other in others[second:][:4]:
            (step,) = audio.step([(lost, other)])
            lost = step.state
        (step,) = audio.step([(state, chunk)])
        assert torch.equal(step.rows, expected[second])
        state = step.state
