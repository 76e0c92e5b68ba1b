"""Config file of the Code2Wav process: `--config` names a JSON file with these fields."""

from pathlib import Path

import msgspec

from duplex_sidecar.stages.engine.settings import Device, LoadFormat

LOOK_AHEAD_CODES = 3
"""Codes at a chunk's end that are seen but not yet sounded; they open the next chunk as its left
context (contract section E)."""
MIN_CHUNK_CODES = LOOK_AHEAD_CODES + 4
"""Fewer would give less than the 8 mel frames that the vocoder holds back for its cross-fade."""
MAX_CHUNK_CODES = 112
"""104 codes of a unit at most (contract section D), 4 held before it, 3 of left context."""


class Code2WavSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the vocoder stage. Paths are absolute.

    max_sessions: streams held at once; one more is refused. max_queue: chunks waiting in all.
    max_batch: streams computed together when their chunks wait together.
    voice: warmed up before serving; other voices are loaded when first asked for, at most
    max_voices are kept.
    voices_dir: looked into before the checkpoint's own voices; empty: nowhere else.
    given_voices_dir: where voices are that come with sessions; empty: there are none.
    ode_steps, guidance, noise_seed: of the flow decoder (contract section E: 10-step cosine).
    conformer_keep_frames: mel frames (50 a second) of a turn that the conformer still attends to;
    longer turns lose the oldest, the voice's prompt stays.
    load_format dummy: random weights and a made-up voice of the checkpoint's shape, for benches.
    """

    checkpoint: str
    device: Device
    max_sessions: int
    voice: str = "default"
    max_batch: int = 8
    max_queue: int = 256
    max_voices: int = 16
    ode_steps: int = 10
    guidance: float = 0.7
    noise_seed: int = 0
    conformer_keep_frames: int = 3_000
    load_format: LoadFormat = LoadFormat.AUTO
    voices_dir: str = ""
    given_voices_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_batch", "max_queue", "max_voices", "ode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.guidance < 0:
            raise ValueError("guidance must not be negative")
        if self.conformer_keep_frames < 2 * MAX_CHUNK_CODES:
            raise ValueError(f"conformer_keep_frames must be at least {2 * MAX_CHUNK_CODES}")
        if not Path(self.checkpoint).is_absolute():
            raise ValueError("checkpoint must be an absolute path")
