"""The encoder's process: `python -m duplex_sidecar.stages.encoder.process --socket S --config C`.

Serves EncoderOpen, EncoderFeed, EncoderReference, EncoderClose and Health. Imports torch, but
neither vllm nor transformers: it is up in about the time that torch takes to load.
"""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from duplex_sidecar.checkpoint.config import CheckpointConfig, read_config
from duplex_sidecar.checkpoint.errors import CheckpointError, CheckpointFault
from duplex_sidecar.checkpoint.layout import encoder_shape
from duplex_sidecar.checkpoint.voice import load_voice
from duplex_sidecar.model.minicpmo45.constants import (
    FIRST_CHUNK_SAMPLES,
    IMAGE_ROWS,
    PATCH_PIXELS,
    TILE_SIDE_PIXELS,
    UNIT_SAMPLES,
)
from duplex_sidecar.stages.encoder.audio import AudioEncoder, open_state
from duplex_sidecar.stages.encoder.chunks import MAX_FEED_CHUNKS
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.encoder.engine import STAGE, EncoderEngine
from duplex_sidecar.stages.encoder.images import MAX_FRAME_BYTES
from duplex_sidecar.stages.encoder.shapes import AUDIO_POOL_STEP, EncoderShape
from duplex_sidecar.stages.encoder.vision import VisionEncoder
from duplex_sidecar.stages.encoder.weights import build, noise, read_weights
from duplex_sidecar.stages.engine.settings import LoadFormat
from duplex_sidecar.stages.envelope import (
    Done,
    ElementType,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    Health,
    HealthReport,
    ReferenceRows,
    Request,
    Tensor,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.process_main import run_stage_process

_TORCH_TYPES = {ElementType.FLOAT32: torch.float32, ElementType.BFLOAT16: torch.bfloat16}


class EncoderService:
    """Implements `process_main.StageService` over one engine."""

    def __init__(self, engine: EncoderEngine, settings: EncoderSettings, hidden_size: int) -> None:
        self._engine = engine
        self._checkpoint = Path(settings.checkpoint)
        self._voices_dir = Path(settings.voices_dir) if settings.voices_dir else None
        given = settings.given_voices_dir
        self._given_dir = Path(given) if given else None
        self._element_type = settings.element_type
        self._hidden_size = hidden_size
        self._limits = {
            "hidden_size": hidden_size,
            "max_sessions": settings.max_sessions,
            "max_batch": settings.max_batch,
            "max_feed_chunks": MAX_FEED_CHUNKS,
            "max_frame_bytes": MAX_FRAME_BYTES,
        }

    async def handle(self, request: Request) -> msgspec.Struct:
        match request:
            case EncoderOpen():
                self._engine.open(request)
                return Done()
            case EncoderFeed():
                return await self._feed(request)
            case EncoderClose():
                self._engine.close(request.session)
                return Done()
            case EncoderReference():
                return await self._reference(request.voice)
            case Health():
                return HealthReport(STAGE, self._limits, self._engine.sessions)
            case _:
                reason = f"{type(request).__name__} is not for the encoder"
                raise StageError(STAGE, StageFault.REFUSED, reason)

    async def failed(self) -> str:
        return await self._engine.lost()

    async def close(self) -> None:
        await self._engine.stop()

    async def _feed(self, request: EncoderFeed) -> EncoderRows:
        encoded = await self._engine.feed(request)
        return EncoderRows(
            unit=request.unit,
            audio=self._tensor(encoded.audio),
            vision=tuple(self._tensor([block]) for block in encoded.vision),
            encoder_reset=encoded.encoder_reset,
            reset_mark_samples=encoded.reset_mark_samples,
        )

    async def _reference(self, voice: str) -> ReferenceRows:
        """Its voice file is read when a session opens with it: voices may be added meanwhile."""
        sizes = read_config(self._checkpoint).token2wav
        try:
            places = (self._voices_dir, self._given_dir)
            read = await asyncio.to_thread(load_voice, self._checkpoint, voice, sizes, *places)
        except CheckpointError as error:
            raise StageError(STAGE, StageFault.REFUSED, str(error)) from None
        return ReferenceRows(self._tensor([await self._engine.reference(read.reference_16khz)]))

    def _tensor(self, rows: Sequence[torch.Tensor]) -> Tensor:
        """Rows one below the other, [0, hidden] when there are none."""
        data = b"".join(_bytes(row) for row in rows)
        count = sum(len(row) for row in rows)
        return Tensor(self._element_type, (count, self._hidden_size), data)


def _bytes(rows: torch.Tensor) -> bytes:
    return rows.cpu().contiguous().view(torch.uint8).numpy().tobytes()


async def load(settings_json: bytes) -> EncoderService:
    """Raises CheckpointError, or msgspec.ValidationError for the settings."""
    settings = msgspec.json.decode(settings_json, type=EncoderSettings)
    # One thread: the stages share few cores, and a busy-waiting pool slows all of them.
    torch.set_num_threads(1)
    shape, audio, vision = load_encoders(settings)
    engine = EncoderEngine(
        audio, vision, max_sessions=settings.max_sessions, max_batch=settings.max_batch
    )
    return EncoderService(engine, settings, shape.hidden_size)


def load_encoders(settings: EncoderSettings) -> tuple[EncoderShape, AudioEncoder, VisionEncoder]:
    """Read config and weights, and encode a first unit with a frame. Raises CheckpointError."""
    folder = Path(settings.checkpoint)
    config = read_config(folder)
    _check_counts(config, folder)
    shape = encoder_shape(config)
    dtype, device = _TORCH_TYPES[settings.element_type], torch.device(settings.device)
    if settings.load_format is LoadFormat.DUMMY:
        weights = noise(shape, dtype, device)
    else:
        weights = read_weights(folder, shape, dtype, device)
    try:
        modules = build(shape, weights)
    except ValueError as error:
        raise CheckpointError(
            CheckpointFault.SHAPE_MISMATCH, settings.checkpoint, str(error)
        ) from None
    audio = AudioEncoder(shape, modules.apm, modules.audio_projection_layer)
    vision = VisionEncoder(shape, modules.vpm, modules.resampler)
    _warm_up(audio, vision)
    return shape, audio, vision


def _check_counts(config: CheckpointConfig, folder: Path) -> None:
    """The contract's counts are reserved before encoding: a checkpoint has to agree with them."""
    for field, found, needed in (
        ("audio_pool_step", config.audio_pool_step, AUDIO_POOL_STEP),
        ("query_num", config.query_num, IMAGE_ROWS),
        ("slice_config.scale_resolution", config.tile_pixels, TILE_SIDE_PIXELS),
        ("vision_config.patch_size", config.vision.patch_size, PATCH_PIXELS),
    ):
        if found != needed:
            raise CheckpointError(
                CheckpointFault.INVALID_CONFIG, str(folder), f"{field} must be {needed}"
            )


def _warm_up(audio: AudioEncoder, vision: VisionEncoder) -> None:
    """Everything that the first unit of a session would otherwise wait for."""
    state = audio.step([(open_state(0), bytes(2 * FIRST_CHUNK_SAMPLES))])[0].state
    audio.step([(state, bytes(2 * UNIT_SAMPLES))])
    vision.encode([np.zeros((3, TILE_SIDE_PIXELS, TILE_SIDE_PIXELS), np.float32)])


if __name__ == "__main__":
    run_stage_process(STAGE, load)
