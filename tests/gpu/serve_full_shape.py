"""All three stages in the real shapes on one GPU: 1 and 8 sessions through the whole sidecar.

    python -m tests.gpu.serve_full_shape CHECKPOINT RESULT.json [--seconds 60] [--graphs]

CHECKPOINT is made first if it is not there (`duplex checkpoint make --shape 8b`, 19 GB). Its random
weights say nothing sensible, so a bench script decides what units emit: listening and speaking in
turn, every turn ended. The client is the one of the demo, over the published SDK, in real time.
"""

import argparse
import asyncio
import json
import platform
import secrets
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from duplex_sidecar.checkpoint.dummy8b import TEXT_PIECES, make_dummy8b
from duplex_sidecar.checkpoint.parts import write_parts
from duplex_sidecar.checkpoint.presets import FULL_LAYERS, full_config, full_special_ids
from duplex_sidecar.checkpoint.tokenizer import SPECIAL_TOKENS, load_vocabulary, train_tokenizer
from duplex_sidecar.client.conversation import SAMPLE_RATE_HZ, Conversation
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary
from tests.bench.revision import revision

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
SLOTS = 8


def bench_script(vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """4 listening units, 5 speaking ones of 9 text tokens, 1 that ends the turn; again."""
    text = [
        id_
        for id_ in range(vocabulary.size)
        if id_ not in vocabulary.special_ids
        and id_ not in vocabulary.bad_ids
        and len(vocabulary.token_bytes[id_]) > 1
    ][:TEXT_TOKENS]
    listen = (vocabulary.listen,)
    speak = (vocabulary.speak, *text, vocabulary.chunk_eos)
    last = (vocabulary.speak, *text[:4], vocabulary.turn_eos, vocabulary.chunk_eos)
    return (listen,) * LISTENING_UNITS + (speak,) * (SPEAKING_UNITS - 1) + (last,)


def speech_like(seconds: int, seed: int) -> bytes:
    """Noise in bursts of 3 s with pauses of 2 s, s16le at 16 kHz: the encoder's time does not
    depend on what it hears."""
    random = np.random.default_rng(seed)
    samples = random.normal(0, 2_000, seconds * SAMPLE_RATE_HZ)
    second = np.arange(len(samples)) // SAMPLE_RATE_HZ
    samples[second % 5 >= 3] = 0
    return samples.clip(-32_768, 32_767).astype("<i2").tobytes()


async def talk(sidecar: LocalSidecar, sessions: int, seconds: int) -> list[list[dict[str, Any]]]:
    """The `duplex.unit` events of each session, all talking at the same time, started together."""

    async def one(number: int) -> list[dict[str, Any]]:
        name, token = f"bench-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        await asyncio.to_thread(sidecar.open_session, name, MANIFEST, token)
        conversation = Conversation(sidecar.realtime_url, name, token, speech_like(seconds, number))
        return (await conversation.run()).units

    return await asyncio.gather(*(one(number) for number in range(sessions)))


def make_checkpoint(folder: Path, *, weights: bool) -> None:
    """The real one, or only what is read besides weights."""
    if weights:
        make_dummy8b(folder)
    elif not folder.exists():
        folder.mkdir(parents=True)
        tokenizer = train_tokenizer(TEXT_PIECES + len(SPECIAL_TOKENS), full_special_ids())
        write_parts(folder, full_config(FULL_LAYERS), tokenizer, 0)


def quantiles(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    ordered = sorted(values)
    return {
        "n": len(ordered),
        "p50": round(statistics.median(ordered), 1),
        "p95": round(ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))], 1),
        "max": round(ordered[-1], 1),
    }


