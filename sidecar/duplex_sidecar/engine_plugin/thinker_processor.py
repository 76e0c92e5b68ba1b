"""The Thinker's logits processor: the decode policy on the batch, and hidden rows handed off."""

from collections.abc import Sequence

import torch
from vllm.config import VllmConfig

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.engine_plugin import DECISION_ROWS_KEY
from duplex_sidecar.engine_plugin.tap import TAP
from duplex_sidecar.engine_plugin.unit_rows import LiveUnit, Tokens, UnitRowsProcessor
from duplex_sidecar.model.minicpmo45.decode import UnitRules, decode_rules
from duplex_sidecar.model.minicpmo45.sampling import UnitRow, choose


class ThinkerProcessor(UnitRowsProcessor[UnitRules]):
    """Publishes every step: (stream, unit, absolute index, sampled, emitted, hidden row).

    The row of a step is the final hidden state from which its logits came: that of the token one
    index before. A unit's first step has the last prompt position's, which nobody needs but a proof
    of exactness: it is published where that is asked for.
    """

    def __init__(self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self._vocabulary = load_vocabulary(self.checkpoint)
        self._decision_rows = DECISION_ROWS_KEY in self.config

    def decode_rules(self, rules: bytes) -> UnitRules:
        return decode_rules(rules, self._vocabulary)

    def choose_tokens(
        self, logits: torch.Tensor, units: Sequence[LiveUnit[UnitRules]]
    ) -> Sequence[Tokens]:
        rows = [
            UnitRow(unit.rules, unit.output_ids, unit.sampled_ids)
            for unit in units
            if unit.rules is not None
        ]
        choice = choose(logits, rows, self._vocabulary)
        return [
            Tokens(sampled, emitted)
            for sampled, emitted in zip(choice.sampled_ids, choice.emitted_ids, strict=True)
        ]

    def payloads(
        self, rows: torch.Tensor, units: Sequence[LiveUnit[UnitRules]]
    ) -> Sequence[memoryview | None]:
        hidden = TAP.take()
        if hidden is None:
            raise RuntimeError("logits without hidden rows")
        # One transfer a step for the whole batch.
        host = hidden[rows].detach().to("cpu").contiguous()
        row_bytes = host.view(torch.uint8).numpy()
        return [
            memoryview(row_bytes[i]) if unit.output_ids or self._decision_rows else memoryview(b"")
            for i, unit in enumerate(units)
        ]
