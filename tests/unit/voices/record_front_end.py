"""Records what the public front end makes of one made-up sound: `front_end_features.json`.

python record_front_end.py [FILE], in an environment of its own with s3tokenizer 0.3.0,
step-audio2 1.0.0 and torchaudio: the product needs none of them. The sound is a formula, so the
file holds numbers of what came of it alone, every so many.
"""

import importlib
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

RECORD = Path(__file__).with_name("front_end_features.json")
PACKAGES = ("s3tokenizer", "step-audio2", "torch", "torchaudio", "librosa")
SECONDS = 3.1
EVERY = 97


def sound(rate_hz: int) -> np.ndarray:
    """A gliding voice of five harmonics that pauses for half a second, over faint noise; the pause
    is digital silence. float32 [SECONDS * rate_hz]."""
    count = round(SECONDS * rate_hz)
    time = np.arange(count) / rate_hz
    pitch = 2 * np.pi * (110 * time + 25 * time**2)
    voice = sum(np.sin(harmonic * pitch) / harmonic for harmonic in range(1, 6))
    swell = 0.5 - 0.5 * np.cos(2 * np.pi * 3 * time)
    # A linear congruential generator: the same numbers in every version of everything.
    state, noise = 1, np.zeros(count)
    for index in range(count):
        state = (1_103_515_245 * state + 12_345) % 2**31
        noise[index] = state / 2**30 - 1
    mixed = 0.2 * voice * swell + 0.003 * noise
    mixed[(time > 1.5) & (time < 2.0)] = 0
    return mixed.astype(np.float32)


def sampled(values: np.ndarray) -> dict[str, Any]:
    flat = values.astype(np.float64).reshape(-1)[::EVERY]
    return {"shape": list(values.shape), "every_97th": [round(float(v), 6) for v in flat]}


def main() -> None:
    torch = importlib.import_module("torch")
    kaldi = importlib.import_module("torchaudio.compliance.kaldi")
    tokenizer = importlib.import_module("s3tokenizer")
    vocoder_mel = importlib.import_module("flashcosyvoice.utils.audio").mel_spectrogram
    at_16khz, at_24khz = (torch.from_numpy(sound(rate_hz)) for rate_hz in (16_000, 24_000))
    resample = importlib.import_module("torchaudio.transforms").Resample
    at_44khz = torch.from_numpy(sound(44_100))[None]
    bank = kaldi.fbank(at_16khz[None], num_mel_bins=80, dither=0, sample_frequency=16_000)
    features = {
        "tokenizer_mel": tokenizer.log_mel_spectrogram(at_16khz),
        "speaker_mel": bank - bank.mean(dim=0, keepdim=True),
        "prompt_mel": vocoder_mel(at_24khz[None])[0].T,
        "44100_to_24000": resample(44_100, 24_000)(at_44khz)[0],
        "24000_to_16000": resample(24_000, 16_000)(at_24khz[None])[0],
        "16000_to_24000": resample(16_000, 24_000)(at_16khz[None])[0],
    }
    versions = [f"{name} {importlib.metadata.version(name)}" for name in PACKAGES]
    record = {
        "source": "public packages, called as their own prompt code calls them: "
        + ", ".join(versions),
        "made_by": Path(__file__).name,
        "features": {name: sampled(values.numpy()) for name, values in features.items()},
    }
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else RECORD
    target.write_text(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
