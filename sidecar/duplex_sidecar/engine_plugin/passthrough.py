"""One pass-through modality for both models: an item is a dict of tensors that the model class
turns into rows of its own embedding space.

Inputs are always rendered here, so vLLM runs no tokenizer, no HF processor and no item count over
them; what this module registers besides only serves vLLM's memory profiling at start.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from vllm.inputs import MultiModalInput, mm_input
from vllm.model_executor.models.interfaces import MultiModalEmbeddings
from vllm.multimodal.inputs import (
    MultiModalBatchedField,
    MultiModalFieldElem,
    MultiModalKwargsItem,
    MultiModalKwargsItems,
    PlaceholderRange,
)
from vllm.multimodal.parse import MultiModalDataParser
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseMultiModalProcessor,
    BaseProcessingInfo,
)

MODALITY = "audio"
MAX_ITEM_ROWS = 64
"""Rows of one item; longer blocks are split."""
PLACEHOLDER_ID = 0
"""Any valid id: its embedding is overwritten by the row that belongs at its position."""


class Item:
    """`length` rows made from `fields` by the model's `embed_multimodal`."""

    __slots__ = ("fields", "length")

    def __init__(self, length: int, fields: Mapping[str, torch.Tensor]) -> None:
        self.length = length
        self.fields = fields


def render(parts: Iterable[Sequence[int] | Item], hash_prefix: str) -> MultiModalInput:
    """Engine input for ids and items in order. hash_prefix is unique per feed: vLLM takes the
    cached rows of an equal hash unseen, so no two items may ever share one."""
    ids: list[int] = []
    items: list[MultiModalKwargsItem] = []
    places: list[PlaceholderRange] = []
    for part in parts:
        if isinstance(part, Item):
            places.append(PlaceholderRange(offset=len(ids), length=part.length))
            items.append(
                MultiModalKwargsItem(
                    {
                        name: MultiModalFieldElem(data=data, field=MultiModalBatchedField())
                        for name, data in part.fields.items()
                    }
                )
            )
            ids.extend([PLACEHOLDER_ID] * part.length)
        else:
            ids.extend(part)
    hashes: list[str] = [f"{hash_prefix}:{number}" for number in range(len(items))]
    kwargs = MultiModalKwargsItems({MODALITY: items})
    return mm_input(ids, kwargs, {MODALITY: hashes}, {MODALITY: places})


class PassthroughInfo(BaseProcessingInfo):
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {MODALITY: None}

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int]:
        return {MODALITY: MAX_ITEM_ROWS}

    def get_data_parser(self) -> MultiModalDataParser:
        return MultiModalDataParser()


class PassthroughDummies(BaseDummyInputsBuilder[PassthroughInfo]):
    """Unused: the processor makes its own dummy input. vLLM asks for the class."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self, seq_len: int, mm_counts: Mapping[str, int], mm_options: Mapping[str, Any]
    ) -> dict[str, Any]:
        return {}


class PassthroughProcessor(BaseMultiModalProcessor[PassthroughInfo]):
    """Base of both models' processors: they say what one dummy item holds."""

    # The default, True, forbids skip_tokenizer_init and so wants a tokenizer beside the weights.
    requires_tokenizer = False

    def dummy_item(self) -> Item:
        """An item of MAX_ITEM_ROWS rows."""
        raise NotImplementedError

    def _get_mm_fields_config(self, hf_inputs: Any, hf_processor_mm_kwargs: Any) -> dict[str, Any]:
        return {}

    def _get_prompt_updates(
        self, mm_items: Any, hf_processor_mm_kwargs: Any, out_mm_kwargs: Any
    ) -> list[Any]:
        return []

    def get_dummy_mm_inputs(
        self, mm_counts: Mapping[str, int], *, cache: Any = None, scheduler_config: Any = None
    ) -> Any:
        items = [self.dummy_item() for _ in range(mm_counts.get(MODALITY, 0))]
        return render([*items, [PLACEHOLDER_ID]], "dummy")


def merge_rows(
    embedded: torch.Tensor,
    rows: MultiModalEmbeddings | None,
    is_multimodal: torch.Tensor | None,
) -> torch.Tensor:
    """Put the rows of items at their placeholders. embedded: [positions, hidden]."""
    if rows is None or len(rows) == 0 or is_multimodal is None:
        return embedded
    merged = embedded.clone()
    merged[is_multimodal.to(embedded.device)] = torch.cat(list(rows)).to(embedded.dtype)
    return merged
