"""The stages as the session sees them. Real ones talk to a process; tests put fakes in place.

Every call raises `StageError` and nothing else.
"""

from typing import Protocol

from duplex_sidecar.stages.envelope import (
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    HealthReport,
    ReferenceRows,
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)


class Stage(Protocol):
    @property
    def generation(self) -> int:
        """Grows each time the stage's process starts: streams of an older generation are gone."""
        ...

    async def health(self) -> HealthReport: ...


class EncoderStage(Stage, Protocol):
    async def open(self, request: EncoderOpen) -> None: ...
    async def feed(self, request: EncoderFeed) -> EncoderRows: ...
    async def reference(self, request: EncoderReference) -> ReferenceRows: ...
    async def close(self, request: EncoderClose) -> None: ...


class ThinkerStage(Stage, Protocol):
    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer: ...
    async def close(self, request: ThinkerClose) -> None: ...


class TalkerStage(Stage, Protocol):
    async def feed(self, request: TalkerFeed) -> TalkerAnswer: ...
    async def close(self, request: TalkerClose) -> None: ...


class Code2WavStage(Stage, Protocol):
    async def open(self, request: WaveOpen) -> None: ...
    async def feed(self, request: WaveFeed) -> WaveSamples: ...
    async def close(self, request: WaveClose) -> None: ...
