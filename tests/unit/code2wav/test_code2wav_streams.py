"""Streams of the vocoder: exact counts, no stream ever touching another. Their sound is compared
with a plain reference in `test_code2wav_reference`."""

import dataclasses
import io

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.stream import Chunk, StreamState, Vocoder, noise_seed

pytestmark = pytest.mark.unit

BATCH_TOLERANCE = 1e-4


def turn_codes(count: int, key: int = 3) -> list[int]:
    return [(5 * i * i + key * i) % 64 for i in range(count)]


def turn_chunks(units: int, flush_codes: int, key: int = 3, seed: str = "turn") -> list[Chunk]:
    """A turn as the sidecar sends it: 25 new codes and 3 that were sent before, then the rest."""
    codes = turn_codes(25 * units + flush_codes, key)
    chunks = [Chunk(tuple(codes[25 * i : 25 * i + 28]), False, seed) for i in range(units)]
    return [*chunks, Chunk(tuple(codes[25 * units :]), True, seed)]


def run_alone(
    vocoder: Vocoder, state: StreamState, chunks: list[Chunk]
) -> tuple[list[torch.Tensor], list[StreamState]]:
    sounds: list[torch.Tensor] = []
    states: list[StreamState] = []
    for chunk in chunks:
        ((sound, state),) = vocoder.advance([state], [chunk])
        sounds.append(sound)
        states.append(state)
    return sounds, states


def tensors_of(state: StreamState) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def visit(value: object) -> None:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, tuple):
            for part in value:
                visit(part)
        elif dataclasses.is_dataclass(value):
            for field in dataclasses.fields(value):
                visit(getattr(value, field.name))

    visit(state)
    return found


def equal_states(one: StreamState, other: StreamState) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors_of(one), tensors_of(other), strict=True))


def test_chunk_lengths(vocoder: Vocoder, voice_a: Voice) -> None:
    """20,160 first, 24,000 steady, the last one flushes."""
    sounds, _ = run_alone(vocoder, vocoder.start(voice_a), turn_chunks(5, 10))
    assert [len(sound) for sound in sounds] == [20_160, *[24_000] * 4, 13_440]


def test_turn_length_is_480_samples_a_frame(vocoder: Vocoder, voice_a: Voice) -> None:
    """Nothing is lost or doubled at the seams: two frames a code, the left context included."""
    for units, flush in ((1, 3), (2, 7), (3, 28)):
        sounds, _ = run_alone(vocoder, vocoder.start(voice_a), turn_chunks(units, flush))
        assert sum(len(sound) for sound in sounds) == (25 * units + flush) * 960


def test_interleaved_streams_equal_alone(vocoder: Vocoder, voice_a: Voice, voice_b: Voice) -> None:
    """Two sessions of different voices, chunk by chunk in turns: to the last bit what each has
    alone, and their start states are as before."""
    starts = [vocoder.start(voice_a), vocoder.start(voice_b), vocoder.start(voice_a)]
    copies = [[tensor.clone() for tensor in tensors_of(start)] for start in starts]
    turns = [turn_chunks(2, 5, key, f"s{key}") for key in (3, 4, 5)]
    alone = [run_alone(vocoder, s, t)[0] for s, t in zip(starts, turns, strict=True)]
    states = list(starts)
    for position in range(3):
        for stream in (1, 0, 2):
            ((sound, states[stream]),) = vocoder.advance(
                [states[stream]], [turns[stream][position]]
            )
            assert torch.equal(sound, alone[stream][position])
    for start, copy in zip(starts, copies, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(tensors_of(start), copy, strict=True))
    assert not torch.equal(alone[0][0], alone[1][0])


def test_epoch_restarted_from_its_codes_is_equal(vocoder: Vocoder, voice_a: Voice) -> None:
    """Recovery: a new epoch that feeds the turn's codes from the first chunk makes the same sound,
    so it may go on where the old one stopped."""
    chunks = turn_chunks(3, 6)
    sounds, states = run_alone(vocoder, vocoder.start(voice_a), chunks)
    run_alone(vocoder, vocoder.start(voice_a), turn_chunks(1, 4, key=11, seed="other"))
    again, states_again = run_alone(vocoder, vocoder.start(voice_a), chunks)
    assert all(torch.equal(a, b) for a, b in zip(sounds, again, strict=True))
    assert equal_states(states[-2], states_again[-2])


