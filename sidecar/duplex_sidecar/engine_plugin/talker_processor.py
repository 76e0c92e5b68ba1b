"""The Talker's logits processor: budgets, penalty and sampling of codec codes on the batch."""

from collections.abc import Sequence

import torch

from duplex_sidecar.engine_plugin.unit_rows import LiveUnit, Tokens, UnitRowsProcessor
from duplex_sidecar.model.minicpmo45.talker import UnitRules, decode_rules
from duplex_sidecar.model.minicpmo45.talker_sampling import CodeRow, choose_codes


class TalkerProcessor(UnitRowsProcessor[UnitRules]):
    """Publishes faults only: the codes themselves are the engine's answer."""

    def decode_rules(self, rules: bytes) -> UnitRules:
        return decode_rules(rules)

    def choose_tokens(
        self, logits: torch.Tensor, units: Sequence[LiveUnit[UnitRules]]
    ) -> Sequence[Tokens]:
        rows = [CodeRow(unit.rules, unit.output_ids) for unit in units if unit.rules is not None]
        codes: list[int] = choose_codes(logits, rows).tolist()
        return [Tokens(code, code) for code in codes]
