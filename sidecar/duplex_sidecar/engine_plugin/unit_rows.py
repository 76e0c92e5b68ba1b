"""Follows vLLM's batch for logits processors that decide tokens themselves.

A processor of ours chooses the token and leaves a one-hot row, so `SamplingParams` stays greedy and
nothing depends on the engine's generators. It must never raise (that would end the engine core and
with it every session): whatever goes wrong with one unit poisons that unit. A poisoned unit emits
its stop id, so that the engine ends it, and publishes a fault record, so that the front end answers
that session with the reason.

What a unit has emitted so far is the engine's own list. What was *sampled* is kept here, because it
cannot be derived where a rule replaced it. It is stored by token index, under (stream, unit), not
by row: a step whose token the engine discards (a part of a chunked prefill) or repeats (after a
preemption, which takes the row out of the batch and later adds it again with its tokens so far)
writes the same index again, and `sampled[:index]` is all that a step ever reads. Thus nothing is
lost or counted twice; a new unit, or the same unit on a rebuilt stream, is another key and starts
empty. Should the history be shorter than the engine's list nevertheless, the unit is poisoned.
"""

import logging
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, cast

import torch
from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality

from duplex_sidecar.engine_plugin.ring import RecordFlag, RingWriter
from duplex_sidecar.engine_plugin.unit_args import UnitArgs, unit_args
from duplex_sidecar.model.minicpmo45.sampling import upload

logger = logging.getLogger(__name__)

PLUGIN_CONFIG_KEY = "duplex"
"""Key of `additional_config`: a map with `ring` and `checkpoint`, two paths, and switches."""

_HISTORIES_PER_SEAT = 4

RulesT = TypeVar("RulesT")


class Tokens(NamedTuple):
    """What one step sampled, and what it emits after the rules that replace a token."""

    sampled_id: int
    emitted_id: int


@dataclass(slots=True)
class _History:
    unit: int
    sampled_ids: list[int] = field(default_factory=list[int])


@dataclass(slots=True)
class LiveUnit(Generic[RulesT]):
    """One unit in the batch. rules: None only when the unit was poisoned from the start.

    base: positions of the stream before the answer. output_ids: the engine's own growing list.
    """

    args: UnitArgs
    rules: RulesT | None
    base: int
    output_ids: list[int]
    history: _History
    stop_id: int
    fault: str | None = None

    @property
    def sampled_ids(self) -> list[int]:
        """Sampled ids of the tokens in output_ids."""
        return self.history.sampled_ids[: len(self.output_ids)]

    @property
    def position(self) -> int:
        """Absolute position in the stream of the token about to be emitted."""
        return self.base + len(self.output_ids)


