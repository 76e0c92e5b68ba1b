"""Config file of the encoder process: `--config` names a JSON file with these fields."""

from pathlib import Path

import msgspec

from duplex_sidecar.stages.engine.settings import Device, LoadFormat
from duplex_sidecar.stages.envelope import ElementType


class EncoderSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the encoder. Paths are absolute.

    element_type: of weights, caches and rows; it has to be the Thinker's.
    max_sessions: encoder states held at once; one more is refused.
    max_batch: sessions whose chunks, or frames, may share one pass. 1 makes a session's rows
    independent of its neighbours to the last bit, more to about 1e-5 (float32); it is for devices
    where single chunks leave most of it idle.
    load_format dummy: random weights of the checkpoint's shape; only config.json is read.
    voices_dir: looked into before the checkpoint's own voices; empty: nowhere else.
    given_voices_dir: where voices are that come with sessions; empty: there are none.
    """

    checkpoint: str
    device: Device
    element_type: ElementType
    max_sessions: int
    max_batch: int = 1
    load_format: LoadFormat = LoadFormat.AUTO
    voices_dir: str = ""
    given_voices_dir: str = ""

    def __post_init__(self) -> None:
        for name in ("max_sessions", "max_batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1")
        if self.element_type not in (ElementType.FLOAT32, ElementType.BFLOAT16):
            raise ValueError("element_type must be float32 or bfloat16")
        if not Path(self.checkpoint).is_absolute():
            raise ValueError("checkpoint must be an absolute path")
