"""The fitted readout: output rows that make random weights hold a conversation.

With random output rows a Thinker hardly ever listens and never ends a turn, so nothing downstream
would be exercised. Its hidden states do tell the last token and whether the last sound was speech.
So the whole output matrix is solved in closed form (ridge regression) on hidden states of rehearsed
conversations over the shipped recording, towards what a small machine (`replies`) allows. Then the
result is rehearsed freely in every window mode and has to behave, or the next seed is tried.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.behaviour import Behaviour
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.plain_thinker import PlainThinker
from duplex_sidecar.checkpoint.recording import HeardUnit
from duplex_sidecar.checkpoint.rehearsal import Moment, RehearsedUnit, Scene, rehearse
from duplex_sidecar.checkpoint.replies import Teacher
from duplex_sidecar.checkpoint.weights import generator_of
from duplex_sidecar.model.minicpmo45.decode import MAX_UNIT_TOKENS, Decision, answer_facts
from duplex_sidecar.model.minicpmo45.sampling import UnitRow, choose
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

FIT_VERSION = 1
"""Part of the cache key: a change of anything here or in `replies` raises it."""

ALLOWED_LOGIT = 8.0
OTHER_LOGIT = -6.0
"""14 apart: a thousand wrong tokens together have a probability of about a thousandth."""
PREFERENCE_SPREAD = 1.0
"""Spread of the seeded preferences among allowed tokens: they depend on all of the context, so a
reply differs from time to time, and a prompt that is not exactly right gives other words."""
RIDGE = 10.0
"""Keeps the rows short: a long row would magnify rounding differences between kernels."""

MAX_ATTEMPTS = 8
UNITS = 120
"""Length of a proof."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """A conversation to learn from."""

    scene: Scene
    heard: Sequence[HeardUnit]


class _Examples:
    """Hidden states, what the teacher allows there, and which of its states it was."""

    def __init__(self) -> None:
        self.hidden: list[Tensor] = []
        self.allowed: list[frozenset[int]] = []
        self.states: list[int] = []

    def collect(self, thinker: PlainThinker, lesson: Lesson, teacher: Teacher, seed: str) -> None:
        """One rehearsal in which the teacher speaks, by chance among what it allows."""
        random = Random(seed)

        def teach(moment: Moment) -> int:
            allowed = teacher.allowed(moment)
            self.hidden.append(moment.hidden)
            self.allowed.append(allowed)
            self.states.append(teacher.state_of(moment))
            return random.choice(sorted(allowed))

        rehearse(thinker, lesson.scene, lesson.heard, teach)


def fit_readout(
    thinker: PlainThinker,
    teacher: Teacher,
    lessons: Sequence[Lesson],
    proofs: Sequence[Lesson],
    seed: int,
) -> tuple[Tensor, tuple[Behaviour, ...]]:
    """Output rows [vocabulary, hidden] and what they did in `proofs`.

    Raises CheckpointError (fit_failed) when no attempt behaves as it must.
    """
    examples = _collect(thinker, teacher, lessons, str(seed))
    vocabulary_size = proofs[0].scene.vocabulary.size
    seen: list[Behaviour] = []
    for attempt in range(MAX_ATTEMPTS):
        readout = _solve(examples, vocabulary_size, f"{seed}:{attempt}")
        seen = []
        for proof in proofs:
            seen.append(observe(thinker, readout, proof))
            if not seen[-1].good:
                break
        else:
            return readout, tuple(seen)
    reason = f"no good readout in {MAX_ATTEMPTS} attempts; the last one: {seen[-1]}"
    raise CheckpointError(CheckpointFault.FIT_FAILED, "readout", reason)


def observe(thinker: PlainThinker, readout: Tensor, proof: Lesson) -> Behaviour:
    """One free rehearsal with these output rows."""
    gaps: list[float] = []
    sample = _free_choice(readout, proof.scene.vocabulary, gaps)
    units = rehearse(thinker, proof.scene, proof.heard, sample)
    return _behaviour(proof, units, min(gaps, default=None))


def _collect(
    thinker: PlainThinker, teacher: Teacher, lessons: Sequence[Lesson], seed: str
) -> _Examples:
    examples = _Examples()
    for number, lesson in enumerate(lessons):
        examples.collect(thinker, lesson, teacher, f"{seed}:{number}")
    return examples


def _free_choice(
    readout: Tensor, vocabulary: Vocabulary, gaps: list[float]
) -> Callable[[Moment], int]:
    def sample(moment: Moment) -> int:
        logits = (readout @ moment.hidden)[None]
        if moment.rules.sampling.greedy:
            best = logits[0].topk(2).values
            gaps.append(float(best[0] - best[1]))
        row = UnitRow(moment.rules, moment.emitted_ids, moment.sampled_ids)
        return choose(logits, [row], vocabulary).sampled_ids[0]

    return sample


def _behaviour(proof: Lesson, units: Sequence[RehearsedUnit], least_gap: float | None) -> Behaviour:
    facts = [answer_facts(unit.emitted_ids, proof.scene.vocabulary) for unit in units]
    speaks = [fact.decision is Decision.SPEAK for fact in facts]
    longest = run = 0
    for fact, spoke in zip(facts, speaks, strict=True):
        run = run + 1 if spoke else 0
        longest = max(longest, run)
        if fact.turn_end:
            run = 0
    agree = sum(spoke == unit.silent for spoke, unit in zip(speaks, proof.heard, strict=True))
    return Behaviour(
        scene=proof.scene.name,
        units=len(units),
        listens=len(units) - sum(speaks),
        speaks=sum(speaks),
        turn_ends=sum(fact.turn_end for fact in facts),
        longest_turn_units=longest,
        capped_units=sum(len(unit.emitted_ids) >= MAX_UNIT_TOKENS for unit in units),
        least_gap=least_gap,
        agreement=agree / len(units),
        positions=units[-1].positions,
        rebuilds=sum(unit.rebuilt for unit in units),
    )


def _solve(examples: _Examples, vocabulary_size: int, seed: str) -> Tensor:
    """Ridge regression of the wished logits on the hidden states, in double precision."""
    hidden = torch.stack(examples.hidden).double()
    wished = torch.full((len(hidden), vocabulary_size), OTHER_LOGIT, dtype=torch.float64)
    for row, allowed in zip(wished, examples.allowed, strict=True):
        row[sorted(allowed)] = ALLOWED_LOGIT
    wished += PREFERENCE_SPREAD * _preferences(hidden, examples.states, vocabulary_size, seed)
    size = hidden.shape[1]
    gram = hidden.T @ hidden + RIDGE * torch.eye(size, dtype=torch.float64)
    return torch.linalg.solve(gram, hidden.T @ wished).T.float().contiguous()


def _preferences(hidden: Tensor, states: Sequence[int], vocabulary_size: int, seed: str) -> Tensor:
    """[n, vocabulary]: a random direction per token, applied to what is left of the hidden state
    after the mean of its teacher's state is taken off; unit spread within each state."""
    generator = generator_of(f"preferences:{seed}", 0)
    directions = torch.randn(
        hidden.shape[1], vocabulary_size, generator=generator, dtype=torch.float64
    )
    result = torch.zeros(len(hidden), vocabulary_size, dtype=torch.float64)
    labels = torch.tensor(states)
    for state in sorted(set(states)):
        rows = labels == state
        rest = hidden[rows] - hidden[rows].mean(0)
        scores = rest @ directions
        result[rows] = (scores / scores.std().clamp_min(1e-9)).clamp(-2.0, 2.0)
    return result
