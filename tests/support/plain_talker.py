"""The choice of the Talker's next code, written once more and plainly (model contract, section D):
one row, one step, plain numbers. Nothing of the product."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

END = 6561
BUDGETS = {"start": (26, 0), "mid": (26, 26), "end": (104, 0)}
"""Most steps of a unit, and those in which it cannot end."""
PENALTY, PENALISED = 1.05, 16


@dataclass(frozen=True)
class PlainSampling:
    """None: the largest."""

    temperature: float
    top_k: int
    top_p: float


TALKER = PlainSampling(0.8, 25, 0.85)


def next_code(
    logits: Sequence[float],
    kind: str,
    before: Sequence[int],
    codes: Sequence[int],
    sampling: PlainSampling | None,
    seed: str,
) -> int:
    """logits: one a code, the end's the last. before: the turn's codes before the unit; codes: the
    unit's so far. seed: names the unit's draws."""
    step = len(codes)
    most, least = BUDGETS[kind]
    if step >= most - 1:
        return END
    scores = list(logits[: END + 1])
    last = [*before, *codes][-PENALISED:]
    for code in set(last):
        factor = PENALTY ** last.count(code)
        scores[code] = scores[code] * factor if scores[code] < 0 else scores[code] / factor
    draining = kind == "end" and step >= 25 and step % 25 < 5
    if step < least or draining:
        scores[END] = -math.inf
    if sampling is None:
        return max(range(len(scores)), key=lambda code: (scores[code], -code))
    return _draw(scores, sampling, _uniform(seed, step))


def _draw(scores: Sequence[float], sampling: PlainSampling, number: float) -> int:
    """The first code, in their order, whose cumulative probability exceeds the number."""
    best = max(scores)
    mass = [math.exp((score - best) / sampling.temperature) for score in scores]
    order = sorted(range(len(mass)), key=lambda code: -mass[code])[: sampling.top_k]
    total = sum(mass[code] for code in order)
    kept: list[int] = []
    above = 0.0
    for code in order:
        if above > sampling.top_p * total:
            break
        kept.append(code)
        above += mass[code]
    reached, aim = 0.0, number * above
    for code in sorted(kept):
        reached += mass[code]
        if reached > aim:
            return code
    return max(kept)


def _uniform(seed: str, number: int) -> float:
    """Ours: the public engine's generator does not survive a unit that is made again."""
    digest = hashlib.blake2b(f"{seed}:{number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53
