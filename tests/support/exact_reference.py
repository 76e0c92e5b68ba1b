"""The Thinker of a checkpoint in transformers, fed with contexts of `exact_layout`.

Reads the public files itself. Every call computes its whole context anew: there is no cache that
could be wrong, and none of the engine's code. `Loop` alone keeps transformers' own cache.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from support.exact_layout import Placed, Position, Script, script_of
from support.exact_policy import Language
from tokenizers import Tokenizer
from transformers import DynamicCache, Qwen3Config, Qwen3Model

_SHAPE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rope_theta",
    "rms_norm_eps",
    "tie_word_embeddings",
)


@dataclass(frozen=True)
class Decided:
    """States of one unit. decision: [hidden], of the last position before the answer. rows:
    [n - 1, hidden], of the answer's tokens but its last."""

    decision: torch.Tensor
    rows: torch.Tensor


class Reference:
    def __init__(self, folder: Path, *, rounded: torch.dtype = torch.float32) -> None:
        """rounded: the element type that the served model has; this one computes in float32 with
        weights rounded to it."""
        fields = json.loads((folder / "config.json").read_text())
        self._served = rounded
        config = Qwen3Config(**{name: fields[name] for name in _SHAPE}, attn_implementation="sdpa")
        self._model = Qwen3Model(config).eval()
        weights = {
            name.removeprefix("llm."): tensor.to(rounded).float()
            for name, tensor in load_file(str(folder / "model.safetensors")).items()
            if name.startswith("llm.")
        }
        self.head = weights.pop("lm_head.weight")
        self._model.load_state_dict(
            {name.removeprefix("model."): tensor for name, tensor in weights.items()}, strict=True
        )

    def rows(self, data: bytes) -> torch.Tensor:
        """Rows [n, hidden] of the served element type, as float32."""
        flat = torch.frombuffer(bytearray(data), dtype=self._served).float()
        return flat.reshape(-1, self.head.shape[1])

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        return states @ self.head.T

    def embed(self, positions: Sequence[Position]) -> torch.Tensor:
        table = self._model.embed_tokens.weight
        return torch.stack(
            [table[place] if isinstance(place, int) else self.rows(place)[0] for place in positions]
        )

    @torch.no_grad()
    def states(self, positions: Sequence[Position]) -> torch.Tensor:
        """[n, hidden]"""
        embedded = self.embed(positions)[None]
        return self._model(inputs_embeds=embedded, use_cache=False).last_hidden_state[0]

    def decided(self, units: Sequence[tuple[Placed, Sequence[int]]]) -> list[Decided]:
        """The states of each unit, for its context and its emitted ids. Units that extend the one
        before are computed with it in one go: later positions do not change earlier ones."""
        found: list[Decided] = []
        waiting: list[tuple[int, int]] = []
        whole: tuple[Position, ...] = ()
        for placed, emitted in [*units, (Placed((), False, 0), ())]:
            if not placed.extends and waiting:
                states = self.states(whole)
                found += [Decided(states[at - 1], states[at:end]) for at, end in waiting]
                waiting = []
            whole = (*placed.context, *emitted[:-1])
            waiting.append((len(placed.context), len(whole)))
        return found


class Loop:
    """One stream: positions go in, the last state comes out, keys and values stay."""

    def __init__(self, reference: Reference) -> None:
        self._reference = reference
        self._cache = DynamicCache()
        self._length = 0

    @torch.no_grad()
    def feed(self, positions: Sequence[Position]) -> torch.Tensor:
        embedded = self._reference.embed(positions)[None]
        places = torch.arange(self._length, self._length + len(positions))[None]
        out = self._reference._model(
            inputs_embeds=embedded,
            position_ids=places,
            past_key_values=self._cache,
            use_cache=True,
        )
        self._length += len(positions)
        return out.last_hidden_state[0, -1]


def read_script(
    folder: Path,
    instructions: str,
    reference: tuple[Position, ...] = (),
    user_text: str | None = None,
) -> tuple[Script, Language]:
    """Ids and texts of a checkpoint's tokenizer.json. reference: rows of a reference voice."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    added = tokenizer.get_added_tokens_decoder()
    named = {token.content: id_ for id_, token in added.items()}
    special = {id_ for id_, token in added.items() if token.special}

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    def decode(ids: Sequence[int]) -> str:
        return tokenizer.decode(list(ids), skip_special_tokens=True)

    script = script_of(named, special, encode, instructions, reference, user_text)
    return script, Language(named, special, (), decode)