def digest(runs: list[list[dict[str, Any]]]) -> dict[str, Any]:
    units = [unit for run in runs for unit in run]
    by_decision = {
        decision: [unit for unit in units if unit["decision"] == decision]
        for decision in ("listen", "speak")
    }
    stages = sorted({name for unit in units for name in unit["stage_ms"]})
    return {
        "sessions": len(runs),
        "units": len(units),
        "contiguous": all(
            [unit["unit"] for unit in run] == list(range(1, len(run) + 1)) for run in runs
        ),
        "slower_than_real_time": sum(unit["wall_ms"] > 1000 for unit in units),
        "audio_s": round(sum(unit["audio_samples"] for unit in units) / 24_000, 1),
        "wall_ms": {
            decision: quantiles([unit["wall_ms"] for unit in chosen])
            for decision, chosen in by_decision.items()
        },
        "stage_ms": {
            name: quantiles([unit["stage_ms"][name] for unit in units if name in unit["stage_ms"]])
            for name in stages
        },
        "rebuild_ms": quantiles([unit["rebuild_ms"] for unit in units if unit["rebuild_ms"]]),
        "window_tokens_max": max((unit["window_tokens"] for unit in units), default=0),
    }


def conditions(sidecar: LocalSidecar) -> dict[str, Any]:
    import vllm

    return {
        "device": torch.cuda.get_device_name(0),
        "torch": torch.__version__,
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "driver": subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        ).stdout.strip(),
        "settings": {
            name: value
            for name, value in json.loads(
                (Path(sidecar.settings.runtime_dir) / "sidecar.json").read_text()
            ).items()
            if name
            in (
                "slots",
                "rebuild_seats",
                "max_model_tokens",
                "max_talker_tokens",
                "thinker_kv_bytes",
                "talker_kv_bytes",
                "cuda_graphs",
                "load_dummy_weights",
            )
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("result", type=Path)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--dummy", action="store_true", help="weights are made up by the stages")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
    }
    began = time.monotonic()
    make_checkpoint(arguments.checkpoint, weights=not arguments.dummy)
    result["checkpoint_make_s"] = round(time.monotonic() - began, 1)
    work = Path(tempfile.mkdtemp(prefix="dx-"))
    valkey = EmbeddedValkey(work / "ledger")
    valkey.start()
    sidecar = LocalSidecar.prepare(
        work / "sidecar",
        checkpoint=str(arguments.checkpoint.absolute()),
        redis_url=valkey.url,
        cache_dir=str(work / "cache"),
        device="cuda",
        slots=SLOTS,
        rebuild_seats=4,
        max_model_tokens=4096,
        thinker_kv_bytes=8 * 2**30,
        talker_kv_bytes=4 * 2**30,
        cuda_graphs=arguments.graphs,
        load_dummy_weights=arguments.dummy,
        bench_script=bench_script(load_vocabulary(arguments.checkpoint)),
    )
    try:
        sidecar.start()
        result["ready_s"] = round(sidecar.wait_ready(print_once(), timeout_s=420), 1)
        result["conditions"] = conditions(sidecar)
        # One short conversation first: kernels are chosen and loaded at first use.
        asyncio.run(talk(sidecar, 1, 12))
        result["runs"] = [
            digest(asyncio.run(talk(sidecar, sessions, arguments.seconds)))
            for sessions in (1, SLOTS)
        ]
        result["gpu_memory_gib"] = round(
            (lambda free_total: (free_total[1] - free_total[0]) / 2**30)(torch.cuda.mem_get_info()),
            1,
        )
        return 0
    finally:
        arguments.result.write_text(json.dumps(result, indent=2) + "\n")
        print(json.dumps(result, indent=2))
        print(sidecar.log_tail(3))
        for log in sorted(Path(sidecar.settings.runtime_dir).glob("*/log")):
            print(f"--- {log.parent.name}")
            print("\n".join(log.read_text(errors="replace").splitlines()[-2:]))
        sidecar.stop()
        valkey.stop()


def print_once() -> Any:
    last = ""

    def show(text: str) -> None:
        nonlocal last
        if text != last:
            last = text
            print(f"waiting for {text[:300]}", flush=True)

    return show


if __name__ == "__main__":
    sys.exit(main())
