"""Thinker feeds, checked and turned into engine input."""

from collections.abc import Callable, Sequence

import msgspec
import torch
from vllm.inputs import MultiModalInput

from duplex_sidecar.engine_plugin.passthrough import MAX_ITEM_ROWS, Item, render
from duplex_sidecar.engine_plugin.thinker_model import ROWS_FIELD
from duplex_sidecar.model.minicpmo45.decode import UnitRules, decode_rules
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from duplex_sidecar.stages.engine.guards import Refusal, check_ids, check_rows
from duplex_sidecar.stages.engine.tensors import to_torch
from duplex_sidecar.stages.envelope import ElementType, Ids, ThinkerPart


def count_positions(parts: Sequence[ThinkerPart]) -> int:
    """Positions that the parts take."""
    return sum(len(p.ids) if isinstance(p, Ids) else (p.rows.shape or (0,))[0] for p in parts)


def check_parts(
    parts: Sequence[ThinkerPart], vocab_size: int, hidden_size: int, element_type: ElementType
) -> None:
    """Raises Refusal for ids out of range and for rows of a wrong type, width or value."""
    for part in parts:
        if isinstance(part, Ids):
            check_ids(part.ids, vocab_size, "token ids")
        else:
            check_rows(part.rows, hidden_size, (element_type,), "rows")


def checked_rules(rules: bytes, vocabulary: Vocabulary, *, bench_scripts: bool) -> UnitRules:
    """Rules of a feed. Raises Refusal for malformed ones."""
    try:
        decoded = decode_rules(rules, vocabulary)
    except (ValueError, msgspec.MsgspecError) as error:
        raise Refusal(f"rules: {error}") from None
    if decoded.bench_script and not bench_scripts:
        raise Refusal("rules: this stage takes no bench script")
    return decoded


def renderer(parts: Sequence[ThinkerPart]) -> Callable[[str], MultiModalInput]:
    """Makes the engine input of checked parts."""

    def rendered(hash_prefix: str) -> MultiModalInput:
        pieces: list[Sequence[int] | Item] = []
        for part in parts:
            if isinstance(part, Ids):
                pieces.append(part.ids)
            else:
                pieces += [_item(rows) for rows in to_torch(part.rows).split(MAX_ITEM_ROWS)]
        return render(pieces, hash_prefix)

    return rendered


def _item(rows: torch.Tensor) -> Item:
    return Item(rows.shape[0], {ROWS_FIELD: rows})
