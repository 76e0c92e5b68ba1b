"""The encoder as the session sees it: `interface.EncoderStage` over a link."""

from duplex_sidecar.stages.envelope import (
    Done,
    EncoderClose,
    EncoderFeed,
    EncoderOpen,
    EncoderReference,
    EncoderRows,
    Health,
    HealthReport,
    ReferenceRows,
)
from duplex_sidecar.stages.link import StageLink


class EncoderClient:
    """Implements `EncoderStage`.

    feed_timeout_s bounds one append, the replay of a minute included. After a timeout the session
    does not know whether the append was encoded: it opens again and restores.
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

    async def open(self, request: EncoderOpen) -> None:
        """Start a session's state, or replace the one it has. Refused when no room is left."""
        await self._link.call(request, Done, self._call_timeout_s)

    async def feed(self, request: EncoderFeed) -> EncoderRows:
        """Encode one append. Any error of the stage's own (refused, undecodable, internal) leaves
        the session's state as it was before the call."""
        return await self._link.call(request, EncoderRows, self._feed_timeout_s)

    async def reference(self, request: EncoderReference) -> ReferenceRows:
        """Encode a voice's reference clip. Refused when there is no such voice, or no clip."""
        return await self._link.call(request, ReferenceRows, self._feed_timeout_s)

    async def close(self, request: EncoderClose) -> None:
        """Forget a session. An unknown one is forgotten already."""
        await self._link.call(request, Done, self._call_timeout_s)
