"""What sharing a pass saves: the encoder's process in the real shapes, asked by 1 to 8 sessions at
the same moment, with `max_batch` 1 and 8.

    python -m tests.gpu.encoder_batches RESULT.json [--device cuda|cpu] [--rounds 40] [--tiny]

Weights are made up. A time is a session's own: from the moment at which all sessions hand in a
second of sound (and a picture of 640 x 480) until that session has its rows.
"""

import argparse
import asyncio
import io
import json
import platform
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from PIL import Image

from duplex_sidecar.checkpoint.config import write_config
from duplex_sidecar.checkpoint.presets import full_config, tiny_config
from duplex_sidecar.model.minicpmo45.constants import FIRST_CHUNK_SAMPLES, UNIT_SAMPLES
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.encoder.process import EncoderService, load
from duplex_sidecar.stages.engine.settings import Device, LoadFormat
from duplex_sidecar.stages.envelope import ElementType, EncoderFeed, EncoderOpen
from tests.bench.revision import revision

SESSIONS = (1, 2, 4, 8)
WARM_UP_ROUNDS = 3


def picture(seed: int) -> bytes:
    coarse = np.random.default_rng(seed).integers(0, 255, (9, 12, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(coarse).resize((640, 480), Image.Resampling.BICUBIC).save(file, "JPEG")
    return file.getvalue()


def noise(samples: int, seed: int) -> bytes:
    random = np.random.default_rng(seed)
    return (random.standard_normal(samples) * 3_000).astype("<i2").tobytes()


async def times_ms(
    service: EncoderService, sessions: int, rounds: int, frames: tuple[bytes, ...]
) -> list[float]:
    """One time for each session and round."""

    async def one(name: str, unit: int, pcm: bytes, began: float) -> float:
        await service.handle(EncoderFeed(name, unit, pcm, frames, True, False))
        return (time.perf_counter() - began) * 1_000

    names = [f"s{number}" for number in range(sessions)]
    for name in names:
        await service.handle(EncoderOpen(name, 0))
    found: list[float] = []
    for unit in range(WARM_UP_ROUNDS + rounds):
        samples = FIRST_CHUNK_SAMPLES if unit == 0 else UNIT_SAMPLES
        pcm = noise(samples, unit)
        began = time.perf_counter()
        round_ms = await asyncio.gather(*(one(name, unit, pcm, began) for name in names))
        if unit >= WARM_UP_ROUNDS:
            found += round_ms
    return found


async def measure(settings: EncoderSettings, rounds: int) -> list[dict[str, Any]]:
    service = await load(msgspec.json.encode(settings))
    runs: list[dict[str, Any]] = []
    try:
        for what, frames in (("sound", ()), ("sound and picture", (picture(1),))):
            for sessions in SESSIONS:
                found = sorted(await times_ms(service, sessions, rounds, frames))
                runs.append(
                    {
                        "max_batch": settings.max_batch,
                        "what": what,
                        "sessions": sessions,
                        "mean_ms": round(statistics.mean(found), 2),
                        "p50_ms": round(statistics.median(found), 2),
                        "p95_ms": round(found[int(0.95 * (len(found) - 1))], 2),
                    }
                )
                print(runs[-1], flush=True)
    finally:
        await service.close()
    return runs


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("result", type=Path)
    parser.add_argument("--device", type=Device, default=Device.CUDA)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--tiny", action="store_true", help="the shapes of the tiny checkpoint")
    arguments = parser.parse_args()
    on_gpu = arguments.device is Device.CUDA
    with tempfile.TemporaryDirectory() as folder:
        write_config(tiny_config() if arguments.tiny else full_config(), Path(folder))
        settings = EncoderSettings(
            checkpoint=folder,
            device=arguments.device,
            element_type=ElementType.BFLOAT16 if on_gpu else ElementType.FLOAT32,
            max_sessions=max(SESSIONS),
            load_format=LoadFormat.DUMMY,
        )
        runs = [
            run
            for batch in (1, max(SESSIONS))
            for run in asyncio.run(
                measure(msgspec.structs.replace(settings, max_batch=batch), arguments.rounds)
            )
        ]
    document = {
        "date": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "revision": revision(),
        "device": torch.cuda.get_device_name(0) if on_gpu else "CPU, one core",
        "shapes": "tiny" if arguments.tiny else "8b",
        "element_type": settings.element_type,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "rounds": arguments.rounds,
        "runs": runs,
    }
    arguments.result.write_text(json.dumps(document, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
