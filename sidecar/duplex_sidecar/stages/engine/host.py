"""The streams of one engine: guards in front, one unit at a time each, endings without leftovers.

Shared by the Thinker and the Talker, which differ in what a prompt is made of and what an answer
says.
"""

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from vllm.v1.engine.async_llm import AsyncLLM

from duplex_sidecar.engine_plugin.unit_args import UnitArgs
from duplex_sidecar.stages.engine.guards import (
    EngineLimits,
    Refusal,
    StreamState,
    check_extends,
    check_length,
    check_room,
)
from duplex_sidecar.stages.engine.handoff import Handoff, RowsLostError
from duplex_sidecar.stages.engine.launch import core_sentinels
from duplex_sidecar.stages.engine.stream import EngineStream, StreamLostError, unit_params
from duplex_sidecar.stages.errors import StageError, StageFault


class Feed(NamedTuple):
    """One feed, checked by its stage. new: positions that the prompt takes. render: makes the
    engine's input from a prefix for item hashes that is unique to this feed."""

    stream: str
    unit: int
    opens: bool
    position: int
    new: int
    answer_limit: int
    rules: bytes
    stop_ids: list[int]
    render: Callable[[str], Any]


class Answered(NamedTuple):
    """number: of the stream in the hand-off. first: absolute index of the first token."""

    number: int
    first: int
    ids: list[int]
    engine_ms: float


@dataclass(slots=True)
class _Held:
    """One stream. number: its name in the hand-off. worst: the most positions that it may come to
    hold in its present unit."""

    stream: EngineStream
    number: int
    state: StreamState
    worst: int


class _Ending(NamedTuple):
    """A stream on its way out: it may still hold its seat and its blocks."""

    task: asyncio.Task[None]
    worst: int


