"""Two sockets, one sequence: a client's call, whichever replica runs its session at the moment.

Two tasks: one takes what the client says, one finds the session's owner, talks to it until it is
lost, and finds the next one. What passes, and what is kept until the next one, is `resume`.
"""

import asyncio
import contextlib
import logging
from dataclasses import dataclass
from typing import NoReturn

from duplex_gateway.client_socket import ClientSocket
from duplex_gateway.decide import Dial, Over, Wait, WaitReason, decide
from duplex_gateway.ending import SERVICE_RESTART, TRY_AGAIN_LATER, Ended
from duplex_gateway.exchange import Exchange, first_end
from duplex_gateway.held import Room
from duplex_gateway.metrics import CallEnd, Metrics
from duplex_gateway.resume import ResumeState
from duplex_gateway.routing import Directory, is_newer, token_matches
from duplex_gateway.upstream import Lost, Unreachable, Upstream, dialled
from duplex_gateway.waiting import REST_S, Patience
from duplex_gateway.watch import LeaseWatch
from duplex_gateway.wire import (
    ClientMessage,
    Kind,
    error_event,
    queued_event,
    read_client_message,
)
from duplex_sidecar.doors.openai_wire import MAX_CONTROL_BYTES
from duplex_sidecar.ledger.errors import LedgerError, LedgerUnavailable
from duplex_sidecar.protocol.errors import ErrorCode

log = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 10.0
"""Well below the time in which a ping has to be answered: while nothing is read, no answer is."""


@dataclass(frozen=True)
class CallParts:
    """What all calls of a gateway share."""

    directory: Directory
    watch: LeaseWatch
    metrics: Metrics
    queue_wait_s: float


