"""Batched choice of the Thinker's tokens (contract section C, steps 3 to 6). Needs torch.

Everything that depends on logits is done for the whole batch on its device; one transfer brings the
choices to the host, where the rules after sampling (`decode.emit`) look at token texts.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duplex_sidecar.model.minicpmo45.decode import (
    REPETITION_PENALTY,
    SampledStep,
    Sampling,
    UnitRules,
    emit,
    next_step,
)
from duplex_sidecar.model.minicpmo45.draws import Uniform, counter_uniform
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

_NOT_SAMPLED = float("-inf")


def upload(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Nested numbers as a tensor on `device`. To a GPU it goes through pinned memory, because an
    ordinary copy would wait for all that the GPU still has to do."""
    host = torch.tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)


class UnitRow(NamedTuple):
    """One row of the batch: the unit's rules and its tokens so far (two lists of one length)."""

    rules: UnitRules
    emitted_ids: Sequence[int]
    sampled_ids: Sequence[int]


class Choice(NamedTuple):
    """Per row the sampled id (for the penalty history) and the emitted one (for the engine)."""

    sampled_ids: tuple[int, ...]
    emitted_ids: tuple[int, ...]


def choose(
    logits: Tensor,
    rows: Sequence[UnitRow],
    vocabulary: Vocabulary,
    uniform: Uniform = counter_uniform,
) -> Choice:
    """Next token of every row. logits: [R, V] of any float type, unchanged; row r is `rows[r]`.

    V may exceed the vocabulary (padding rows of a checkpoint); such ids are never chosen.
    Draw 2k of a seed decides step 3 of the unit's token k, draw 2k + 1 step 6.
    """
    steps = [next_step(r.rules, r.sampled_ids, r.emitted_ids, vocabulary) for r in rows]
    sampled = [step if isinstance(step, int) else -1 for step in steps]
    emitted = list(sampled)
    drawn = [(i, step) for i, step in enumerate(steps) if isinstance(step, SampledStep)]
    if drawn:
        indices = upload([i for i, _ in drawn], torch.int64, logits.device)
        picked = _sample(
            logits[indices, : vocabulary.size].float(),
            [step for _, step in drawn],
            [rows[i].rules for i, _ in drawn],
            vocabulary,
            uniform,
        )
        picks: list[int] = picked.tolist()
        for (i, step), pick in zip(drawn, picks, strict=True):
            sampled[i] = pick
            emitted[i] = emit(step, pick, vocabulary)
    return Choice(tuple(sampled), tuple(emitted))


def _sample(
    logits: Tensor,
    steps: Sequence[SampledStep],
    rules: Sequence[UnitRules],
    vocabulary: Vocabulary,
    uniform: Uniform,
) -> Tensor:
    """Sampled ids [n] for logits [n, V]."""
    sampling = [unit.sampling for unit in rules]
    numbers = upload(
        [
            (0.0, 0.0)
            if unit.sampling.greedy
            else (
                uniform(unit.seed, 2 * step.token_index),
                uniform(unit.seed, 2 * step.token_index + 1),
            )
            for unit, step in zip(rules, steps, strict=True)
        ],
        torch.float64,
        logits.device,
    )
    ends = _draws_chunk_eos(logits, sampling, numbers[:, 0], vocabulary.chunk_eos)
    banned = (vocabulary.tts_pad, vocabulary.chunk_eos, *sorted(vocabulary.bad_ids))
    allowed = logits.index_fill(1, upload(banned, torch.int64, logits.device), _NOT_SAMPLED)
    penalised = _penalise(allowed, [step.penalty_ids for step in steps])
    picks = pick_ids(penalised, sampling, numbers[:, 1])
    return picks.masked_fill(ends, vocabulary.chunk_eos)


def _draws_chunk_eos(
    logits: Tensor, sampling: Sequence[Sampling], numbers: Tensor, chunk_eos: int
) -> Tensor:
    """Step 3: whether one draw from the raw softmax is chunk_eos. Returns bool [n].

    A draw picks the first id whose cumulative probability exceeds the number, so only the mass
    before chunk_eos and its own are needed.
    """
    greedy = upload([each.greedy for each in sampling], torch.bool, logits.device)
    probabilities = logits.softmax(-1)
    before = probabilities[:, :chunk_eos].sum(-1, dtype=torch.float64)
    own = probabilities[:, chunk_eos].double()
    drawn = (before <= numbers) & (numbers < before + own)
    return torch.where(greedy, logits.argmax(-1) == chunk_eos, drawn)


def _penalise(logits: Tensor, penalty_ids: Sequence[Sequence[int]]) -> Tensor:
    """Step 5: divide the logits of the ids by 1.05. A negative logit is raised by that, as in the
    public implementation."""
    longest = max(map(len, penalty_ids))
    if longest == 0:
        return logits
    size = logits.shape[1]
    padded = [[*ids, *[size] * (longest - len(ids))] for ids in penalty_ids]
    seen = torch.zeros(len(padded), size + 1, dtype=torch.bool, device=logits.device)
    seen.scatter_(1, upload(padded, torch.int64, logits.device), value=True)
    return torch.where(seen[:, :size], logits / REPETITION_PENALTY, logits)


def pick_ids(logits: Tensor, sampling: Sequence[Sampling], numbers: Tensor) -> Tensor:
    """Step 6: temperature, top-k, then top-p; greedy rows take the largest logit.

    logits: [n, V] float32, -inf for ids that cannot be sampled. numbers: [n] float64 in [0, 1).
    Returns ids [n]: the first id, in id order, whose cumulative probability exceeds the number.
    Top-p keeps the ids while the mass before them is <= top_p. Ids are kept by value (equal logits
    stand or fall together), so the result does not depend on how a device orders ties. A row of
    NaN gives some id and disturbs no other row.
    """
    device = logits.device
    best = logits.argmax(-1)
    random_rows = [i for i, each in enumerate(sampling) if not each.greedy and each.temperature > 0]
    if not random_rows:
        return best
    size = logits.shape[1]
    chosen = [sampling[i] for i in random_rows]
    rows = upload(random_rows, torch.int64, device)
    temperature = upload([each.temperature for each in chosen], torch.float32, device)
    top_k = upload([min(each.top_k or size, size) for each in chosen], torch.int64, device)
    top_p = upload([each.top_p for each in chosen], torch.float64, device)

    scaled = logits[rows] / temperature[:, None]
    candidates = scaled.topk(max(min(each.top_k or size, size) for each in chosen)).values
    ranks = torch.arange(candidates.shape[1], device=device)
    in_top_k = ranks < top_k[:, None]
    mass = candidates.masked_fill(~in_top_k, _NOT_SAMPLED).double().softmax(-1)
    in_nucleus = in_top_k & (mass.cumsum(-1) - mass <= top_p[:, None])
    # A row of NaN keeps nothing; the clamp lets it pass, so that it harms its own session alone.
    smallest_kept = candidates.gather(1, (in_nucleus.sum(-1, keepdim=True) - 1).clamp(min=0))

    kept = scaled.masked_fill(scaled < smallest_kept, _NOT_SAMPLED).double().softmax(-1)
    cumulative = kept.cumsum(-1)
    threshold = numbers[rows] * cumulative[:, -1]
    drawn = (cumulative <= threshold[:, None]).sum(-1)
    return best.index_copy(0, rows, drawn)
