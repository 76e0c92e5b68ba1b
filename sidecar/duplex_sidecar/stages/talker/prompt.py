"""Talker feeds, checked and turned into engine input."""

from collections.abc import Callable, Sequence

import msgspec
import torch
from vllm.inputs import MultiModalInput

from duplex_sidecar.engine_plugin.passthrough import MAX_ITEM_ROWS, Item, render
from duplex_sidecar.engine_plugin.talker_model import HIDDEN_FIELD, IDS_FIELD
from duplex_sidecar.model.minicpmo45.talker import CODEC_EOS, UnitRules, decode_rules
from duplex_sidecar.stages.engine.guards import Refusal, check_ids, check_rows
from duplex_sidecar.stages.engine.tensors import to_torch
from duplex_sidecar.stages.envelope import Condition, ElementType, Ids, TalkerPart

_FLOAT_TYPES = (ElementType.FLOAT32, ElementType.BFLOAT16)


def count_positions(parts: Sequence[TalkerPart]) -> int:
    """Positions that the parts take: one per code, one per text token, one closing a condition."""
    return sum(len(p.ids) if isinstance(p, Ids) else len(p.ids) + 1 for p in parts)


def check_parts(parts: Sequence[TalkerPart], text_ids: int, llm_dim: int) -> None:
    """Raises Refusal for ids out of range, conditions of a wrong shape, and prompts that end in
    codes (a unit is the answer to a condition)."""
    if not parts or not isinstance(parts[-1], Condition):
        raise Refusal("the parts must end with a condition")
    for part in parts:
        if isinstance(part, Ids):
            check_ids(part.ids, CODEC_EOS, "codes")
            continue
        tokens = len(part.ids)
        if not 1 <= tokens < MAX_ITEM_ROWS:
            raise Refusal(f"a condition has 1 to {MAX_ITEM_ROWS - 1} tokens, not {tokens}")
        check_ids(part.ids, text_ids, "condition ids")
        check_rows(part.hidden, llm_dim, _FLOAT_TYPES, "condition rows", tokens)


def checked_rules(rules: bytes) -> UnitRules:
    """Rules of a feed. Raises Refusal for malformed ones."""
    try:
        return decode_rules(rules)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Refusal(f"rules: {error}") from None


def renderer(parts: Sequence[TalkerPart]) -> Callable[[str], MultiModalInput]:
    """Makes the engine input of checked parts."""

    def rendered(hash_prefix: str) -> MultiModalInput:
        pieces = [part.ids if isinstance(part, Ids) else _item(part) for part in parts]
        return render(pieces, hash_prefix)

    return rendered


def _item(condition: Condition) -> Item:
    # float32 on the way in; the class casts to its own type next to the projector.
    hidden = to_torch(condition.hidden).float()
    return Item(
        len(condition.ids) + 1, {IDS_FIELD: torch.tensor(condition.ids), HIDDEN_FIELD: hidden}
    )
