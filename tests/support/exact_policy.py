"""Greedy decoding of one unit, written from the contract (section C) alone.

Imports nothing of the product. One object follows one session: `begin` a unit, then for each token
`decide` from logits and `accept` what was said, which is another token when somebody else decides.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch

UNIT_TOKENS = 20
PENALTY = 1.05
PENALTY_TOKENS = 512
TEXT_CHARACTERS = 28
FORBIDDEN = float("-inf")


@dataclass(frozen=True)
class Language:
    """Ids by name, ids without text, ids never sampled, and the text of ids."""

    named: Mapping[str, int]
    special_ids: Collection[int]
    bad_ids: Collection[int]
    text: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Choice:
    """One token: as sampled and as emitted after the rules that replace it. logits: raw ones;
    penalised: those that the last argmax was taken of. Both None where nothing was sampled."""

    sampled: int
    emitted: int
    logits: torch.Tensor | None = None
    penalised: torch.Tensor | None = None

    def gap(self, other: int, chunk_eos: int) -> float:
        """How far the logits would have to move for `other` to be sampled instead."""
        assert self.logits is not None
        best_other = self.logits.clone()
        best_other[chunk_eos] = FORBIDDEN
        to_end = float(best_other.max() - self.logits[chunk_eos])
        if other == chunk_eos:
            return max(0.0, to_end)
        assert self.penalised is not None
        to_other = float(self.penalised.max() - self.penalised[other])
        return max(0.0, -to_end, to_other)


@dataclass
class GreedyPolicy:
    language: Language
    request_limit: int | None = None
    turn_ended: bool = True
    response_open: bool = False
    speech_pending: bool = False
    generated: list[int] = field(default_factory=list[int])

    def __post_init__(self) -> None:
        named = self.language.named
        self.listen = named["<|listen|>"]
        self.chunk_eos = named["<|chunk_eos|>"]
        self.turn_eos = named["<|turn_eos|>"]
        self.tts_bos = named["<|tts_bos|>"]
        self.terminators = {self.listen, self.chunk_eos, named["<|chunk_tts_eos|>"]}
        self._unit: list[int] = []
        self._unit_sampled: list[int] = []
        self._is_speech = self._force_listen = False

    # --- one unit ---------------------------------------------------------------------------------

    def begin(self, *, is_speech: bool, force_listen: bool = False) -> None:
        self._unit, self._unit_sampled = [], []
        self._is_speech, self._force_listen = is_speech, force_listen
        self.speech_pending |= is_speech

    @property
    def ended(self) -> bool:
        return bool(self._unit) and self._unit[-1] in self.terminators

    def decide(self, logits: torch.Tensor) -> Choice:
        """logits: [vocabulary] after the unit's tokens so far."""
        limit = min(UNIT_TOKENS, self.request_limit or UNIT_TOKENS)
        if len(self._unit) >= max(1, limit - 1):
            return Choice(self.chunk_eos, self.chunk_eos)
        silent = not self._is_speech and self.turn_ended and not self.speech_pending
        if self._force_listen or silent:
            return Choice(self.listen, self.listen)
        if int(logits.argmax()) == self.chunk_eos:
            return Choice(self.chunk_eos, self.chunk_eos, logits, self._penalised(logits))
        penalised = self._penalised(logits)
        sampled = int(penalised.argmax())
        return Choice(sampled, self._replaced(sampled), logits, penalised)

    def _penalised(self, logits: torch.Tensor) -> torch.Tensor:
        changed = logits.clone()
        named = self.language.named
        for id_ in (named["<|tts_pad|>"], self.chunk_eos, *self.language.bad_ids):
            changed[id_] = FORBIDDEN
        for id_ in set(self.generated[-PENALTY_TOKENS:] or self._unit_sampled):
            changed[id_] = changed[id_] / PENALTY
        return changed

    def _replaced(self, sampled: int) -> int:
        if sampled not in self.language.special_ids:
            since = [i for i, id_ in enumerate(self._unit) if id_ == self.turn_eos]
            spoken = self._unit[since[-1] + 1 :] if since else self._unit
            long = len(self.language.text([*spoken, sampled])) >= TEXT_CHARACTERS
            return self.chunk_eos if long else sampled
        return self.tts_bos if sampled == self.listen and not self.turn_ended else sampled

    def accept(self, sampled: int, emitted: int) -> None:
        """Go on with this token."""
        self._unit.append(emitted)
        self._unit_sampled.append(sampled)
        if not self._force_listen and sampled != self.chunk_eos:
            self.generated.append(sampled)
        if emitted in self.terminators:
            if self._force_listen and emitted == self.listen:
                self.turn_ended, self.response_open = True, False
        elif emitted == self.turn_eos:
            self.turn_ended, self.response_open = True, False
        else:
            if self.turn_ended or self.response_open:
                opens = emitted == self.tts_bos and self.speech_pending
                self.response_open = self.speech_pending = opens
            self.turn_ended = False