class EngineHost:
    """Raises StageError and nothing else."""

    def __init__(
        self,
        stage: str,
        engine: AsyncLLM,
        limits: EngineLimits,
        handoff: Handoff,
        feed_timeout_s: float,
    ) -> None:
        self.limits = limits
        self.handoff = handoff
        self._stage = stage
        self._engine = engine
        self._feed_timeout_s = feed_timeout_s
        self._held: dict[str, _Held] = {}
        self._ending: dict[str, _Ending] = {}
        self._next_number = 0
        self._core_lost = asyncio.Event()
        for sentinel in core_sentinels():
            asyncio.get_running_loop().add_reader(sentinel, self._core_lost.set)

    def error(self, fault: StageFault, reason: str) -> StageError:
        return StageError(self._stage, fault, reason)

    @property
    def streams(self) -> tuple[str, ...]:
        """Streams that hold a seat, those that are being ended included."""
        return tuple(dict.fromkeys((*self._held, *self._ending)))

    async def failed(self) -> str:
        """Returns when the engine core is gone."""
        await self._core_lost.wait()
        return "the engine core has ended"

    async def run_unit(self, feed: Feed) -> Answered:
        """Admit and run one unit. After any failure past admission the stream is ended: what the
        engine holds of it can no longer be known."""
        await self._settle(feed)
        held = self._admit(feed)
        self.handoff.expect(held.number, feed.unit)
        try:
            return await self._run(held, feed)
        except BaseException:
            self.handoff.forget(held.number, feed.unit)
            self._start_ending(feed.stream)
            raise

    def finish_unit(self, answered: Answered, feed: Feed) -> None:
        """The answer has been read out of the hand-off."""
        self.handoff.forget(answered.number, feed.unit)

    def poison(self, answered: Answered, feed: Feed, error: Exception) -> StageError:
        """The unit's answer is not usable: end the stream, say why."""
        self.handoff.forget(answered.number, feed.unit)
        self._start_ending(feed.stream)
        lost = isinstance(error, RowsLostError)
        return self.error(StageFault.ROWS_LOST if lost else StageFault.INTERNAL, str(error))

    async def close(self, stream: str) -> None:
        """End a stream; an unknown one is ended already."""
        self._start_ending(stream)
        ending = self._ending.get(stream)
        if ending is None:
            return
        try:
            await asyncio.shield(ending.task)
        except TimeoutError:
            reason = "the engine does not let go of the stream"
            raise self.error(StageFault.TIMEOUT, reason) from None

    async def close_all(self) -> None:
        for stream in tuple(self._held):
            self._start_ending(stream)
        tasks = [ending.task for ending in self._ending.values()]
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start_ending(self, stream: str) -> None:
        held = self._held.pop(stream, None)
        if held is None:
            return
        task = asyncio.create_task(held.stream.end())
        self._ending[stream] = _Ending(task, held.worst)

        def ended(task: asyncio.Task[None]) -> None:
            # One that did not end keeps its seat counted: vLLM still holds it.
            if not task.cancelled() and task.exception() is None:
                del self._ending[stream]

        task.add_done_callback(ended)

    async def _settle(self, feed: Feed) -> None:
        """Wait for streams on their way out where this feed needs what they hold, so that it is
        not refused for the sake of a stream that is already closed."""
        while running := [e.task for e in self._ending.values() if not e.task.done()]:
            try:
                self._check_room(feed)
                if feed.stream not in self._ending:
                    return
            except Refusal:
                pass
            await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)

    def _check_room(self, feed: Feed) -> None:
        others = [held.worst for name, held in self._held.items() if name != feed.stream]
        others += [ending.worst for ending in self._ending.values()]
        worst = feed.position + feed.new + feed.answer_limit
        check_room(self.limits, worst, others, opens=feed.opens)

    def _admit(self, feed: Feed) -> _Held:
        """Guards, before anything reaches the engine."""
        held = self._held.get(feed.stream)
        if held is None and not feed.opens:
            raise self.error(StageFault.UNKNOWN_STREAM, "no such stream")
        try:
            if held is not None:
                check_extends(held.state, feed.unit, feed.position, opens=feed.opens)
            elif feed.position != 0:
                raise Refusal("a stream opens at position 0")
            elif feed.stream in self._ending:
                raise Refusal("a stream of this name could not be ended")
            check_length(self.limits, feed.position, feed.new, feed.answer_limit)
            self._check_room(feed)
        except Refusal as refusal:
            raise self.error(StageFault.REFUSED, str(refusal)) from None
        if held is None:
            self._next_number += 1
            request_id = f"{self._stage}-{self._next_number}"
            held = _Held(
                stream=EngineStream(self._engine, request_id),
                number=self._next_number,
                state=StreamState(positions=0, last_unit=-1, busy=False),
                worst=0,
            )
            self._held[feed.stream] = held
        held.worst = feed.position + feed.new + feed.answer_limit
        held.state = StreamState(positions=feed.position, last_unit=feed.unit, busy=True)
        return held

    async def _run(self, held: _Held, feed: Feed) -> Answered:
        args = UnitArgs(held.number, feed.unit, feed.rules)
        params = unit_params(feed.answer_limit, feed.stop_ids, args.as_extra_args())
        started = time.perf_counter()
        try:
            prompt = feed.render(f"{held.number}:{feed.unit}")
            ids = await held.stream.unit(prompt, params, self._feed_timeout_s)
        except TimeoutError:
            reason = f"no answer in {self._feed_timeout_s:g} s"
            raise self.error(StageFault.TIMEOUT, reason) from None
        except StreamLostError as error:
            fault = StageFault.GONE if self._engine.errored else StageFault.UNKNOWN_STREAM
            raise self.error(fault, str(error)) from None
        engine_ms = 1e3 * (time.perf_counter() - started)
        first = feed.position + feed.new
        # The last token has no KV: the next feed brings it along.
        held.worst = first + len(ids) - 1
        held.state = StreamState(positions=held.worst, last_unit=feed.unit, busy=False)
        return Answered(held.number, first, ids, engine_ms)
