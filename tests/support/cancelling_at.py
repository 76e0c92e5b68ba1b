"""Cancels a task while it waits for the nth time: every await of it, one after another."""

import asyncio
import types
from collections.abc import Callable, Coroutine, Generator
from typing import Any


@types.coroutine
def _counted(
    work: Coroutine[Any, Any, Any], at_suspension: Callable[[int], None]
) -> Generator[Any, Any, Any]:
    """`work`, step by step; is told of each suspension and its number, from 1."""
    count, error, value = 0, None, None
    while True:
        try:
            waits_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as done:
            return done.value
        count, error, value = count + 1, None, None
        at_suspension(count)
        try:
            value = yield waits_for
        except BaseException as raised:
            error = raised


class CancelledAt:
    """A task that is cancelled as soon as it waits for the nth time. suspensions: how often it has
    waited; fewer than n: it was not cancelled."""

    def __init__(self, number: int, work: Coroutine[Any, Any, Any], name: str | None = None):
        self._number = number
        self.suspensions = 0
        self.task: asyncio.Task[Any] = asyncio.Task(self._run(work), name=name)

    async def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        return await _counted(work, self._suspended)

    def _suspended(self, count: int) -> None:
        self.suspensions = count
        if count == self._number:
            asyncio.get_running_loop().call_soon(self.task.cancel)
