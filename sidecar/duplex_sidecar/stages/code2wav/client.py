"""Code2Wav as the session sees it: `interface.Code2WavStage` over a link."""

from duplex_sidecar.stages.envelope import (
    Done,
    Health,
    HealthReport,
    WaveClose,
    WaveFeed,
    WaveOpen,
    WaveSamples,
)
from duplex_sidecar.stages.link import StageLink


class Code2WavClient:
    """Implements `Code2WavStage`. Chunks of one session may be fed without waiting for each other;
    they are taken in the order in which `feed` was called.

    After `out_of_order`, `internal` or `timeout` the stream is not to be fed again: open the next
    epoch. After `unknown_stream` (the stage restarted) or `gone` too.
    """

    def __init__(
        self, link: StageLink, *, feed_timeout_s: float = 15.0, call_timeout_s: float = 10.0
    ) -> None:
        self._link = link
        self._feed_timeout_s = feed_timeout_s
        self._call_timeout_s = call_timeout_s

    @property
    def generation(self) -> int:
        return self._link.generation

    async def health(self) -> HealthReport:
        return await self._link.call(Health(), HealthReport, self._call_timeout_s)

    async def open(self, request: WaveOpen) -> None:
        """Begin an epoch; chunks of an older one that still wait are dropped. Refused: unknown
        voice, another voice than the session began with, no room. Out of order: an epoch that is
        over, or this one when a chunk of it was already taken."""
        await self._link.call(request, Done, self._call_timeout_s)

    async def feed(self, request: WaveFeed) -> WaveSamples:
        return await self._link.call(request, WaveSamples, self._feed_timeout_s)

    async def close(self, request: WaveClose) -> None:
        """Forget a session and the voice it was bound to. An unknown one is forgotten already."""
        await self._link.call(request, Done, self._call_timeout_s)
