"""What exact means, as checks that raise `NotExact`. Each has to raise on every defect."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from support.exact_defects import Defect, spoil
from support.exact_layout import (
    Answer,
    Conversation,
    Placed,
    Position,
    Script,
    image_kinds,
    left_of,
    unit_input,
)
from support.exact_policy import GreedyPolicy, Language
from support.exact_reference import Decided, Loop, Reference
from support.exact_session import Talk
from support.exact_stages import Said

LOGITS_TOLERANCE = 1e-4
"""Float32: the largest difference of any logit of any token."""


class NotExact(AssertionError):
    """unit: the first one that differs. by: of its logits, None where tokens or contexts differ."""

    def __init__(self, unit: int, what: str, by: float | None = None) -> None:
        super().__init__(f"unit {unit}: {what}" + ("" if by is None else f" by {by:.2e}"))
        self.unit = unit
        self.by = by


@dataclass
class Figures:
    """What a check has seen. farthest: largest difference of logits. least_gap: how far, at least,
    the logits are from another token."""

    units: int = 0
    rebuilt: int = 0
    farthest: float = 0.0
    least_gap: float = field(default=float("inf"))

    def __str__(self) -> str:
        return (
            f"{self.units} answers, {self.rebuilt} rebuilds,"
            f" logits within {self.farthest:.1e}, least gap {self.least_gap:.1e}"
        )


# --- what must stand in the context ---------------------------------------------------------------


def contexts(talk: Talk, script: Script) -> list[Placed]:
    """The context of each unit by the contract, from the rows that the encoder made of it and from
    what was said before."""
    conversation = Conversation(script, talk.cast.window)
    placed: list[Placed] = []
    before: Answer | None = None
    for number, said in enumerate(talk.said, start=1):
        cut = talk.cuts.get(number - 1)
        if cut is not None:
            left = {unit: left_of(script, talk.said[unit - 1], kept) for unit, kept in cut.items()}
            conversation.take_back(left)
            before = left.get(number - 1, before)
        heard = talk.tape.heard[number]
        kinds = image_kinds(talk.cast.sizes(number))
        pending = unit_input(script, kinds, heard.images, heard.chunks)
        placed.append(conversation.append(pending, before))
        before = Answer(said[:-1], said[-1])
    return placed


def decided(
    talk: Talk, script: Script, reference: Reference, known: Sequence[Decided] = ()
) -> list[Decided]:
    """The reference's states of each unit. known: those of its first units."""
    placed = contexts(talk, script)[len(known) :]
    if placed and known:
        placed[0] = replace(placed[0], extends=False)
    said = talk.said[len(known) :]
    return [*known, *reference.decided(list(zip(placed, said, strict=True)))]


# --- (a) the independent reference ----------------------------------------------------------------


def equals_reference(
    talk: Talk,
    script: Script,
    language: Language,
    reference: Reference,
    known: Sequence[Decided] = (),
) -> Figures:
    """Every answer's logits are those of the reference, and its tokens those of greedy decoding.

    Also of answers that were given again, after whatever rebuild. known: what `decided` said of its
    first units.
    """
    figures = Figures()
    truth = decided(talk, script, reference, known)
    policy = talk.cast.policy(language)
    for number, said in enumerate(talk.said, start=1):
        for answer in talk.tape.answers:
            if answer.unit == number:
                _same_logits(answer, said, truth[number - 1], reference, figures)
        stopped = number - 1 in talk.cuts
        if stopped:
            policy = policy_after(talk, number - 1, language)
        policy.begin(is_speech=talk.cast.is_speech(number), force_listen=stopped)
        logits = reference.logits(_states(truth[number - 1]))
        for index, emitted in enumerate(said):
            choice = policy.decide(logits[index])
            if choice.emitted != emitted or policy.ended:
                raise NotExact(number, f"token {index} is {emitted}, not {choice.emitted}")
            figures.least_gap = min(figures.least_gap, runner_up(choice.penalised))
            policy.accept(choice.sampled, emitted)
        if not policy.ended:
            raise NotExact(number, "the answer is not complete")
    return figures


