"""The Thinker for vLLM: Qwen3, rows from the encoder as they are, and a tap on the hidden rows."""

from collections.abc import Iterable
from typing import Any, cast

import torch
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
from vllm.multimodal import MULTIMODAL_REGISTRY

from duplex_sidecar.checkpoint.engine_view import THINKER_PREFIX
from duplex_sidecar.engine_plugin.passthrough import (
    MAX_ITEM_ROWS,
    Item,
    PassthroughDummies,
    PassthroughInfo,
    PassthroughProcessor,
    merge_rows,
)
from duplex_sidecar.engine_plugin.tap import TAP

ROWS_FIELD = "rows"


class _ThinkerProcessor(PassthroughProcessor):
    def dummy_item(self) -> Item:
        config = self.info.ctx.model_config
        zeros = torch.zeros(MAX_ITEM_ROWS, config.get_hidden_size(), dtype=config.dtype)
        return Item(MAX_ITEM_ROWS, {ROWS_FIELD: zeros})


@MULTIMODAL_REGISTRY.register_processor(
    _ThinkerProcessor, info=PassthroughInfo, dummy_inputs=PassthroughDummies
)
class DuplexThinker(Qwen3ForCausalLM, SupportsMultiModal):
    """Items carry `rows` [n, hidden] of the embedding space, made by the encoder stage."""

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None

    def get_language_model(self) -> VllmModel:
        # The inner model takes more arguments than the protocol names.
        return cast("VllmModel", self.model)

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        return list(kwargs[ROWS_FIELD])

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embedded = self.model.embed_input_ids(input_ids)
        return merge_rows(embedded, multimodal_embeddings, is_multimodal)

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        TAP.offer(hidden_states)
        return super().compute_logits(hidden_states)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Takes the public checkpoint's `llm.*`; the file's other prefixes are other stages'."""
        return super().load_weights(
            (name.removeprefix(THINKER_PREFIX), weight)
            for name, weight in weights
            if name.startswith(THINKER_PREFIX)
        )
