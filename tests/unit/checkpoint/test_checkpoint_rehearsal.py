"""The plain Thinker, the rehearsal's loop and the closed-form fit, on small things."""

from functools import cache
from itertools import pairwise

import msgspec
import pytest
import torch

from duplex_api.window import WindowMode
from duplex_sidecar.checkpoint.behaviour import Behaviour
from duplex_sidecar.checkpoint.layout import thinker_shapes
from duplex_sidecar.checkpoint.plain_thinker import PlainThinker
from duplex_sidecar.checkpoint.presets import TINY_VOCAB_SIZE, tiny_config
from duplex_sidecar.checkpoint.readout import Lesson, _collect, _solve, observe
from duplex_sidecar.checkpoint.recording import (
    HeardUnit,
    read_recording,
    recording_path,
    with_noise,
)
from duplex_sidecar.checkpoint.rehearsal import Moment, Scene, rehearse
from duplex_sidecar.checkpoint.replies import Teacher, make_teacher
from duplex_sidecar.checkpoint.tokenizer import (
    DuplexTokenizer,
    parse_tokenizer,
    train_tokenizer,
    vocabulary_of,
)
from duplex_sidecar.checkpoint.weights import transformer_tensor
from duplex_sidecar.model.minicpmo45.context import build_context
from duplex_sidecar.model.minicpmo45.decode import GREEDY_SAMPLING
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.window.policy import WindowPolicy

pytestmark = pytest.mark.unit

CONFIG = tiny_config()


@cache
def tokenizer() -> DuplexTokenizer:
    return parse_tokenizer(train_tokenizer(TINY_VOCAB_SIZE))


@cache
def vocabulary() -> Vocabulary:
    return vocabulary_of(tokenizer(), TINY_VOCAB_SIZE, "tiny")


@cache
def thinker() -> PlainThinker:
    config = msgspec.structs.replace(CONFIG.thinker, num_hidden_layers=2)
    whole = msgspec.structs.replace(CONFIG, thinker=config)
    shapes = thinker_shapes(config)
    return PlainThinker(
        config,
        {name: transformer_tensor(name, shape, whole, 0) for name, shape in shapes.items()},
    )


def scene(mode: WindowMode, *, high: int = 150, low: int = 100) -> Scene:
    context = build_context(None, None, None, tokenizer().encode, vocabulary().special_ids)
    return Scene(
        name=str(mode),
        vocabulary=vocabulary(),
        context=context,
        policy=WindowPolicy(mode, high, low, 500, 4),
        sampling=GREEDY_SAMPLING,
    )


def units(pattern: str) -> list[HeardUnit]:
    """`s` for speech, `.` for silence; rows that tell which."""
    generator = torch.Generator().manual_seed(1)
    voice = torch.randn(256, generator=generator)
    heard: list[HeardUnit] = []
    for mark in pattern:
        speech = mark == "s"
        rows = 0.3 * torch.randn(10, 256, generator=generator) + (voice if speech else -voice)
        heard.append(HeardUnit(rows=0.5 * rows, is_speech=speech, silent=not speech))
    return heard


def teacher() -> Teacher:
    return make_teacher(tokenizer(), vocabulary())


def test_piece_by_piece_equals_all_at_once() -> None:
    ids = list(range(0, 900, 7))
    rows = thinker().embed(ids)
    whole = thinker().feed(rows, thinker().open())
    cache = thinker().open()
    parts = [thinker().feed(rows[start : start + 9], cache) for start in range(0, len(ids), 9)]
    assert cache.length == len(ids)
    assert torch.allclose(torch.cat(parts), whole, atol=1e-4)


def test_the_cache_grows_beyond_its_first_step() -> None:
    cache = thinker().open()
    rows = thinker().embed([1] * 700)
    thinker().feed(rows, cache)
    before = cache.rows[:, :, :, :700].clone()
    thinker().feed(rows, cache)
    assert cache.length == 1400
    assert torch.equal(cache.rows[:, :, :, :700], before)


