"""Whose turn it is on the device: what waits at the same moment goes as one pass, in order.

One thread computes. A pass is filled when that thread is free for it, not when the first of its
inputs came, so that everything which came meanwhile goes along.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, TypeVar

_In = TypeVar("_In")
_Out = TypeVar("_Out")
_T = TypeVar("_T")


class Worker:
    """One thread. Whoever wants to compute waits for `turn` first; turns go in the order asked."""

    def __init__(self, name: str) -> None:
        self.turn = asyncio.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=name)

    async def compute(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def stop(self) -> None:
        """Finish what is under way; what waits is not begun."""
        await asyncio.to_thread(self._thread.shutdown, cancel_futures=True)


@dataclass(frozen=True, slots=True)
class _Waiting(Generic[_In, _Out]):
    given: _In
    answer: "asyncio.Future[_Out]"


class Passes(Generic[_In, _Out]):
    """A queue before `work`, which gives one output for each of up to `max_batch` inputs.

    Never longer than there are callers, since each waits for its answer. at_fault: called for every
    input that fails alone too, after whoever waits for it was told.
    """

    def __init__(
        self,
        worker: Worker,
        work: Callable[[Sequence[_In]], Sequence[_Out]],
        max_batch: int,
        at_fault: Callable[[], Awaitable[None]],
    ) -> None:
        self._worker = worker
        self._work = work
        self._max_batch = max_batch
        self._at_fault = at_fault
        self._waiting: deque[_Waiting[_In, _Out]] = deque()
        self._running: asyncio.Task[None] | None = None

    async def through(self, given: _In) -> _Out:
        """The output of one input. Raises what `work` raises for it alone."""
        answer: asyncio.Future[_Out] = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(given, answer))
        if self._running is None or self._running.done():
            self._running = asyncio.create_task(self._run())
        return await answer

    def stop(self) -> None:
        if self._running is not None:
            self._running.cancel()

    async def _run(self) -> None:
        """Runs while something waits. A pass that fails is repeated input by input, so that only
        the one at fault fails."""
        while self._waiting:
            async with self._worker.turn:
                batch = self._taken()
                error = await self._pass(batch)
            if error is None:
                continue
            if len(batch) == 1:
                await self._fail(batch[0], error)
                continue
            for waiting in batch:
                async with self._worker.turn:
                    error = await self._pass([waiting])
                if error is not None:
                    await self._fail(waiting, error)

    def _taken(self) -> list[_Waiting[_In, _Out]]:
        """Those that waited longest, but for those that nobody waits for any more."""
        batch: list[_Waiting[_In, _Out]] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.answer.done():
                batch.append(waiting)
        return batch

    async def _pass(self, batch: Sequence[_Waiting[_In, _Out]]) -> Exception | None:
        """Answers all, or none and says why."""
        if not batch:
            return None
        given = [waiting.given for waiting in batch]
        try:
            outputs = await self._worker.compute(lambda: self._work(given))
            answers = list(zip(batch, outputs, strict=True))
        except Exception as error:
            return error
        for waiting, output in answers:
            if not waiting.answer.done():
                waiting.answer.set_result(output)
        return None

    async def _fail(self, waiting: _Waiting[_In, _Out], error: Exception) -> None:
        if not waiting.answer.done():
            waiting.answer.set_exception(error)
        await self._at_fault()
