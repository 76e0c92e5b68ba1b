"""What the tests of the two engine stages share: a checkpoint of their parts, the process under a
supervisor, and plain transformers references of the same weights."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, Qwen3Config, Qwen3Model

from duplex_sidecar.checkpoint.config import CheckpointConfig, write_config
from duplex_sidecar.checkpoint.layout import talker_shapes, thinker_shapes
from duplex_sidecar.checkpoint.presets import TINY_VOCAB_SIZE, tiny_config
from duplex_sidecar.checkpoint.tokenizer import train_tokenizer
from duplex_sidecar.stages.engine.settings import EngineSettings
from duplex_sidecar.stages.envelope import ElementType, Tensor
from duplex_sidecar.stages.environment import stage_environment
from duplex_sidecar.stages.supervisor import RestartPolicy, StageReport, StageSpec, Supervisor

HIDDEN = 256

# The references share the cores with the stages: a second thread would only wait.
torch.set_num_threads(1)


def make_engine_checkpoint(folder: Path) -> CheckpointConfig:
    """Thinker and Talker of the tiny checkpoint with seeded random weights, without the rest."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config()
    write_config(config, folder)
    (folder / "tokenizer.json").write_bytes(train_tokenizer(TINY_VOCAB_SIZE))
    shapes = thinker_shapes(config.thinker) | talker_shapes(config.talker)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _weight(name, shape, generator) for name, shape in shapes.items()}
    # The end code then comes by itself now and then.
    weights["tts.head_code.0.parametrizations.weight.original0"][config.talker.end_code] = 2.6
    save_file(weights, str(folder / "model.safetensors"), {"format": "pt"})
    return config


