"""All three stages in the real shapes on one GPU: 1 and 8 sessions through the whole sidecar.

    python -m tests.gpu.serve_full_shape CHECKPOINT RESULT.json [--seconds 60] [--graphs]

CHECKPOINT is made first if it is not there (`duplex checkpoint make --shape 8b`, 19 GB). What its
units emit is said by a script (`full_shape`). The client is the one of the demo, over the published
SDK, in real time.
"""

import argparse
import asyncio
import json
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.client.conversation import Conversation
from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from tests.bench.revision import revision
from tests.gpu.full_shape import (
    MANIFEST,
    bench_script,
    conditions,
    make_checkpoint,
    print_logs,
    print_once,
    speech_like,
)

SLOTS = 8


async def talk(sidecar: LocalSidecar, sessions: int, seconds: int) -> list[list[dict[str, Any]]]:
    """The `duplex.unit` events of each session, all talking at the same time, started together."""

    async def one(number: int) -> list[dict[str, Any]]:
        name, token = f"bench-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
        await asyncio.to_thread(sidecar.open_session, name, MANIFEST, token)
        conversation = Conversation(sidecar.realtime_url, name, token, speech_like(seconds, number))
        return (await conversation.run()).units

    return await asyncio.gather(*(one(number) for number in range(sessions)))


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
        print_logs(sidecar)
        sidecar.stop()
        valkey.stop()


if __name__ == "__main__":
    sys.exit(main())
