"""Every sample of a stream is that of the plain reference (`support.plain_token2wav`), which makes
the turn in one piece and in float64. The streams compute in float32, as they do in service."""

from collections.abc import Mapping, Sequence

import pytest
import torch
from support import plain_token2wav
from support.plain_token2wav import PlainToken2Wav, PlainTurn, PlainVoice

from duplex_sidecar.checkpoint.voice import Voice
from duplex_sidecar.stages.code2wav.stream import Chunk, Vocoder

pytestmark = pytest.mark.unit

TOLERANCE = 3e-5
"""Of full scale 1; the sound's peak is 0.1. Measured: 1.4e-5, as far as the reference's own float32
is off (1.3e-5): the harmonics' phase, summed up over a chunk, makes much of the last bit of F0."""
UNIT_CODES = 25
AHEAD_CODES = 3


def codes_of(count: int, key: int) -> list[int]:
    return [(5 * i * i + key * i) % 64 for i in range(count)]


def streamed(
    vocoder: Vocoder, voice: Voice, codes: Sequence[int], units: int, seed: str
) -> list[torch.Tensor]:
    """A turn as the sidecar sends it: chunks of 25 new codes and three that look ahead, which are
    sent again; the rest in the last one."""
    state, sounds = vocoder.start(voice), []
    for unit in range(units + 1):
        last = unit == units
        begun = UNIT_CODES * unit
        end = len(codes) if last else begun + UNIT_CODES + AHEAD_CODES
        chunk = Chunk(tuple(codes[begun:end]), last, seed)
        ((sound, state),) = vocoder.advance([state], [chunk])
        sounds.append(sound)
    return sounds


@pytest.fixture(scope="module")
def reference(formula) -> PlainToken2Wav:
    flow, hift = formula.state_dicts()
    return PlainToken2Wav(doubled(flow), doubled(hift), ode_steps=formula.ode_steps)


def doubled(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.double() for name, tensor in tensors.items()}


def plain(voice: Voice) -> PlainVoice:
    return PlainVoice(
        torch.from_numpy(voice.prompt_codes),
        torch.from_numpy(voice.prompt_mel).double(),
        torch.from_numpy(voice.speaker).double(),
    )


def farthest(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one - other).abs().max())


@pytest.mark.parametrize(
    ("units", "rest"), [(0, 4), (1, 3), (2, 28), (5, 10)], ids=lambda count: str(count)
)
@pytest.mark.parametrize("name", ["a", "b"])
def test_every_sample_of_a_turn_is_the_references(
    vocoder: Vocoder, formula, reference: PlainToken2Wav, name: str, units: int, rest: int
) -> None:
    """Two voices of unequal length; from a turn of one short chunk to one in which frames are no
    longer seen. 20,160 samples first, then 24,000, the last chunk flushes: 960 a code in all."""
    voice = formula.voice(name, {"a": 12, "b": 31}[name])
    codes = codes_of(UNIT_CODES * units + rest, key=3)
    sounds = streamed(vocoder, voice, codes, units, "turn")
    turn = PlainTurn(codes, [*[UNIT_CODES] * units, rest], "turn")
    expected = reference.sound(plain(voice), turn)
    got = torch.cat(sounds)
    assert got.shape == expected.shape == (960 * len(codes),)
    assert [len(sound) for sound in sounds[:-1]] == [20_160, *[24_000] * units][:units]
    off = farthest(got, expected)
    print(f"{len(codes)} codes: within {off:.1e} of a peak of {float(expected.abs().max()):.2f}")
    assert off < TOLERANCE


LONG = 6
"""Units of a turn in which each rule of the borders is heard."""


@pytest.fixture(scope="module")
def long_turn(vocoder: Vocoder, voice_a: Voice) -> tuple[PlainTurn, torch.Tensor]:
    codes = codes_of(UNIT_CODES * LONG + 10, key=5)
    sounds = streamed(vocoder, voice_a, codes, LONG, "long")
    return PlainTurn(codes, [*[UNIT_CODES] * LONG, 10], "long"), torch.cat(sounds)


@pytest.mark.parametrize(
    "wrong",
    [
        {"KEPT_FRAMES": 98},
        {"FADE_FRAMES": 7},
        {"codes": 60},
        {"chunks": [UNIT_CODES - 1, UNIT_CODES + 1, *[UNIT_CODES] * (LONG - 2), 10]},
        {"seed": "short"},
    ],
    ids=lambda wrong: str(*wrong),
)
def test_the_reference_with_one_rule_changed_is_another_sound(
    reference: PlainToken2Wav,
    voice_a: Voice,
    long_turn: tuple[PlainTurn, torch.Tensor],
    wrong: dict[str, object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the tolerance hides nothing: two frames less to attend to, a shorter fade, one other
    code, one border elsewhere, other noise."""
    turn, got = long_turn
    ((name, value),) = wrong.items()
    codes, chunks, seed = list(turn.codes), list(turn.chunks), turn.seed
    match value:
        case str():
            seed = value
        case list():
            chunks = value
        case int() if name == "codes":
            codes[value] = (codes[value] + 1) % 64
        case _:
            monkeypatch.setattr(plain_token2wav, name, value)
    spoilt = reference.sound(plain(voice_a), PlainTurn(codes, chunks, seed))
    off = farthest(got, spoilt)
    print(f"{name}: {off:.1e}")
    assert off > 3 * TOLERANCE


def test_the_reference_itself_is_near_to_the_long_turn(
    reference: PlainToken2Wav, voice_a: Voice, long_turn: tuple[PlainTurn, torch.Tensor]
) -> None:
    turn, got = long_turn
    assert farthest(got, reference.sound(plain(voice_a), turn)) < TOLERANCE