class Call:
    """One client connection whose token has proved right."""

    def __init__(
        self,
        parts: CallParts,
        client: ClientSocket,
        session: str,
        token: str,
        state: ResumeState,
        mark: str,
    ) -> None:
        """mark: of this call among all of the session, "" where it could not be marked."""
        self._directory = parts.directory
        self._watch = parts.watch
        self._metrics = parts.metrics
        self._client = client
        self._session = session
        self._token = token
        self._state = state
        self._mark = mark
        self._patience = Patience(parts.queue_wait_s)
        self._input = asyncio.Event()
        """There may be something to send."""
        self._room = asyncio.Event()
        """There may be room for more input."""
        self._impatient = False
        self._shutdown = asyncio.Event()

    async def run(self) -> Ended:
        """To its end; returns how it ended. Raises nothing but a cancellation."""
        try:
            await first_end(
                self._listen(), self._talk(), self._client.until_overdue(), self._until_shutdown()
            )
        except Ended as ended:
            return ended
        except Exception:
            log.exception("call failed")
            return Ended.because(CallEnd.FAILED, ErrorCode.NOT_READY, "internal error")

    def hang_up(self) -> None:
        """The gateway shuts down."""
        self._shutdown.set()

    async def _until_shutdown(self) -> NoReturn:
        await self._shutdown.wait()
        raise Ended(CallEnd.SHUTDOWN, SERVICE_RESTART, "the gateway is shutting down")

    # --- the client -----------------------------------------------------------------------------

    async def _listen(self) -> NoReturn:
        while True:
            said = read_client_message(await self._client.receive())
            refusal = await self._refusal(said)
            if refusal is not None:
                self._metrics.input_refused()
                await self._client.send(refusal)
                continue
            for answer in self._state.take(said):
                await self._client.send(answer)
            self._input.set()

    async def _refusal(self, said: ClientMessage) -> bytes | None:
        """The error for a message that is not taken. Whatever may have to wait for an owner asks
        for room; a heartbeat never waits for it, and is answered without an owner."""
        if said.kind is Kind.TOO_LARGE:
            detail = f"an event without sound may have {MAX_CONTROL_BYTES} bytes"
            return error_event(ErrorCode.INVALID_EVENT, detail, said.event_id)
        if said.kind is Kind.HEARTBEAT:
            free = self._state.takes_heartbeat(said.memory_bytes)
        else:
            free = await self._has_room(said)
        return None if free else error_event(ErrorCode.INPUT_OVERFLOW, event_id=said.event_id)

    async def _has_room(self, said: ClientMessage) -> bool:
        """Waits for an acknowledgement that is due, or for the next owner, but not for ever."""
        state, size = self._state, said.memory_bytes
        sound = said.kind in (Kind.APPEND, Kind.OTHER)
        if state.room(sound=sound, memory_bytes=size) is Room.SOON and not self._impatient:
            try:
                with state.account.holding(size):
                    async with asyncio.timeout(ROOM_TIMEOUT_S):
                        while state.room(sound=sound) is Room.SOON:
                            self._room.clear()
                            await self._room.wait()
            except TimeoutError:
                self._impatient = True
        free = state.room(sound=sound, memory_bytes=size) is Room.FREE
        self._impatient = self._impatient and not free
        return free

    # --- owners ---------------------------------------------------------------------------------

    async def _talk(self) -> NoReturn:
        while True:
            owner = await self._find_owner()
            try:
                async with dialled(
                    owner, self._session, self._token, self._state.resume_from
                ) as upstream:
                    await self._exchange(upstream, owner).run(self._watch)
            except Unreachable as error:
                log.info("owner does not answer", extra={"fields": {"error": str(error)}})
            except Lost as lost:
                log.info("owner lost", extra={"fields": {"code": lost.close_code}})
            await self._lose()

    def _exchange(self, upstream: Upstream, owner: Dial) -> Exchange:
        return Exchange(
            upstream,
            self._state,
            self._session,
            owner.fence,
            self._client.send,
            self._input,
            self._room,
            self._greeted,
        )

    def _greeted(self) -> None:
        if self._patience.moved:
            self._metrics.moved(self._patience.waited_s)
        self._patience.greeted()

    async def _lose(self) -> None:
        acks = self._state.lose()
        with self._state.account.holding(sum(map(len, acks))):
            for ack in acks:
                await self._client.send(ack)
        self._room.set()
        self._patience.lost()

    async def _find_owner(self) -> Dial:
        """Where the session runs, as soon as it runs. Raises Ended."""
        while True:
            await asyncio.sleep(self._patience.next_pause_s())
            decision = await self._decision()
            match decision:
                case Dial():
                    return decision
                case Over(code=code, detail=detail):
                    raise Ended.because(CallEnd.SESSION_OVER, code, detail)
                case Wait():
                    await self._wait(decision)
            if self._patience.exhausted:
                raise Ended.because(
                    CallEnd.WAITED_TOO_LONG,
                    ErrorCode.NOT_READY,
                    "no replica took the session in time",
                    TRY_AGAIN_LATER,
                )

    async def _decision(self) -> Dial | Wait | Over:
        try:
            route, lease, mark = await self._directory.find(self._session)
        except LedgerUnavailable:
            return Wait(WaitReason.MOVING, None, wake=False)
        except LedgerError as error:
            raise Ended.because(
                CallEnd.FAILED, ErrorCode.LEDGER_UNAVAILABLE, error.reason
            ) from None
        if route is not None and not token_matches(self._token, route, lease):
            raise Ended.because(CallEnd.REFUSED, ErrorCode.SESSION_NOT_FOUND)
        if is_newer(mark, self._mark, route, lease):
            raise Ended.because(CallEnd.TAKEN_OVER, ErrorCode.SESSION_TAKEN_OVER)
        decision = decide(route, lease)
        if isinstance(decision, Dial) and decision.fence < self._state.fence:
            # A ledger that fell behind names an owner that is none any more.
            return Wait(WaitReason.MOVING, None, wake=False)
        return decision

    async def _wait(self, wait: Wait) -> None:
        asleep = wait.reason is WaitReason.PARKED and self._state.greeted
        if asleep and not self._state.wants_owner:
            await self._sleep(wait)
            return
        if wait.wake and self._patience.wake_is_due(wait.fence):
            with contextlib.suppress(LedgerError):
                await self._directory.wake(self._session)
                self._metrics.woke()
        if self._patience.notice_is_due(wait.reason, wait.position):
            await self._notice(wait)

    async def _sleep(self, wait: Wait) -> None:
        """The session sleeps and its client says nothing: nobody is woken for that."""
        if self._patience.notice_is_due(wait.reason, wait.position, at_once=True):
            await self._notice(wait)
        self._patience.rest()
        self._input.clear()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                await self._input.wait()

    async def _notice(self, wait: Wait) -> None:
        waited_ms = round(self._patience.waited_s * 1000)
        await self._client.send(queued_event(self._session, wait.reason, wait.position, waited_ms))
