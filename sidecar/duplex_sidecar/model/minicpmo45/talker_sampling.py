"""Batched choice of the Talker's codes (contract section D, "Budgets"). Needs torch.

Nothing here waits for the device: the chosen codes stay there.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from duplex_sidecar.model.minicpmo45.draws import Uniform, counter_uniform
from duplex_sidecar.model.minicpmo45.sampling import pick_ids, upload
from duplex_sidecar.model.minicpmo45.talker import (
    CODEC_EOS,
    CODEC_PENALTY,
    CODEC_PENALTY_WINDOW_CODES,
    CODEC_SIZE,
    EosRule,
    UnitRules,
    eos_rule,
)


class CodeRow(NamedTuple):
    """One row of the batch: the unit's rules and its codes so far."""

    rules: UnitRules
    codes: Sequence[int]


def choose_codes(
    logits: Tensor, rows: Sequence[CodeRow], uniform: Uniform = counter_uniform
) -> Tensor:
    """Next code of every row, int64 [R] on the device of `logits`.

    logits: [R, V], V >= CODEC_SIZE (padding rows of a checkpoint are never chosen), any float
    type, unchanged. Draw k of a seed decides the unit's code k.
    """
    device = logits.device
    scores = penalise_codes(
        logits[:, :CODEC_SIZE].float(),
        [(*row.rules.recent_codes, *row.codes) for row in rows],
    )
    eos = [eos_rule(row.rules.kind, len(row.codes)) for row in rows]
    masked = upload([rule is EosRule.MASK for rule in eos], torch.bool, device)
    forced = upload([rule is EosRule.FORCE for rule in eos], torch.bool, device)
    scores[:, CODEC_EOS] = scores[:, CODEC_EOS].masked_fill(masked, float("-inf"))
    numbers = upload(
        [
            0.0 if row.rules.sampling.greedy else uniform(row.rules.seed, len(row.codes))
            for row in rows
        ],
        torch.float64,
        device,
    )
    picks = pick_ids(scores, [row.rules.sampling for row in rows], numbers)
    return picks.masked_fill(forced, CODEC_EOS)


def penalise_codes(logits: Tensor, histories: Sequence[Sequence[int]]) -> Tensor:
    """Lower each code by 1.05 to the power of its number among the last 16 codes of its history.

    logits: [R, V]; returns a new tensor. Unlike the Thinker's, this penalty lowers a negative
    logit as well.
    """
    recent = [list(history[-CODEC_PENALTY_WINDOW_CODES:]) for history in histories]
    size = logits.shape[1]
    longest = max(map(len, recent), default=0)
    # The extra column takes the padding of the shorter histories.
    padded = [[*codes, *[size] * (longest - len(codes))] for codes in recent]
    indices = upload(padded, torch.int64, logits.device)
    counts = torch.zeros(len(recent), size + 1, dtype=logits.dtype, device=logits.device)
    counts.scatter_add_(1, indices, torch.ones_like(indices, dtype=logits.dtype))
    factor = torch.pow(torch.full_like(logits, CODEC_PENALTY), counts[:, :size])
    return torch.where(logits < 0, logits * factor, logits / factor)
