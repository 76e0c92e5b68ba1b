import pytest
import torch
from torch import Tensor

from duplex_sidecar.model.minicpmo45.decode import (
    GREEDY_SAMPLING,
    PolicyState,
    Sampling,
    UnitRules,
)
from duplex_sidecar.model.minicpmo45.draws import counter_uniform
from duplex_sidecar.model.minicpmo45.sampling import UnitRow, choose, pick_ids
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

pytestmark = pytest.mark.unit

OPEN_TURN = PolicyState((), False, False, False, None)
HOT = Sampling(greedy=False, temperature=1.0, top_k=0, top_p=1.0)
CHUNK_EOS, TTS_PAD, BAD = 7, 6, 19


def row(
    seed: str = "s:1",
    sampling: Sampling = GREEDY_SAMPLING,
    penalty_ids: tuple[int, ...] = (),
    emitted: tuple[int, ...] = (),
) -> UnitRow:
    state = PolicyState(penalty_ids, False, False, False, None)
    return UnitRow(UnitRules(state, True, False, None, sampling, seed), emitted, emitted)


def logits_of(values: dict[int, float], size: int = 20, rows: int = 1) -> Tensor:
    logits = torch.full((rows, size), -20.0)
    for id_, value in values.items():
        logits[:, id_] = value
    return logits


def test_a_raw_chunk_eos_ends_the_unit(vocabulary: Vocabulary) -> None:
    # The penalty comes later: it cannot push chunk_eos from the first place.
    logits = logits_of({CHUNK_EOS: 2.0, 10: 1.99})
    assert choose(logits, [row(penalty_ids=(CHUNK_EOS,))], vocabulary).emitted_ids == (CHUNK_EOS,)


def test_pad_bad_and_padding_ids_are_never_chosen(vocabulary: Vocabulary) -> None:
    logits = logits_of({TTS_PAD: 9.0, BAD: 8.0, 10: 1.0, 25: 30.0}, size=32)
    assert choose(logits, [row()], vocabulary).sampled_ids == (10,)


def test_the_penalty_divides_and_so_raises_a_negative_logit(vocabulary: Vocabulary) -> None:
    assert choose(logits_of({10: 1.0, 11: 0.99}), [row()], vocabulary).emitted_ids == (10,)
    penalised = [row(penalty_ids=(10,))]
    assert choose(logits_of({10: 1.0, 11: 0.99}), penalised, vocabulary).emitted_ids == (11,)
    assert choose(logits_of({10: -1.0, 11: -0.99}), penalised, vocabulary).emitted_ids == (10,)


def test_a_batch_chooses_what_its_rows_choose_alone(vocabulary: Vocabulary) -> None:
    torch.manual_seed(3)
    rows = [
        row(f"s:{i}", sampling, penalty, emitted)
        for i, (sampling, penalty, emitted) in enumerate(
            (s, p, e)
            for s in (GREEDY_SAMPLING, HOT, Sampling(False, 0.7, 3, 0.8))
            for p in ((), (10, 11, 12))
            for e in ((), (3, 10), (3, 7))
        )
    ]
    logits = torch.randn(len(rows), vocabulary.size) * 3
    before = logits.clone()
    together = choose(logits, rows, vocabulary)
    alone = [choose(logits[i : i + 1], [rows[i]], vocabulary) for i in range(len(rows))]
    assert together.sampled_ids == tuple(choice.sampled_ids[0] for choice in alone)
    assert together.emitted_ids == tuple(choice.emitted_ids[0] for choice in alone)
    assert torch.equal(logits, before)
    assert choose(logits, rows, vocabulary) == together


def test_a_row_of_nan_harms_no_other_row(vocabulary: Vocabulary) -> None:
    torch.manual_seed(4)
    logits = torch.randn(3, vocabulary.size)
    rows = [row("a", HOT), row("b", HOT), row("c")]
    clean = choose(logits, rows, vocabulary)
    logits[1] = float("nan")
    broken = choose(logits, rows, vocabulary)
    assert broken.emitted_ids[::2] == clean.emitted_ids[::2]
    assert 0 <= broken.emitted_ids[1] < vocabulary.size


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.1, 0.4, 0.2, 0.3])
    numbers = torch.tensor([counter_uniform("s", i) for i in range(4000)], dtype=torch.float64)
    picks = pick_ids(probabilities.log().expand(4000, 4), [HOT] * 4000, numbers)
    seen = torch.bincount(picks, minlength=4) / 4000
    assert (seen - probabilities).abs().max() < 0.03


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, {0, 1, 2, 3}),
        (2, 1.0, {1, 3}),
        (0, 0.35, {1}),  # 0.4 alone, since 0.4 before the next is more than 0.35
        (0, 0.5, {1, 3}),
        (3, 0.5, {1, 3}),
        (1, 0.01, {1}),
    ],
)
def test_top_k_then_top_p(top_k: int, top_p: float, kept: set[int]) -> None:
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log().expand(500, 4)
    sampling = Sampling(greedy=False, temperature=1.0, top_k=top_k, top_p=top_p)
    numbers = torch.arange(500, dtype=torch.float64) / 500
    assert set(pick_ids(logits, [sampling] * 500, numbers).tolist()) == kept


def test_equal_logits_stand_or_fall_together() -> None:
    sampling = Sampling(greedy=False, temperature=1.0, top_k=1, top_p=1.0)
    numbers = torch.tensor([0.2, 0.7], dtype=torch.float64)
    picks = pick_ids(torch.tensor([[1.0, 2.0, 2.0]]).expand(2, 3), [sampling] * 2, numbers)
    assert picks.tolist() == [1, 2]


def test_counter_draws_are_fixed_and_below_one() -> None:
    numbers = [counter_uniform("session:7", i) for i in range(1000)]
    assert all(0 <= number < 1 for number in numbers)
    assert len(set(numbers)) == 1000
    assert counter_uniform("session:7", 0) == numbers[0] == pytest.approx(0.5, abs=0.5)
    assert counter_uniform("session:7", 1) != counter_uniform("session:71", 1)
