"""A call's talk with one owner of its session, from the dialling to the loss of the connection."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NoReturn

import msgspec

from duplex_gateway.decide import Finish, after_close
from duplex_gateway.ending import Ended
from duplex_gateway.metrics import CallEnd
from duplex_gateway.resume import Pass, ResumeState
from duplex_gateway.upstream import Lost, Upstream
from duplex_gateway.watch import LeaseWatch
from duplex_gateway.wire import ServerEvent, moved_event, read_server_event

GREETING_TIMEOUT_S = 30.0
"""A replica that takes a session up loads it and may have to finish a unit first."""
MOST_FAREWELLS = 16
_GREETINGS = ("session.created", "session.resumed")


async def first_end(*work: Coroutine[Any, Any, NoReturn]) -> NoReturn:
    """Run them side by side until one raises; raises that, when the others have ended, too."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    # Where several have ended at once, the end of the call counts more than that of a connection.
    ended = [o for o in outcomes if isinstance(o, Ended)]
    raise ended[0] if ended else _failure(done)


def _failure(done: "set[asyncio.Task[NoReturn]]") -> BaseException:
    return next(iter(done)).exception() or AssertionError("it never returns")


class Exchange:
    """Reads the client's side from `ResumeState`, writes to it by `send`."""

    def __init__(
        self,
        upstream: Upstream,
        state: ResumeState,
        session: str,
        fence: int,
        send: Callable[[bytes], Awaitable[None]],
        input_came: asyncio.Event,
        room_came: asyncio.Event,
        greeted: Callable[[], None],
    ) -> None:
        """greeted: called when the owner has answered. room_came: set when there may be more."""
        self._upstream = upstream
        self._state = state
        self._session = session
        self._fence = fence
        self._send = send
        self._input_came = input_came
        self._room_came = room_came
        self._greeted = greeted
        self._farewells: list[bytes] = []
        """What the owner said of the connection's end."""
        self._last_error = ""

    async def run(self, watch: LeaseWatch) -> NoReturn:
        """Raises Lost when the call goes on over another connection, Ended when it is over."""
        with watch.watching(self._session, self._fence) as watched:
            try:
                await first_end(self._hear(), self._speak(), self._until(watched.moved))
            except Lost as lost:
                finish = after_close(lost.close_code, self._last_error)
                if finish is None:
                    raise
                raise self._ended(finish) from None

    def _ended(self, finish: Finish) -> Ended:
        end = CallEnd.TAKEN_OVER if finish.close_code == 4001 else CallEnd.SESSION_OVER
        return Ended(end, finish.close_code, finish.reason, tuple(self._farewells))

    async def _until(self, moved: asyncio.Event) -> NoReturn:
        await moved.wait()
        self._upstream.cut()
        raise Lost(1006)

    async def _speak(self) -> NoReturn:
        while True:
            message = self._state.next_message()
            if message is not None:
                with self._state.account.holding(len(message)):
                    await self._upstream.send(message)
            else:
                self._input_came.clear()
                await self._input_came.wait()

    async def _hear(self) -> NoReturn:
        await self._until_greeted()
        while True:
            verdict = self._state.hear(await self._upstream.receive())
            event = verdict.event
            if event is not None and event.server_event_seq is None:
                self._room_came.set()
                self._last_error = event.error.code or event.reason or self._last_error
            match verdict.passing:
                case Pass.FORWARD:
                    await self._send(verdict.message)
                case Pass.HOLD:
                    self._hold(verdict.message)
                case Pass.BROKEN:
                    self._upstream.cut()
                    raise Lost(1006)
                case Pass.DROP:
                    pass

    async def _until_greeted(self) -> None:
        first_call = not self._state.greeted
        try:
            async with asyncio.timeout(GREETING_TIMEOUT_S):
                message, event = await self._greeting()
        except TimeoutError:
            self._upstream.cut()
            raise Lost(1006) from None
        facts = event.duplex
        owed = self._state.connect(self._fence, facts)
        self._greeted()
        self._input_came.set()
        self._room_came.set()
        if first_call:
            await self._send(message)
        else:
            await self._send(moved_event(self._session, self._fence, facts.acknowledged_sample))
        with self._state.account.holding(sum(map(len, owed))):
            for answer in owed:
                await self._send(answer)

    async def _greeting(self) -> tuple[bytes, ServerEvent]:
        while True:
            message = await self._upstream.receive()
            try:
                event = read_server_event(message)
            except (msgspec.DecodeError, UnicodeError):
                self._upstream.cut()
                raise Lost(1006) from None
            if event.type in _GREETINGS:
                return message, event
            self._last_error = event.error.code or event.reason or self._last_error
            self._hold(message)

    def _hold(self, message: bytes) -> None:
        self._farewells = [*self._farewells, message][-MOST_FAREWELLS:]