def _weight(name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Spread so that logits are far enough apart for greedy answers to be stable."""
    values = torch.randn(shape, generator=generator)
    if "norm" in name:
        return 1 + 0.1 * values
    if name.endswith("original0"):
        return 0.5 + values.abs().clamp_max(1)
    if name.endswith("original1"):
        return values
    return (0.1 if "emb_" in name or "projector" in name else 0.06) * values


def stage_spec(stage: str, settings: EngineSettings) -> StageSpec:
    folder = Path(settings.runtime_dir)
    folder.mkdir(parents=True, exist_ok=True)
    config, socket = folder / "config.json", folder / "socket"
    config.write_bytes(msgspec.json.encode(settings))
    module = f"duplex_sidecar.stages.{stage}.process"
    argv = (sys.executable, "-m", module, "--socket", str(socket), "--config", str(config))
    environment = stage_environment(os.environ, Path(settings.cache_dir))
    return StageSpec(stage, argv, socket, folder / "log", environment)


@asynccontextmanager
async def running(
    *specs: StageSpec, policy: RestartPolicy | None = None
) -> AsyncIterator[tuple[Supervisor, list[StageReport]]]:
    """The stages, ready; stopped afterwards."""
    reports: list[StageReport] = []
    supervisor = Supervisor(specs, reports.append, policy or RestartPolicy(max_failed_starts=1))
    await supervisor.start()
    try:
        yield supervisor, reports
    finally:
        await supervisor.stop()


def random_rows(count: int, seed: int, scale: float = 0.5) -> NDArray[np.float32]:
    """[count, HIDDEN]"""
    return (np.random.default_rng(seed).standard_normal((count, HIDDEN)) * scale).astype(np.float32)


def tensor(rows: NDArray[np.float32]) -> Tensor:
    return Tensor(ElementType.FLOAT32, rows.shape, rows.tobytes())


def array(value: Tensor) -> NDArray[np.float32]:
    return np.frombuffer(value.data, np.float32).reshape(value.shape)


class ThinkerReference:
    """Every call computes the whole sequence anew: no cache that could be wrong."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        weights = load_file(str(folder / "model.safetensors"))
        fields: dict[str, Any] = msgspec.to_builtins(config.thinker)
        self._model = Qwen3Model(Qwen3Config(**fields, attn_implementation="eager")).eval()
        own = {
            name.removeprefix("llm.model."): weight
            for name, weight in weights.items()
            if name.startswith("llm.model.")
        }
        self._model.load_state_dict(own, strict=True)
        self._head = weights["llm.lm_head.weight"]

    def embed(self, part: Sequence[int] | NDArray[np.float32]) -> torch.Tensor:
        if isinstance(part, np.ndarray):
            return torch.from_numpy(part)
        return self._model.embed_tokens(torch.tensor(part, dtype=torch.long))

    @torch.no_grad()
    def forward(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows [n, hidden] -> final hidden states [n, hidden], logits [n, vocabulary]."""
        hidden = self._model(inputs_embeds=rows[None]).last_hidden_state[0]
        return hidden, functional.linear(hidden, self._head)


class TalkerReference:
    """Llama over codes with the condition rows of the contract; a key-value cache per stream."""

    def __init__(self, folder: Path, config: CheckpointConfig) -> None:
        weights = load_file(str(folder / "model.safetensors"))
        self._w = {n.removeprefix("tts."): w for n, w in weights.items() if n.startswith("tts.")}
        talker = config.talker
        self._model = LlamaModel(
            LlamaConfig(
                vocab_size=talker.num_audio_tokens,
                hidden_size=talker.hidden_size,
                intermediate_size=talker.intermediate_size,
                num_hidden_layers=talker.num_hidden_layers,
                num_attention_heads=talker.num_attention_heads,
                num_key_value_heads=talker.num_key_value_heads,
                max_position_embeddings=talker.max_position_embeddings,
                rope_theta=talker.rope_theta,
                rms_norm_eps=talker.rms_norm_eps,
                attn_implementation="eager",
            )
        ).eval()
        own = {
            name.removeprefix("model."): weight
            for name, weight in self._w.items()
            if name.startswith("model.") and not name.startswith("model.embed_tokens")
        }
        own["embed_tokens.weight"] = self._w["emb_code.0.weight"]
        self._model.load_state_dict(own, strict=True)
        self._audio_bos = talker.audio_bos_token_id
        self._head = torch._weight_norm(
            self._w["head_code.0.parametrizations.weight.original1"],
            self._w["head_code.0.parametrizations.weight.original0"],
            0,
        )

    def condition(self, ids: Sequence[int], hidden: NDArray[np.float32]) -> torch.Tensor:
        """[n], [n, llm_dim] -> [n + 1, size]"""
        weights, prefix = self._w, "projector_semantic.linear"
        inner = functional.linear(
            torch.tensor(hidden), weights[f"{prefix}1.weight"], weights[f"{prefix}1.bias"]
        )
        outer = functional.linear(
            functional.relu(inner), weights[f"{prefix}2.weight"], weights[f"{prefix}2.bias"]
        )
        table = weights["emb_text.weight"]
        semantic = table[list(ids)] + functional.normalize(outer, p=2.0, dim=-1)
        return torch.cat([semantic, table[[self._audio_bos]]])

    def codes(self, codes: Sequence[int]) -> torch.Tensor:
        return self._w["emb_code.0.weight"][list(codes)]

    @torch.no_grad()
    def feed(self, rows: torch.Tensor, cache: Any) -> tuple[torch.Tensor, Any]:
        """Rows on top of a cache -> logits of the last one [codec], the cache."""
        out = self._model(inputs_embeds=rows[None], past_key_values=cache, use_cache=True)
        return functional.linear(out.last_hidden_state[0, -1], self._head), out.past_key_values


@dataclass
class ProcessTree:
    """Processes below one of ours, by what /proc says."""

    root: int

    def children(self) -> list[int]:
        found: list[int] = []
        todo = [self.root]
        while todo:
            parent = todo.pop()
            for task in Path(f"/proc/{parent}/task").glob("*/children"):
                below = [int(pid) for pid in task.read_text().split()]
                found += below
                todo += below
        return found


def is_running(pid: int) -> bool:
    """False for a zombie that nobody has collected, too."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return status.rpartition(")")[2].split()[0] != "Z"


async def wait_until_gone(pids: Sequence[int], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        for pid in pids:
            while is_running(pid):  # noqa: ASYNC110 (nobody can set an event for us)
                await asyncio.sleep(0.02)
