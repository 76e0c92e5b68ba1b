"""From the sidecar's settings to the command lines of its four stage processes."""

import os
import sys
from pathlib import Path
from typing import TypeVar

import msgspec

from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.code2wav.config import Code2WavSettings
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.engine.settings import Device, EngineSettings, LoadFormat
from duplex_sidecar.stages.envelope import ElementType
from duplex_sidecar.stages.environment import stage_environment
from duplex_sidecar.stages.supervisor import StageSpec
from duplex_sidecar.stages.talker.config import TalkerSettings
from duplex_sidecar.stages.thinker.config import ThinkerSettings

STAGES = ("encoder", "thinker", "talker", "code2wav")

_Engine = TypeVar("_Engine", bound=EngineSettings)

StageSettings = EncoderSettings | ThinkerSettings | TalkerSettings | Code2WavSettings


def stage_settings(
    settings: SidecarSettings, element_type: ElementType
) -> dict[str, StageSettings]:
    """Settings of each stage. Seats and slots agree by construction: every stage takes as many
    sessions as the sidecar admits, the engines the concurrent rebuilds on top."""
    load_format = LoadFormat.DUMMY if settings.load_dummy_weights else LoadFormat.AUTO
    checkpoint = settings.checkpoint

    def engine(
        kind: type[_Engine], name: str, context_tokens: int, kv_bytes: int, gpu_share: float
    ) -> _Engine:
        return kind(
            checkpoint=checkpoint,
            device=settings.device,
            element_type=element_type,
            context_tokens=context_tokens,
            seats=settings.slots + settings.rebuild_seats,
            kv_bytes=kv_bytes,
            gpu_memory_share=gpu_share,
            runtime_dir=str(Path(settings.runtime_dir) / name),
            cache_dir=settings.cache_dir,
            enforce_eager=settings.device is Device.CPU or not settings.cuda_graphs,
            load_format=load_format,
        )

    return {
        "encoder": EncoderSettings(
            checkpoint=checkpoint,
            device=settings.device,
            element_type=element_type,
            max_sessions=settings.slots,
            max_batch=settings.encoder_batch_here,
            load_format=load_format,
            voices_dir=settings.voices_dir,
            given_voices_dir=settings.given_voices_dir,
        ),
        "thinker": msgspec.structs.replace(
            engine(
                ThinkerSettings,
                "thinker",
                settings.max_model_tokens,
                settings.thinker_kv_bytes,
                settings.thinker_gpu_share,
            ),
            bench_scripts=bool(settings.bench_script),
        ),
        "talker": engine(
            TalkerSettings,
            "talker",
            settings.max_talker_tokens,
            settings.talker_kv_bytes,
            settings.talker_gpu_share,
        ),
        "code2wav": Code2WavSettings(
            checkpoint=checkpoint,
            device=settings.device,
            max_sessions=settings.slots,
            load_format=load_format,
            voices_dir=settings.voices_dir,
            given_voices_dir=settings.given_voices_dir,
        ),
    }


def stage_specs(settings: SidecarSettings, element_type: ElementType) -> list[StageSpec]:
    """Write the config files into the runtime folder and say how each stage is started.

    Raises OSError when the folder cannot be written.
    """
    environment = stage_environment(os.environ, Path(settings.cache_dir))
    specs: list[StageSpec] = []
    for stage, config in stage_settings(settings, element_type).items():
        folder = Path(settings.runtime_dir) / stage
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        config_file = folder / "config.json"
        config_file.write_bytes(msgspec.json.format(msgspec.json.encode(config)))
        socket = _socket_path(Path(settings.runtime_dir), stage)
        argv = (
            sys.executable,
            "-m",
            f"duplex_sidecar.stages.{stage}.process",
            "--socket",
            str(socket),
            "--config",
            str(config_file),
        )
        specs.append(StageSpec(stage, argv, socket, folder / "log", environment))
    return specs


_MAX_SOCKET_PATH_BYTES = 100
"""The kernel's limit is 107."""


def _socket_path(runtime_dir: Path, stage: str) -> Path:
    path = runtime_dir / f"{stage}.sock"
    if len(str(path).encode()) > _MAX_SOCKET_PATH_BYTES:
        raise OSError(f"{path} is too long for a Unix socket; choose a shorter runtime folder")
    return path