def policy_after(talk: Talk, last: int, language: Language) -> GreedyPolicy:
    """The policy behind unit `last`, made anew from what is left of all answers."""
    policy = talk.cast.policy(language)
    kept: dict[int, int] = {}
    for after, cut in talk.cuts.items():
        if after <= last:
            kept |= cut
    for unit in range(1, last + 1):
        sampled, emitted = talk.tape.last(unit).sampled, talk.said[unit - 1]
        left = kept.get(unit)
        forced = left == 0 or unit - 1 in talk.cuts
        policy.begin(is_speech=talk.cast.is_speech(unit), force_listen=forced)
        if left == 0:
            policy.accept(policy.listen, policy.listen)
        else:
            for pair in zip(sampled[:left], emitted[:left], strict=True):
                policy.accept(*pair)
            if left is not None:
                policy.accept(policy.chunk_eos, policy.chunk_eos)
        if left is not None or unit in talk.cuts:
            policy.turn_ended, policy.response_open = True, False
    return policy


def _same_logits(
    answer: Said, said: Sequence[int], truth: Decided, reference: Reference, figures: Figures
) -> None:
    figures.units += 1
    figures.rebuilt += answer.rebuilt and answer.unit > 1
    if answer.emitted != said:
        raise NotExact(answer.unit, "an answer differs from the one that counts")
    by = _farthest(reference, _served(answer, reference), _states(truth))
    if by > LOGITS_TOLERANCE:
        raise NotExact(answer.unit, "logits differ from the reference's", by)
    figures.farthest = max(figures.farthest, by)


def _states(truth: Decided) -> torch.Tensor:
    """[n, hidden]: what each of the unit's n tokens was decided from."""
    return torch.cat([truth.decision[None], truth.rows])


def _served(answer: Said, reference: Reference) -> torch.Tensor:
    return reference.rows(answer.decision + answer.rows)


def _farthest(reference: Reference, one: torch.Tensor, other: torch.Tensor) -> float:
    return float((reference.logits(one) - reference.logits(other)).abs().max())


def runner_up(penalised: torch.Tensor | None) -> float:
    """Distance of the best two logits; infinite where nothing was sampled."""
    if penalised is None:
        return float("inf")
    best, second = penalised.topk(2).values.tolist()
    return best - second


# --- (b) a loop without a window ------------------------------------------------------------------


def equals_loop(talk: Talk, script: Script, language: Language, reference: Reference) -> Figures:
    """The same speech through a stream that is only ever appended to."""
    figures = Figures()
    named = script.named
    loop, policy = Loop(reference), talk.cast.policy(language)
    state = loop.feed([*script.prefix, *script.reference, *script.suffix])
    terminator: int | None = None
    for number, said in enumerate(talk.said, start=1):
        heard = talk.tape.heard[number]
        kinds = image_kinds(talk.cast.sizes(number))
        closure = [] if terminator is None else [terminator, named["</unit>"]]
        state = loop.feed([*closure, *unit_input(script, kinds, heard.images, heard.chunks)])
        states: list[torch.Tensor] = []
        emitted: list[int] = []
        policy.begin(is_speech=talk.cast.is_speech(number))
        while not policy.ended:
            if emitted:
                state = loop.feed(emitted[-1:])
            states.append(state)
            choice = policy.decide(reference.logits(state))
            policy.accept(choice.sampled, choice.emitted)
            emitted.append(choice.emitted)
        if tuple(emitted) != said:
            raise NotExact(number, f"the loop says {emitted}, the session {list(said)}")
        answer = talk.tape.last(number)
        by = _farthest(reference, _served(answer, reference), torch.stack(states))
        if by > LOGITS_TOLERANCE:
            raise NotExact(number, "logits differ from the loop's", by)
        figures.units += 1
        figures.farthest = max(figures.farthest, by)
        terminator = emitted[-1]
    return figures


# --- (c), (d) the same conversation again ---------------------------------------------------------


