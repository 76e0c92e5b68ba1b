"""The Talker for vLLM: a Llama whose token ids are codec codes.

Conditions (text ids and the Thinker's hidden rows of those tokens) are pass-through items, so no
table of id offsets is needed: vLLM's own multimodal mask tells codes and condition rows apart. The
projector and the text table live here, next to the weights.
"""

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional
from vllm.config import VllmConfig
from vllm.model_executor.models.interfaces import MultiModalEmbeddings, SupportsMultiModal
from vllm.model_executor.models.interfaces_base import VllmModel
from vllm.model_executor.models.llama import LlamaForCausalLM
from vllm.multimodal import MULTIMODAL_REGISTRY

from duplex_sidecar.checkpoint.engine_view import TALKER_PREFIX
from duplex_sidecar.engine_plugin.passthrough import (
    MAX_ITEM_ROWS,
    Item,
    PassthroughDummies,
    PassthroughInfo,
    PassthroughProcessor,
    merge_rows,
)

IDS_FIELD = "condition_ids"
HIDDEN_FIELD = "condition_hidden"

_HEAD_MAGNITUDE = "head_code.0.parametrizations.weight.original0"
_HEAD_DIRECTION = "head_code.0.parametrizations.weight.original1"
_CODE_TABLE = "emb_code.0.weight"
_UNUSED = ("model.embed_tokens.", "projector_spk.")
"""In the public file, never read by the duplex path."""


class _TalkerProcessor(PassthroughProcessor):
    def dummy_item(self) -> Item:
        config: Any = self.info.ctx.model_config.hf_config
        tokens = MAX_ITEM_ROWS - 1
        return Item(
            MAX_ITEM_ROWS,
            {
                IDS_FIELD: torch.zeros(tokens, dtype=torch.long),
                HIDDEN_FIELD: torch.zeros(tokens, config.llm_dim),
            },
        )


class _Projector(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.linear1 = nn.Linear(inputs, outputs)
        self.linear2 = nn.Linear(outputs, outputs)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear2(functional.relu(self.linear1(rows)))


@MULTIMODAL_REGISTRY.register_processor(
    _TalkerProcessor, info=PassthroughInfo, dummy_inputs=PassthroughDummies
)
class DuplexTalker(LlamaForCausalLM, SupportsMultiModal):
    """Items carry `condition_ids` [n] and `condition_hidden` [n, llm_dim]; n + 1 rows each
    (contract section D: `emb_text(id) + L2norm(projector(hidden))`, closed by audio_bos)."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config: Any = vllm_config.model_config.hf_config
        self.emb_text = nn.Embedding(config.num_text_tokens, config.hidden_size)
        self.projector_semantic = _Projector(config.llm_dim, config.hidden_size)
        self._audio_bos_id: int = config.audio_bos_token_id

    @classmethod
    def get_placeholder_str(cls, modality: str, i: int) -> str | None:
        return None

    def get_language_model(self) -> VllmModel:
        # The inner model takes more arguments than the protocol names.
        return cast("VllmModel", self.model)

    def embed_multimodal(self, **kwargs: Any) -> list[torch.Tensor]:
        return [
            self._condition_rows(ids, hidden)
            for ids, hidden in zip(kwargs[IDS_FIELD], kwargs[HIDDEN_FIELD], strict=True)
        ]

    def _condition_rows(self, ids: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """[n], [n, llm_dim] -> [n + 1, hidden_size]."""
        table = self.emb_text.weight
        closing = torch.tensor([self._audio_bos_id], device=table.device)
        text = self.emb_text(torch.cat([ids.to(table.device).long(), closing]))
        semantic = self.projector_semantic(hidden.to(table.device, table.dtype))
        return torch.cat([text[:-1] + functional.normalize(semantic, p=2.0, dim=-1), text[-1:]])

    def embed_input_ids(
        self,
        input_ids: torch.Tensor,
        multimodal_embeddings: MultiModalEmbeddings | None = None,
        *,
        is_multimodal: torch.Tensor | None = None,
    ) -> torch.Tensor:
        embedded = self.model.embed_input_ids(input_ids)
        return merge_rows(embedded, multimodal_embeddings, is_multimodal)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Takes the public checkpoint's `tts.*`; the file's other prefixes are other stages'."""
        return super().load_weights(_own_weights(weights))


def _own_weights(
    weights: Iterable[tuple[str, torch.Tensor]],
) -> Iterator[tuple[str, torch.Tensor]]:
    """Public names -> names of LlamaForCausalLM and of this class."""
    head: dict[str, torch.Tensor] = {}
    for public_name, weight in weights:
        if not public_name.startswith(TALKER_PREFIX):
            continue
        name = public_name.removeprefix(TALKER_PREFIX)
        if name.startswith(_UNUSED):
            continue
        if name in (_HEAD_MAGNITUDE, _HEAD_DIRECTION):
            head[name] = weight
        elif name == _CODE_TABLE:
            yield "model.embed_tokens.weight", weight
        else:
            yield name, weight
    direction, magnitude = head[_HEAD_DIRECTION], head[_HEAD_MAGNITUDE]
    # The head is weight-normalised in the file: fold it once, in float32.
    norm = direction.float().norm(dim=1, keepdim=True)
    folded = direction.float() * (magnitude.float() / norm)
    yield "lm_head.weight", folded.to(direction.dtype)
