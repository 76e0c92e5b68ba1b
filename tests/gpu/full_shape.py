"""What the programs of this folder share that hold conversations on a GPU: the checkpoint, what its
units say, what a client says to it, and under which conditions.

The random weights of the real shapes say nothing sensible, so a bench script decides what units
emit: listening and speaking in turn, every turn ended.
"""

import json
import platform
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duplex_sidecar.checkpoint.dummy8b import TEXT_PIECES, make_dummy8b
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import FULL_LAYERS, full_config, full_special_ids
from duplex_sidecar.checkpoint.tokenizer import SPECIAL_TOKENS, train_tokenizer
from duplex_sidecar.client.conversation import SAMPLE_RATE_HZ
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from tests.bench.turn_script import turn_script

MANIFEST = """
apiVersion: duplex.dev/v1alpha1
kind: DuplexSession
metadata: {name: bench}
spec:
  poolRef: {name: bench}
  window: {mode: context, contextMaxUnits: 24}
"""
LISTENING_UNITS = 4
SPEAKING_UNITS = 6
TEXT_TOKENS = 9
SETTINGS = (
    "slots",
    "rebuild_seats",
    "max_model_tokens",
    "max_talker_tokens",
    "thinker_kv_bytes",
    "talker_kv_bytes",
    "thinker_gpu_share",
    "talker_gpu_share",
    "cuda_graphs",
    "load_dummy_weights",
)
"""Of a sidecar, those that a result names."""


def bench_script(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """4 listening units, 5 speaking ones of 9 text tokens, 1 that ends the turn; again."""
    return turn_script(
        vocabulary,
        listening=LISTENING_UNITS,
        speaking=SPEAKING_UNITS,
        text_tokens=TEXT_TOKENS,
        last_tokens=4,
    )


def speech_like(seconds: int, seed: int) -> bytes:
    """Noise in bursts of 3 s with pauses of 2 s, s16le at 16 kHz: the encoder's time does not
    depend on what it hears."""
    random = np.random.default_rng(seed)
    samples = random.normal(0, 2_000, seconds * SAMPLE_RATE_HZ)
    second = np.arange(len(samples)) // SAMPLE_RATE_HZ
    samples[second % 5 >= 3] = 0
    return samples.clip(-32_768, 32_767).astype("<i2").tobytes()


def make_checkpoint(folder: Path, *, weights: bool = True, layers: int = FULL_LAYERS) -> None:
    """The real one (19 GB), or only what is read besides weights. layers: of the Thinker."""
    if weights:
        make_dummy8b(folder, thinker_layers=layers)
    elif not folder.exists():
        folder.mkdir(parents=True)
        tokenizer = train_tokenizer(TEXT_PIECES + len(SPECIAL_TOKENS), full_special_ids())
        write_parts(folder, full_config(layers), tokenizer, 0)


def conditions(sidecar: LocalSidecar) -> dict[str, Any]:
    """Of the machine, and of a sidecar that was started."""
    import vllm

    config = json.loads((Path(sidecar.settings.runtime_dir) / "sidecar.json").read_text())
    return {
        "device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU",
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "driver": nvidia_smi("--query-gpu=driver_version"),
        "settings": {name: config[name] for name in SETTINGS if name in config},
    }


def nvidia_smi(query: str) -> str:
    """The answer as lines of values; empty where there is no such tool."""
    command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except FileNotFoundError:
        return ""


def print_once() -> Callable[[str], None]:
    """For `wait_ready`: prints what it waits for when that changes."""
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            print(f"waiting for {text[:300]}", flush=True)

    return show


def print_logs(sidecar: LocalSidecar, lines: int = 2) -> None:
    """The last lines of the sidecar and of each stage."""
    print(sidecar.log_tail(lines + 1))
    for log in sorted(Path(sidecar.settings.runtime_dir).glob("*/log")):
        print(f"--- {log.parent.name}")
        print("\n".join(log.read_text(errors="replace").splitlines()[-lines:]))