class UnitRowsProcessor(LogitsProcessor, Generic[RulesT]):
    """Base of the Thinker's and the Talker's processors."""

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        self._rows: dict[int, LiveUnit[RulesT]] = {}
        self._histories: OrderedDict[int, _History] = OrderedDict()
        self._kept_histories = _HISTORIES_PER_SEAT * vllm_config.scheduler_config.max_num_seqs
        config = cast("dict[str, Any]", vllm_config.additional_config)[PLUGIN_CONFIG_KEY]
        self.config = cast("Mapping[str, str]", config)
        self.checkpoint = Path(self.config["checkpoint"])
        self.ring = RingWriter(Path(self.config["ring"]))

    @abstractmethod
    def decode_rules(self, rules: bytes) -> RulesT:
        """Rules of a unit. May raise: the unit is poisoned then."""

    @abstractmethod
    def choose_tokens(
        self, logits: torch.Tensor, units: Sequence[LiveUnit[RulesT]]
    ) -> Sequence[Tokens]:
        """Next token of each unit. logits: [units, vocabulary], not to be changed. May raise."""

    def payloads(
        self, rows: torch.Tensor, units: Sequence[LiveUnit[RulesT]]
    ) -> Sequence[memoryview | None]:
        """What to publish with each unit's step (None: nothing). rows: batch rows of the units.
        Poisons the units whose numbers are broken. May raise: all of them are poisoned then."""
        return [None] * len(units)

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Runs in the front end, before admission."""
        args = unit_args(sampling_params.extra_args)
        if args is not None and (
            not sampling_params.stop_token_ids or sampling_params.temperature != 0
        ):
            raise ValueError("a duplex unit needs stop ids and temperature 0")

    def is_argmax_invariant(self) -> bool:
        return False  # True would skip it for greedy requests

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Follow the batch. Each unit of a stream arrives as `added`, and again after each time
        that the engine took it out of the batch."""
        if batch_update is None:
            return
        for row in batch_update.removed:
            self._rows.pop(row, None)
        for row, params, prompt_ids, output_ids in batch_update.added:
            unit = self._live_unit(params, len(prompt_ids or ()), output_ids)
            if unit is None:
                self._rows.pop(row, None)
            else:
                self._rows[row] = unit
        for source, target, direction in batch_update.moved:
            from_source = self._rows.pop(source, None)
            from_target = self._rows.pop(target, None)
            if from_source is not None:
                self._rows[target] = from_source
            if direction == MoveDirectionality.SWAP and from_target is not None:
                self._rows[source] = from_target

    def _live_unit(
        self, params: SamplingParams, base: int, output_ids: list[int]
    ) -> LiveUnit[RulesT] | None:
        try:
            args = unit_args(params.extra_args)
        except ValueError as error:
            # Refused at admission already; a row without rules is left to the engine.
            logger.error("malformed extra_args: %s", error)
            return None
        if args is None:
            return None
        rules: RulesT | None = None
        fault: str | None = None
        try:
            rules = self.decode_rules(args.rules)
        except Exception as error:
            fault = f"rules: {error}"
        return LiveUnit(
            args=args,
            rules=rules,
            base=base,
            output_ids=output_ids,
            history=self._history(args),
            stop_id=min(params.stop_token_ids or (0,)),
            fault=fault,
        )

    def _history(self, args: UnitArgs) -> _History:
        history = self._histories.get(args.stream)
        if history is None or history.unit != args.unit:
            history = self._histories[args.stream] = _History(args.unit)
        self._histories.move_to_end(args.stream)
        while len(self._histories) > self._kept_histories:
            # Of a closed stream, as there are fewer live ones than this.
            self._histories.popitem(last=False)
        return history

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """Decide a token for each of our rows; rows that are not ours stay as they are."""
        placed = [(row, unit) for row, unit in self._rows.items() if row < logits.shape[0]]
        if not placed:
            return logits
        rows = upload([row for row, _ in placed], torch.int64, logits.device)
        units = [unit for _, unit in placed]
        payloads = self._payloads(rows, units)
        chosen = self._choose(logits[rows], units)
        for unit, tokens, payload in zip(units, chosen, payloads, strict=True):
            self._publish(unit, tokens, payload)
        emitted = upload([tokens.emitted_id for tokens in chosen], torch.int64, logits.device)
        logits[rows] = float("-inf")
        logits[rows, emitted] = 0.0
        return logits

    def _choose(self, logits: torch.Tensor, units: Sequence[LiveUnit[RulesT]]) -> Sequence[Tokens]:
        """One token per unit, whatever happens."""
        for unit in units:
            if unit.fault is None and len(unit.history.sampled_ids) < len(unit.output_ids):
                unit.fault = "the history of sampled ids is incomplete"
        healthy = [i for i, unit in enumerate(units) if unit.fault is None]
        chosen = [Tokens(unit.stop_id, unit.stop_id) for unit in units]
        for i, tokens in zip(healthy, self._choose_healthy(logits, units, healthy), strict=True):
            if tokens is not None:
                chosen[i] = tokens
        for unit, tokens in zip(units, chosen, strict=True):
            unit.history.sampled_ids[len(unit.output_ids) :] = [tokens.sampled_id]
        return chosen

    def _choose_healthy(
        self, logits: torch.Tensor, units: Sequence[LiveUnit[RulesT]], healthy: Sequence[int]
    ) -> Sequence[Tokens | None]:
        """Tokens of the units with these indices; None for one that has just been poisoned."""
        if not healthy:
            return []
        try:
            own = logits if len(healthy) == len(units) else logits[list(healthy)]
            if bool(torch.isnan(own).any()):
                raise ArithmeticError("a logit is not a number")
            return self.choose_tokens(own, [units[i] for i in healthy])
        except Exception as error:
            if len(healthy) > 1:
                # Find out which unit it is; the others must not notice.
                return [self._choose_healthy(logits, units, [i])[0] for i in healthy]
            self.poison(units[healthy[0]], f"{type(error).__name__}: {error}")
            return [None]

    def _payloads(
        self, rows: torch.Tensor, units: Sequence[LiveUnit[RulesT]]
    ) -> Sequence[memoryview | None]:
        try:
            return self.payloads(rows, units)
        except Exception as error:
            for unit in units:
                self.poison(unit, f"{type(error).__name__}: {error}")
            return [None] * len(units)

    def _publish(self, unit: LiveUnit[RulesT], tokens: Tokens, payload: memoryview | None) -> None:
        """Put the step, or the fault, into the ring."""
        try:
            if unit.fault is None:
                if payload is not None:
                    self._put(unit, tokens, payload, RecordFlag.NONE)
                return
        except Exception as error:
            self.poison(unit, f"{type(error).__name__}: {error}")
        try:
            reason = (unit.fault or "").encode()[: self.ring.payload_bytes]
            self._put(unit, Tokens(unit.stop_id, unit.stop_id), reason, RecordFlag.FAULT)
        except Exception:
            # The front end then misses the unit's records and reports them lost.
            logger.exception("no fault record of stream %d", unit.args.stream)

    def _put(
        self,
        unit: LiveUnit[RulesT],
        tokens: Tokens,
        payload: bytes | memoryview,
        flags: RecordFlag,
    ) -> None:
        stream, number = unit.args.stream, unit.args.unit
        self.ring.put(
            stream, number, unit.position, tokens.sampled_id, tokens.emitted_id, payload, flags
        )

    @staticmethod
    def poison(unit: LiveUnit[RulesT], reason: str) -> None:
        """From now on the unit emits its stop id, and its session gets the reason."""
        unit.fault = reason
        logger.error("stream %d unit %d is poisoned: %s", unit.args.stream, unit.args.unit, reason)