def equals_talk(talk: Talk, other: Talk, reference: Reference) -> Figures:
    """Token for token and logit for logit what `other` said, in every answer that was given."""
    figures = Figures()
    if len(talk.said) != len(other.said):
        raise NotExact(len(talk.said), "another number of units")
    for answer in talk.tape.answers:
        twin = other.tape.last(answer.unit)
        if answer.emitted != twin.emitted:
            raise NotExact(answer.unit, f"{answer.emitted} instead of {twin.emitted}")
        by = _farthest(reference, _served(answer, reference), _served(twin, reference))
        if by > LOGITS_TOLERANCE:
            raise NotExact(answer.unit, "logits differ", by)
        figures.units += 1
        figures.rebuilt += answer.rebuilt and answer.unit > 1
        figures.farthest = max(figures.farthest, by)
    if talk.said != other.said:
        raise NotExact(0, "the ledger holds other tokens")
    return figures


# --- (e) where rounding decides -------------------------------------------------------------------

NEAR_TIE = 0.1
"""Bfloat16, tiny checkpoint: a token may be another one if its logits are that close."""
ROUNDING = 0.4
"""Bfloat16, tiny checkpoint: the farthest that rounding may move any logit."""


@dataclass(frozen=True)
class NearTies:
    """sampled: tokens that logits decided. gaps: of those that the reference would not have chosen,
    how near they were."""

    sampled: int = 0
    gaps: tuple[float, ...] = ()
    farthest: float = 0.0

    def and_then(self, other: "NearTies") -> "NearTies":
        return NearTies(
            self.sampled + other.sampled,
            (*self.gaps, *other.gaps),
            max(self.farthest, other.farthest),
        )

    def __str__(self) -> str:
        widest = f", the widest {max(self.gaps):.3f}" if self.gaps else ""
        return (
            f"{len(self.gaps)} near ties in {self.sampled} tokens{widest};"
            f" logits within {self.farthest:.2f}"
        )


def near_ties(talk: Talk, script: Script, language: Language, reference: Reference) -> NearTies:
    """Where the session said something else than the reference would have, given what was said
    before. Raises where that was no near tie, or where the logits are farther off than rounding."""
    sampled, farthest = 0, 0.0
    gaps: list[float] = []
    policy = talk.cast.policy(language)
    for number, truth in enumerate(decided(talk, script, reference), start=1):
        answer = talk.tape.last(number)
        by = _farthest(reference, _served(answer, reference), _states(truth))
        if by > ROUNDING:
            raise NotExact(number, "logits differ by more than rounding", by)
        farthest = max(farthest, by)
        logits = reference.logits(_states(truth))
        policy.begin(is_speech=talk.cast.is_speech(number))
        for index, (token, emitted) in enumerate(zip(answer.sampled, answer.emitted, strict=True)):
            choice = policy.decide(logits[index])
            sampled += choice.logits is not None
            if choice.sampled != token:
                if choice.logits is None:
                    raise NotExact(number, f"token {index} was not to be sampled")
                gap = choice.gap(token, policy.chunk_eos)
                if gap > NEAR_TIE:
                    raise NotExact(number, f"token {index} is no near tie", gap)
                gaps.append(gap)
            policy.accept(token, emitted)
    return NearTies(sampled, tuple(gaps), farthest)


@dataclass(frozen=True)
class Leaning:
    """How far answers are off the reference in the direction of a defect.

    along: the states' distance from the reference times what the defect would move them by, summed
    over all tokens. size: that move with itself. Both add up over answers.
    """

    along: float = 0.0
    size: float = 0.0

    @property
    def share(self) -> float:
        """0 for a context without the defect, 1 with it. Rounding knows nothing of the defect: what
        it adds is as likely on either side, and small against all of the defect's tokens."""
        return self.along / self.size

    def and_then(self, other: "Leaning") -> "Leaning":
        return Leaning(self.along + other.along, self.size + other.size)


def leaning(
    answer: Said, context: Sequence[Position], defect: Defect, script: Script, reference: Reference
) -> Leaning:
    """Of one answer; context: what it must have been decided from. Both sides of the reference
    follow what was really said, token by token."""

    def states(places: Sequence[Position]) -> torch.Tensor:
        placed = Placed(tuple(places), False, 0)
        return _states(reference.decided([(placed, answer.emitted)])[0])

    true = states(context)
    move = states(spoil(context, defect, script)) - true
    off = _served(answer, reference) - true
    return Leaning(float((off * move).sum()), float((move * move).sum()))
