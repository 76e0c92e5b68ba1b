"""The four real stages, both engines among them, for replicas that live in the test's process. The
processes outlive a replica; what they hold for it goes with it, as in a crash of the sidecar."""

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

from session_kit import Stages

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.session.model import ServedModel, load_model
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.stages.code2wav.client import Code2WavClient
from duplex_sidecar.stages.encoder.client import EncoderClient
from duplex_sidecar.stages.envelope import (
    ElementType,
    EncoderClose,
    HealthReport,
    TalkerClose,
    ThinkerClose,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.interface import Code2WavStage
from duplex_sidecar.stages.launch import stage_specs
from duplex_sidecar.stages.supervisor import Supervisor
from duplex_sidecar.stages.talker.client import TalkerClient
from duplex_sidecar.stages.thinker.client import ThinkerClient

FEED_TIMEOUT_S = 60.0
"""Other programs may share the processors."""
MODEL_TOKENS = 2_048
TALKER_TOKENS = 2_048
SLOTS = 4
SPARE = 2


class WatchedCode2Wav:
    """A vocoder whose input is kept."""

    def __init__(self, stage: Code2WavStage) -> None:
        self._stage = stage
        self.fed: list[WaveFeed] = []

    @property
    def generation(self) -> int:
        return self._stage.generation

    async def health(self) -> HealthReport:
        return await self._stage.health()

    async def open(self, request: WaveOpen) -> None:
        await self._stage.open(request)

    async def feed(self, request: WaveFeed) -> WaveSamples:
        self.fed.append(request)
        return await self._stage.feed(request)

    async def close(self, request: WaveClose) -> None:
        await self._stage.close(request)


@dataclass
class RealStages(Stages):
    """One replica's way to them."""

    real: StageSet | None = None
    watched: WatchedCode2Wav | None = None

    def as_set(self) -> StageSet:
        assert self.real is not None
        return self.real

    def chunks(self) -> Sequence[WaveFeed]:
        assert self.watched is not None
        return self.watched.fed


@dataclass
class RealEngines:
    """The processes under their supervisor. model: what they serve."""

    supervisor: Supervisor
    model: ServedModel
    _last: StageSet | None = field(default=None)

    async def stages(self) -> Stages:
        """For a replica that begins: nothing of the one before is left."""
        if self._last is not None:
            await _emptied(self._last)
        link = self.supervisor.link
        watched = WatchedCode2Wav(Code2WavClient(link("code2wav"), feed_timeout_s=FEED_TIMEOUT_S))
        self._last = StageSet(
            encoder=EncoderClient(link("encoder"), feed_timeout_s=FEED_TIMEOUT_S),
            thinker=ThinkerClient(link("thinker"), feed_timeout_s=FEED_TIMEOUT_S),
            talker=TalkerClient(link("talker"), feed_timeout_s=FEED_TIMEOUT_S),
            code2wav=watched,
            thinker_spare=SpareSeats(SPARE),
            talker_spare=SpareSeats(SPARE),
        )
        return RealStages(real=self._last, watched=watched)


async def _emptied(stages: StageSet) -> None:
    for name in (await stages.encoder.health()).streams:
        await stages.encoder.close(EncoderClose(name))
    for name in (await stages.thinker.health()).streams:
        await stages.thinker.close(ThinkerClose(name))
    for name in (await stages.talker.health()).streams:
        await stages.talker.close(TalkerClose(name))
    for name in (await stages.code2wav.health()).streams:
        await stages.code2wav.close(WaveClose(name))


@asynccontextmanager
async def real_engines(checkpoint: Path, cache_dir: Path) -> AsyncIterator[RealEngines]:
    """Started, on the tiny checkpoint or another one, on the CPU. Half a minute."""
    with tempfile.TemporaryDirectory(prefix="duplex-real-") as folder:
        settings = SidecarSettings(
            checkpoint=str(checkpoint),
            redis_url="unix:///nowhere",
            runtime_dir=folder,
            cache_dir=str(cache_dir),
            slots=SLOTS,
            rebuild_seats=SPARE,
            max_model_tokens=MODEL_TOKENS,
            max_talker_tokens=TALKER_TOKENS,
        )
        specs = stage_specs(settings, ElementType.FLOAT32)
        supervisor = Supervisor(specs, lambda report: None)
        await supervisor.start()
        try:
            yield RealEngines(supervisor, load_model(settings))
        finally:
            await supervisor.stop()
