"""The Talker as the session sees it: `interface.TalkerStage` over a link."""

from duplex_sidecar.stages.envelope import (
    Done,
    Health,
    HealthReport,
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
)
from duplex_sidecar.stages.link import StageLink


class TalkerClient:
    """Implements `TalkerStage`. feed_timeout_s bounds one condition and its codes."""

    def __init__(
        self, link: StageLink, *, feed_timeout_s: float = 30.0, call_timeout_s: float = 10.0
    ) -> None:
        self._link = link
        self._feed_timeout_s = feed_timeout_s
        self._call_timeout_s = call_timeout_s

    @property
    def generation(self) -> int:
        return self._link.generation

    async def health(self) -> HealthReport:
        return await self._link.call(Health(), HealthReport, self._call_timeout_s)

    async def feed(self, request: TalkerFeed) -> TalkerAnswer:
        return await self._link.call(request, TalkerAnswer, self._feed_timeout_s)

    async def close(self, request: TalkerClose) -> None:
        """End a stream; returns when the engine holds nothing of it. Unknown streams are ended."""
        await self._link.call(request, Done, self._call_timeout_s)
