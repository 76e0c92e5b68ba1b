"""A session's stream in the Thinker or the Talker: which it is, whether it lives, how it is fed.

A stream is one engine request. An extension continues it; a rebuild opens a new one and lets the
old one go once the new one has answered. Streams of an older stage generation are gone.
"""

import asyncio
import itertools
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.session.stages import StageSet
from duplex_sidecar.stages.envelope import (
    TalkerAnswer,
    TalkerClose,
    TalkerFeed,
    TalkerPart,
    ThinkerAnswer,
    ThinkerClose,
    ThinkerFeed,
    ThinkerPart,
)
from duplex_sidecar.stages.errors import StageError, StageFault
from duplex_sidecar.stages.interface import Stage

log = logging.getLogger(__name__)

LOST = frozenset({StageFault.GONE, StageFault.UNKNOWN_STREAM, StageFault.TIMEOUT})
"""Faults after which a stream is rebuilt. After a time-out its state is unknown, hence gone."""

_Part = TypeVar("_Part")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True)
class StreamFeed(Generic[_Part]):
    """One feed, before it is known which engine takes it. Fields as in `stages.envelope`."""

    stream: str
    unit: int
    opens: bool
    position: int
    parts: tuple[_Part, ...]
    rules: bytes


class EngineStream(Generic[_Part, _Answer]):
    """Streams of one session in one engine; at most one is live."""

    def __init__(
        self,
        stage: Stage,
        name: str,
        feed: Callable[[StreamFeed[_Part]], Awaitable[_Answer]],
        close: Callable[[str], Awaitable[None]],
        spare: SpareSeats,
    ) -> None:
        """`name` makes the streams' names unique across sessions, replicas and fences. spare: the
        engine's seats for streams that live beside an old one, shared by all sessions."""
        self._stage = stage
        self._name = name
        self._feed_stage = feed
        self._close_stage = close
        self._spare = spare
        self._numbers = itertools.count(1)
        self._stream: str | None = None
        self._generation = 0
        self._closing: set[asyncio.Task[None]] = set()

    @property
    def live(self) -> bool:
        """Whether there is a stream that may be extended."""
        return self._stream is not None and self._generation == self._stage.generation

    async def extend(
        self, unit: int, position: int, parts: tuple[_Part, ...], rules: bytes
    ) -> _Answer:
        """Feed the live stream. A lost stream raises StageError and is forgotten."""
        stream = self._stream
        if stream is None or not self.live:
            raise StageError(self._name, StageFault.UNKNOWN_STREAM, "no live stream")
        return await self._feed(StreamFeed(stream, unit, False, position, parts, rules))

    async def rebuild(self, unit: int, parts: tuple[_Part, ...], rules: bytes) -> _Answer:
        """Open a new stream with a whole prompt; the old one is let go after the answer, or before
        if the engine has no seat for both."""
        old = self._stream if self.live else None
        if old is not None and not self._spare.try_take():
            self._stream = None
            # Also if this call is given up: `close` waits for it then.
            await asyncio.shield(self._close_soon(old))
            old = None
        stream, generation = self._new_name(), self._stage.generation
        try:
            answer = await self._feed(StreamFeed(stream, unit, True, 0, parts, rules))
            self._stream, self._generation = stream, generation
            return answer
        except StageError:
            self._stream = None
            raise
        finally:
            if old is not None:
                self._close_soon(old).add_done_callback(lambda _: self._spare.give_back())

    @property
    def may_open_beside(self) -> bool:
        """Whether there is a live stream and a free seat beside it."""
        return self.live and self._spare.free > 0

    async def open_beside(self, unit: int, parts: tuple[_Part, ...], rules: bytes) -> _Answer:
        """Open the stream that takes the live one's place; the old one is let go after the answer.
        A failure leaves the old one as it was and nothing of the new one. Raises StageError, also
        (refused) when there is no seat or nothing to stand beside."""
        old = self._stream
        if old is None or not self.live or not self._spare.try_take():
            raise StageError(self._name, StageFault.REFUSED, "no seat beside a live stream")
        stream, generation = self._new_name(), self._stage.generation
        gone = stream
        try:
            answer = await self._feed_stage(StreamFeed(stream, unit, True, 0, parts, rules))
            self._stream, self._generation = stream, generation
            gone = old
            return answer
        finally:
            self._close_soon(gone).add_done_callback(lambda _: self._spare.give_back())

    def _new_name(self) -> str:
        return f"{self._name}/{next(self._numbers)}"

    async def _feed(self, feed: StreamFeed[_Part]) -> _Answer:
        try:
            return await self._feed_stage(feed)
        except asyncio.CancelledError:
            self._close_soon(feed.stream)
            self._stream = None
            raise
        except StageError as error:
            if error.fault in LOST:
                self._stream = None
            if error.fault is not StageFault.GONE:
                self._close_soon(feed.stream)
                self._stream = None
            raise

    def _close_soon(self, stream: str) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._close_stream(stream))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)
        return task

    async def _close_stream(self, stream: str) -> None:
        try:
            await self._close_stage(stream)
        except StageError as error:
            # `session.reconciler` ends what belongs to no session any more.
            log.info(
                "stream not closed", extra={"fields": {"stage": error.stage, "fault": error.fault}}
            )

    async def close(self) -> None:
        """End the streams; waits until the stage has let go of them. Never raises StageError. Given
        up, it goes on all the same."""
        stream = self._stream if self.live else None
        self._stream = None
        if stream is not None:
            self._close_soon(stream)
        if self._closing:
            await asyncio.wait(set(self._closing))


ThinkerStream = EngineStream[ThinkerPart, ThinkerAnswer]
TalkerStream = EngineStream[TalkerPart, TalkerAnswer]


def thinker_stream(stages: StageSet, session: str, fence: int) -> ThinkerStream:
    stage = stages.thinker

    def feed(f: StreamFeed[ThinkerPart]) -> Awaitable[ThinkerAnswer]:
        return stage.feed(
            ThinkerFeed(session, f.stream, f.unit, f.opens, f.position, f.parts, f.rules)
        )

    return EngineStream(
        stage,
        f"{session}/{fence}",
        feed,
        lambda stream: stage.close(ThinkerClose(stream)),
        stages.thinker_spare,
    )


def talker_stream(stages: StageSet, session: str, fence: int) -> TalkerStream:
    stage = stages.talker

    def feed(f: StreamFeed[TalkerPart]) -> Awaitable[TalkerAnswer]:
        return stage.feed(
            TalkerFeed(session, f.stream, f.unit, f.opens, f.position, f.parts, f.rules)
        )

    return EngineStream(
        stage,
        f"{session}/{fence}",
        feed,
        lambda stream: stage.close(TalkerClose(stream)),
        stages.talker_spare,
    )