def test_saved_state_continues_equal(vocoder: Vocoder, voice_b: Voice) -> None:
    chunks = turn_chunks(3, 4)
    sounds, states = run_alone(vocoder, vocoder.start(voice_b), chunks)
    file = io.BytesIO()
    torch.save(states[1], file)
    file.seek(0)
    restored: StreamState = torch.load(file, weights_only=False)
    rest, _ = run_alone(vocoder, restored, chunks[2:])
    assert all(torch.equal(a, b) for a, b in zip(sounds[2:], rest, strict=True))


def test_batch_of_any_ages_and_voices_equals_single_runs(
    vocoder: Vocoder, voice_a: Voice, voice_b: Voice
) -> None:
    """Streams of age 0, 1, 2 and 4 chunks, prompts of 12 and 31 codes, in one batch; then their
    next chunks again in one batch, from the states that the first batch left."""
    ages = (0, 1, 2, 4, 0)
    voices = (voice_a, voice_b, voice_a, voice_b, voice_b)
    turns = [turn_chunks(7, 3, key, f"s{key}") for key in range(5)]
    states: list[StreamState] = []
    singles: list[list[torch.Tensor]] = []
    for age, voice, turn in zip(ages, voices, turns, strict=True):
        sounds, made = run_alone(vocoder, vocoder.start(voice), turn[: age + 2])
        states.append(made[age - 1] if age else vocoder.start(voice))
        singles.append(sounds[age:])
    for step in range(2):
        chunks = [turn[age + step] for age, turn in zip(ages, turns, strict=True)]
        results = vocoder.advance(states, chunks)
        for (sound, _), single in zip(results, singles, strict=True):
            torch.testing.assert_close(sound, single[step], atol=BATCH_TOLERANCE, rtol=0)
        states = [state for _, state in results]


@settings(
    max_examples=4, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    ages=st.lists(st.integers(0, 3), min_size=2, max_size=4),
    codes=st.integers(7, 40),
    last=st.booleans(),
    data=st.data(),
)
def test_any_mix_equals_single_runs(
    vocoder: Vocoder,
    voice_a: Voice,
    voice_b: Voice,
    ages: list[int],
    codes: int,
    last: bool,
    data: st.DataObject,
) -> None:
    states: list[StreamState] = []
    chunks: list[Chunk] = []
    for row, age in enumerate(ages):
        voice = data.draw(st.sampled_from((voice_a, voice_b)))
        _, made = run_alone(vocoder, vocoder.start(voice), turn_chunks(4, 3, row)[:age])
        states.append(made[-1] if made else vocoder.start(voice))
        chunks.append(Chunk(tuple(turn_codes(codes, 7 + row)), last, f"s{row}"))
    for (sound, _), state, chunk in zip(
        vocoder.advance(states, chunks), states, chunks, strict=True
    ):
        ((single, _),) = vocoder.advance([state], [chunk])
        torch.testing.assert_close(sound, single, atol=BATCH_TOLERANCE, rtol=0)


def test_noise_comes_from_seed_and_code_offset_only(vocoder: Vocoder, voice_a: Voice) -> None:
    start = vocoder.start(voice_a)
    first, second = turn_chunks(2, 3)[:2]
    ((sound, state),) = vocoder.advance([start], [first])
    ((other, _),) = vocoder.advance([start], [dataclasses.replace(first, seed="another")])
    difference = (sound - other).abs().max()
    assert 0 < difference < 0.1 * sound.abs().max()
    assert state.codes == 25
    assert noise_seed("turn", 25) != noise_seed("turn", 0) != noise_seed("another", 0)
    ((once, _),) = vocoder.advance([state], [second])
    ((twice, _),) = vocoder.advance([state], [second])
    assert torch.equal(once, twice)


def test_chunks_that_no_batch_may_hold(vocoder: Vocoder, voice_a: Voice) -> None:
    start = vocoder.start(voice_a)
    for chunks in (
        [Chunk((1,) * 6, False, "s")],
        [Chunk((), True, "s")],
        [Chunk((1,) * 28, False, "s"), Chunk((1,) * 27, False, "s")],
        [Chunk((1,) * 28, False, "s"), Chunk((1,) * 28, True, "s")],
    ):
        with pytest.raises(ValueError, match="chunk"):
            vocoder.advance([start] * len(chunks), chunks)


def test_a_short_last_chunk_sounds(vocoder: Vocoder, voice_a: Voice) -> None:
    """The end of a turn re-sends the left context only: three codes, 2,880 samples and the tail."""
    (first, last), _ = run_alone(vocoder, vocoder.start(voice_a), turn_chunks(1, 3))
    assert len(first) == 20_160
    assert len(last) == 3 * 960 + 3_840
    (only,), _ = run_alone(vocoder, vocoder.start(voice_a), turn_chunks(0, 4))
    assert len(only) == 4 * 960