def test_a_rehearsal_listens_and_forces_as_the_policy_says() -> None:
    moments: list[Moment] = []

    def listen(moment: Moment) -> int:
        moments.append(moment)
        return vocabulary().listen

    done = rehearse(thinker(), scene(WindowMode.OFF), units("..ss.."), listen)
    assert [unit.emitted_ids for unit in done] == [(vocabulary().listen,)] * 6
    # Before anybody spoke, silence forces listening: nothing is sampled.
    assert [moment.unit for moment in moments] == [3, 4, 5, 6]
    lengths = [unit.positions for unit in done]
    assert [b - a for a, b in pairwise(lengths)] == [13] * 5


@pytest.mark.parametrize(
    ("mode", "rebuilds"), [(WindowMode.OFF, 0), (WindowMode.CONTEXT, 7), (WindowMode.BASIC, 1)]
)
def test_windows_slide_in_a_rehearsal(mode: WindowMode, rebuilds: int) -> None:
    def listen(_: Moment) -> int:
        return vocabulary().listen

    done = rehearse(thinker(), scene(mode), units("s" * 12), listen)
    assert sum(unit.rebuilt for unit in done) == rebuilds
    if mode is WindowMode.CONTEXT:
        assert len({unit.positions for unit in done[5:]}) == 1


def test_words_of_dropped_units_come_back_as_previous_text() -> None:
    """A rebuilt prompt is longer by the marker and the words than one without."""
    word = tokenizer().encode(" yes")[0]

    def speak(moment: Moment) -> int:
        if moment.unit == 1 and len(moment.emitted_ids) < 3:
            return (vocabulary().speak, word, vocabulary().chunk_eos)[len(moment.emitted_ids)]
        return vocabulary().turn_eos if not moment.emitted_ids else vocabulary().listen

    done = rehearse(thinker(), scene(WindowMode.CONTEXT), units("s" * 8), speak)
    assert done[0].emitted_ids == (vocabulary().speak, word, vocabulary().chunk_eos)
    marker = len(tokenizer().encode("\n\nprevious: "))
    plain = next(unit.positions for unit in done if unit.rebuilt)
    opening = done[0].positions
    assert plain == opening - 11 + marker + 1 + 4 * 14 + 11


def test_the_fit_teaches_what_the_teacher_allows() -> None:
    heard = units("sss...ss..sss....s..ss...sss..s...")
    lessons = [Lesson(scene(WindowMode.OFF), heard)]
    rows = _solve(_collect(thinker(), teacher(), lessons, "0"), TINY_VOCAB_SIZE, "0")
    assert rows.shape == (TINY_VOCAB_SIZE, 256)
    assert rows.norm(dim=1).max() < 12
    again = _solve(_collect(thinker(), teacher(), lessons, "0"), TINY_VOCAB_SIZE, "0")
    assert torch.equal(rows, again)
    seen = observe(thinker(), rows, lessons[0])
    assert seen.units == len(heard)
    assert seen.turn_ends > 2
    assert seen.capped_units == 0
    silent_after_speech = sum(unit.silent for unit in heard)
    assert seen.speaks <= silent_after_speech + 2
    assert seen.listens >= sum(not unit.silent for unit in heard) - 2


def test_behaviour_is_judged() -> None:
    good = Behaviour("off", 120, 60, 60, 10, 3, 0, 0.01, 0.9, 1800, 0)
    assert good.good
    assert msgspec.structs.replace(good, least_gap=None).good
    for change in (
        {"listens": 29},
        {"speaks": 19},
        {"turn_ends": 4},
        {"longest_turn_units": 7},
        {"capped_units": 1},
        {"least_gap": 1e-5},
    ):
        assert not msgspec.structs.replace(good, **change).good


def test_the_recording_is_what_the_readme_says() -> None:
    samples = read_recording(recording_path())
    assert len(samples) == 74 * 16_000
    assert recording_path().stat().st_size < 450_000
    assert abs(int(samples.max())) < 17_000
    assert not (samples % 16).any()
    # A voice in about half of the seconds, silence in the others.
    loud = (abs(samples.reshape(74, 16_000)).max(axis=1) > 300).sum()
    assert 40 < loud < 60
    noisy = with_noise(samples, 0.001, 3)
    assert 20 < (noisy.astype(int) - samples).std() < 40
