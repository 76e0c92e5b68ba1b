"""One fake stage as the process that a supervisor starts:
`python fake_stage_process.py STAGE --socket PATH --config FILE`.

Socket, frames, config file, life and end are the real ones (`stages/process_main.py`); only what is
answered is a hash of what was given.
"""

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from fake_encoder import FakeEncoder
from fake_stage import FakeStage
from fake_thinker import FakeThinker
from fake_voice import FakeCode2Wav, FakeTalker

from duplex_sidecar.checkpoint.config import read_config
from duplex_sidecar.checkpoint.tokenizer import load_vocabulary
from duplex_sidecar.checkpoint.voice import voice_references
from duplex_sidecar.model.minicpmo45.constants import SAMPLES_PER_POSITION
from duplex_sidecar.stages.code2wav.config import Code2WavSettings
from duplex_sidecar.stages.encoder.config import EncoderSettings
from duplex_sidecar.stages.envelope import (
    Done,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    Health,
    Request,
    TalkerClose,
    TalkerFeed,
    ThinkerClose,
    ThinkerFeed,
    WaveClose,
    WaveFeed,
    WaveOpen,
)
from duplex_sidecar.stages.process_main import StageService, run_stage_process
from duplex_sidecar.stages.talker.config import TalkerSettings
from duplex_sidecar.stages.thinker.config import ThinkerSettings

VERBS: dict[type[Any], str] = {
    **dict.fromkeys((EncoderOpen, WaveOpen), "open"),
    **dict.fromkeys((EncoderFeed, ThinkerFeed, TalkerFeed, WaveFeed), "feed"),
    **dict.fromkeys((EncoderClose, ThinkerClose, TalkerClose, WaveClose), "close"),
    EncoderReference: "reference",
    Health: "health",
}


class FakeService:
    """Implements `StageService`."""

    def __init__(self, stage: FakeStage) -> None:
        self._stage: Any = stage

    async def handle(self, request: Request) -> msgspec.Struct:
        given = () if isinstance(request, Health) else (request,)
        answer = await getattr(self._stage, VERBS[type(request)])(*given)
        self._stage.drop_notes()
        return Done() if answer is None else answer

    async def failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        pass


def made(stage: str, config: bytes) -> FakeStage:
    """With the room that its real one would have."""
    match stage:
        case "encoder":
            encoder = msgspec.json.decode(config, type=EncoderSettings)
            rows = reference_rows(Path(encoder.checkpoint), encoder.voices_dir)
            return FakeEncoder(max_sessions=encoder.max_sessions, reference_rows=rows)
        case "thinker":
            thinker = msgspec.json.decode(config, type=ThinkerSettings)
            vocabulary = load_vocabulary(Path(thinker.checkpoint))
            words = [
                id_
                for id_, text in enumerate(vocabulary.token_bytes)
                if text.strip().isalpha() and id_ not in vocabulary.special_ids
            ]
            room = thinker.max_model_len
            return FakeThinker(vocabulary, words, max_model_len=room, seats=thinker.seats)
        case "talker":
            talker = msgspec.json.decode(config, type=TalkerSettings)
            return FakeTalker(max_model_len=talker.max_model_len, seats=talker.seats)
        case "code2wav":
            code2wav = msgspec.json.decode(config, type=Code2WavSettings)
            return FakeCode2Wav(max_sessions=code2wav.max_sessions)
        case other:
            raise ValueError(f"there is no stage {other}")


def reference_rows(checkpoint: Path, voices_dir: str) -> dict[str, int]:
    """By voice, for its reference clip."""
    folder = Path(voices_dir) if voices_dir else None
    samples = voice_references(checkpoint, folder, read_config(checkpoint).token2wav)
    return {name: length // SAMPLES_PER_POSITION for name, length in samples.items()}


async def load(stage: str, config: bytes) -> StageService:
    return FakeService(made(stage, config))


if __name__ == "__main__":
    name = sys.argv.pop(1)
    run_stage_process(name, partial(load, name))
