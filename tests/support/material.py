"""What the tests say and ask for: manifests, speech, pictures."""

import io
import json
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import soxr
from PIL import Image

from duplex_sidecar.client.media import SAMPLE_RATE_HZ, read_speech

CLIP_VOICE = "partner"
CLIP_S = 6.5
"""A voice of the shared sidecar, made of the first seconds of the shipped recording."""

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def manifest(**spec: Any) -> str:
    """A DuplexSession, as JSON (which is YAML); greedy unless the spec samples."""
    values = {"poolRef": {"name": "demo"}, "sampling": {"greedy": True, "seed": 7}} | spec
    return json.dumps(
        {
            "apiVersion": "duplex.dev/v1alpha1",
            "kind": "DuplexSession",
            "metadata": {"name": "test"},
            "spec": values,
        }
    )


@cache
def _recording() -> bytes:
    return read_speech(EXAMPLES / "audio" / "conversation.flac")


def speech(seconds: float, start_s: float = 0.0) -> bytes:
    """Of the shipped recording: s16le, 16 kHz. Repeated where it is too short."""
    first, count = int(start_s * SAMPLE_RATE_HZ), int(seconds * SAMPLE_RATE_HZ)
    whole = _recording()
    whole *= -(-2 * (first + count) // len(whole))
    return whole[2 * first : 2 * (first + count)]


def resampled(pcm_s16le: bytes, rate_hz: int) -> np.ndarray:
    """float32 samples of 16 kHz speech at another rate."""
    samples = np.frombuffer(pcm_s16le, "<i2").astype(np.float32) / 32_768
    return np.asarray(soxr.resample(samples, SAMPLE_RATE_HZ, rate_hz), np.float32)


def to_s16le(samples: np.ndarray) -> bytes:
    return np.clip(np.rint(samples * 32_768), -32_768, 32_767).astype("<i2").tobytes()


def to_ulaw(samples: np.ndarray) -> bytes:
    """G.711 mu-law, from its definition: sign, 3 bits of segment, 4 bits of step, inverted."""
    linear = np.clip(np.rint(samples * 32_768), -32_635, 32_635).astype(np.int32)
    magnitude = np.abs(linear) + 132
    segment = np.floor(np.log2(magnitude)).astype(np.int32) - 7
    step = (magnitude >> (segment + 3)) & 15
    sign = np.where(linear < 0, 0x80, 0)
    return (~(sign | (segment << 4) | step) & 0xFF).astype(np.uint8).tobytes()


def picture(width: int = 320, height: int = 240, kind: str = "JPEG", shade: int = 90) -> bytes:
    """One camera frame."""
    ramp = np.linspace(0, 255, width, dtype=np.uint8)[None, :, None]
    pixels = np.broadcast_to(ramp, (height, width, 3)).copy()
    pixels[..., 1] = shade
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind)
    return buffer.getvalue()
