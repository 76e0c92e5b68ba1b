"""The Thinker as the session sees it: `interface.ThinkerStage` over a link."""

from duplex_sidecar.stages.envelope import (
    Done,
    Health,
    HealthReport,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
)
from duplex_sidecar.stages.link import StageLink


class ThinkerClient:
    """Implements `ThinkerStage`. feed_timeout_s bounds one append, a whole rebuild included."""

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

    async def feed(self, request: ThinkerFeed) -> ThinkerAnswer:
        return await self._link.call(request, ThinkerAnswer, self._feed_timeout_s)

    async def close(self, request: ThinkerClose) -> None:
        """End a stream; returns when the engine holds nothing of it. Unknown streams are ended."""
        await self._link.call(request, Done, self._call_timeout_s)
