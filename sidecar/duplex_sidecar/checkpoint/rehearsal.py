"""A whole conversation with the tiny Thinker in one process: the real loop without an engine.

Framing, window plan, prompt rendering and decode policy are the sidecar's own functions; only the
forward pass is the plain torch one. Making the readout collects hidden states here and proves the
result here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from duplex_sidecar.checkpoint.plain_thinker import PlainThinker, ThinkerCache
from duplex_sidecar.checkpoint.recording import HeardUnit
from duplex_sidecar.model.minicpmo45.constants import UNIT_SAMPLES
from duplex_sidecar.model.minicpmo45.context import MEDIA_LENGTHS, SessionContext, layout_ids_of
from duplex_sidecar.model.minicpmo45.decode import (
    PolicyState,
    Sampling,
    UnitRules,
    advance,
    answer_facts,
    emit,
    initial_state,
    next_step,
)
from duplex_sidecar.model.minicpmo45.framing import FrameSize, reserve_append
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.window.parts import (
    HistoryUnit,
    MediaKind,
    MediaPart,
    PromptPart,
    UnitInput,
)
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.render import render_append, render_prompt
from duplex_sidecar.window.state import (
    EMPTY_WINDOW,
    Directive,
    Extend,
    Overflow,
    PlanLimits,
    Rebuild,
    WindowAppend,
)


@dataclass(frozen=True, slots=True)
class Moment:
    """A token that has to be sampled. hidden: [hidden size], final state of the position before.
    sampled_ids, emitted_ids: tokens of the unit so far."""

    unit: int
    heard: HeardUnit
    hidden: Tensor
    sampled_ids: tuple[int, ...]
    emitted_ids: tuple[int, ...]
    rules: UnitRules


Choose = Callable[[Moment], int]
"""Samples one token."""


@dataclass(frozen=True, slots=True)
class RehearsedUnit:
    """What happened in one unit. positions: length of the prompt when it was answered."""

    emitted_ids: tuple[int, ...]
    positions: int
    rebuilt: bool


@dataclass(frozen=True, slots=True)
class Scene:
    """The circumstances of a conversation.

    reference_rows: rows of the reference voice, as many as the context counts. frame: size of the
    camera frame of each unit and its rows [64, hidden]; None without a camera. always_speech: every
    append is flagged as speech, as by a client without a detector.
    """

    name: str
    vocabulary: Vocabulary
    context: SessionContext
    policy: WindowPolicy
    sampling: Sampling
    reference_rows: Tensor | None = None
    frame: tuple[FrameSize, Tensor] | None = None
    always_speech: bool = False


def rehearse(
    thinker: PlainThinker, scene: Scene, heard: Sequence[HeardUnit], choose: Choose
) -> list[RehearsedUnit]:
    """One conversation over all of `heard`."""
    conversation = _Conversation(thinker, scene, heard, choose)
    return [conversation.unit(seq) for seq in range(1, len(heard) + 1)]


class _Conversation:
    def __init__(
        self, thinker: PlainThinker, scene: Scene, heard: Sequence[HeardUnit], choose: Choose
    ) -> None:
        self._thinker = thinker
        self._scene = scene
        self._heard = heard
        self._choose = choose
        self._layout_ids = layout_ids_of(scene.vocabulary.control_ids, None)
        self._window = EMPTY_WINDOW
        self._policy: PolicyState = initial_state(seeded_text=scene.context.opens_response)
        self._history: list[HistoryUnit] = []
        self._cache: ThinkerCache = self._thinker.open()

    def unit(self, seq: int) -> RehearsedUnit:
        scene = self._scene
        frames = () if scene.frame is None else (scene.frame[0],)
        reservation = reserve_append(seq, UNIT_SAMPLES, frames, scene.context.window.context_tokens)
        completed = self._history[-1] if self._history else None
        append = WindowAppend(
            seq=seq,
            update_tokens=reservation.slots,
            completed_ids=completed.ids if completed else (),
        )
        decision, self._window = plan(
            self._window,
            append,
            scene.policy,
            scene.context.window,
            PlanLimits(max_model_tokens=None),
            Directive(),
        )
        if isinstance(decision, Overflow):
            raise RuntimeError("a rehearsal has no limit")
        pending = UnitInput(seq=seq, chunks=1, blocks=reservation.blocks)
        rebuilt = isinstance(decision, Rebuild)
        if isinstance(decision, Rebuild) or completed is None:
            parts = self._whole_prompt(decision, pending)
            self._cache = self._thinker.open()
        else:
            parts = render_append(
                pending, completed, self._layout_ids, MEDIA_LENGTHS, reservation.slots
            )
        hidden = self._thinker.feed(self._rows(parts), self._cache)[-1]
        positions = self._cache.length
        emitted = self._answer(seq, hidden)
        facts = answer_facts(emitted, scene.vocabulary)
        self._history.append(HistoryUnit(pending, facts.content_ids, facts.terminator))
        return RehearsedUnit(emitted, positions, rebuilt)

    def _whole_prompt(
        self, decision: Extend | Rebuild, pending: UnitInput
    ) -> tuple[PromptPart, ...]:
        retained = {unit.seq for unit in self._window.units}
        previous = decision.previous_ids if isinstance(decision, Rebuild) else ()
        return render_prompt(
            self._scene.context.prompt,
            previous,
            [unit for unit in self._history if unit.input.seq in retained],
            pending,
            self._layout_ids,
            MEDIA_LENGTHS,
            self._window.prompt_tokens,
        )

    def _rows(self, parts: Sequence[PromptPart]) -> Tensor:
        return torch.cat([self._part_rows(part) for part in parts])

    def _part_rows(self, part: PromptPart) -> Tensor:
        if not isinstance(part, MediaPart):
            return self._thinker.embed(part.ids)
        if part.kind is MediaKind.AUDIO:
            return self._heard[part.unit - 1].rows
        rows = self._scene.reference_rows
        if part.kind is MediaKind.VISION and self._scene.frame is not None:
            rows = self._scene.frame[1]
        if rows is None:
            raise RuntimeError(f"no rows for a {part.kind} part")
        return rows

    def _answer(self, seq: int, hidden: Tensor) -> tuple[int, ...]:
        """Tokens of the unit; every one but the last is fed."""
        scene, heard = self._scene, self._heard[seq - 1]
        rules = UnitRules(
            policy=self._policy,
            is_speech=heard.is_speech or scene.always_speech,
            force_listen=False,
            max_tokens=None,
            sampling=scene.sampling,
            seed=f"rehearsal:{seq}",
        )
        sampled: list[int] = []
        emitted: list[int] = []
        while not emitted or emitted[-1] not in scene.vocabulary.terminators:
            if emitted:
                hidden = self._thinker.feed(self._thinker.embed(emitted[-1:]), self._cache)[-1]
            step = next_step(rules, sampled, emitted, scene.vocabulary)
            if isinstance(step, int):
                sampled.append(step)
                emitted.append(step)
                continue
            moment = Moment(seq, heard, hidden, tuple(sampled), tuple(emitted), rules)
            sampled.append(self._choose(moment))
            emitted.append(emit(step, sampled[-1], scene.vocabulary))
        self._policy = advance(rules, sampled, emitted, scene.vocabulary)
        return tuple(emitted)
