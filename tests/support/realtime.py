"""A plain WebSocket client of the realtime door: no SDK, every message kept byte for byte."""

import asyncio
import base64
import json
import secrets
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from duplex_sidecar.client.local_sidecar import LocalSidecar

UNIT_SAMPLES = 16_000
UNIT_BYTES = 2 * UNIT_SAMPLES
DEFAULT_TIMEOUT_S = 60.0
MAX_APPEND_SAMPLES = 10 * UNIT_SAMPLES

Json = dict[str, Any]


class Gone(AssertionError):
    """The server closed the connection while the test still wanted something of it."""

    def __init__(self, code: int, reason: str, wanted: str) -> None:
        super().__init__(f"closed with {code} {reason!r}; wanted: {wanted}")
        self.code = code
        self.reason = reason


@dataclass
class Heard:
    """What a client has received. sequenced: server_event_seq -> the message as it came."""

    events: list[Json] = field(default_factory=list)
    sequenced: dict[int, bytes] = field(default_factory=dict)

    def take(self, message: bytes) -> Json:
        """Keep a message. One sequence number is one byte string, also when it comes again."""
        event: Json = json.loads(message)
        sequence = event.get("server_event_seq")
        if sequence is not None:
            assert self.sequenced.setdefault(sequence, message) == message, f"{sequence} differs"
        self.events.append(event)
        return event

    def of_type(self, name: str) -> list[Json]:
        return [event for event in self.events if event["type"] == name]

    @property
    def units(self) -> list[Json]:
        return self.of_type("duplex.unit")

    @property
    def errors(self) -> list[Json]:
        return [event["error"] for event in self.of_type("error")]

    @property
    def last_sequence(self) -> int:
        return max(self.sequenced, default=0)

    @property
    def audio_bytes(self) -> int:
        deltas = self.of_type("response.output_audio.delta")
        return sum(len(base64.b64decode(event["delta"])) for event in deltas)

    def assert_whole(self) -> None:
        """Sequence numbers and unit numbers from 1, without a gap or a repeat."""
        assert sorted(self.sequenced) == list(range(1, len(self.sequenced) + 1))
        events = [json.loads(self.sequenced[number]) for number in sorted(self.sequenced)]
        numbers = [event["unit"] for event in events if event["type"] == "duplex.unit"]
        assert numbers == list(range(1, len(numbers) + 1))


class RealtimeClient:
    """One connection. `heard` may be that of an earlier one: then both are one conversation."""

    def __init__(self, socket: ClientConnection, session: str, heard: Heard | None = None) -> None:
        self.socket = socket
        self.session = session
        self.heard = heard or Heard()
        self.sent_samples = 0

    async def send(self, event: Json | str | bytes) -> None:
        """Raises Gone."""
        try:
            await self.socket.send(json.dumps(event) if isinstance(event, dict) else event)
        except ConnectionClosed as closed:
            raise Gone(*close_of(closed), "room to send") from closed

    async def format(self, kind: str = "audio/pcm", rate: int | None = UNIT_SAMPLES) -> Json:
        """Declare the input format and wait for the answer."""
        await self.send(session_update(kind, rate))
        return await self.until("session.updated")

    async def append(self, pcm: bytes, **more: Any) -> None:
        await self.send(append_event(pcm, **more))

    async def speak(self, pcm_s16le: bytes) -> None:
        """16 kHz speech with its sample positions, in pieces that a message can hold."""
        for start in range(0, len(pcm_s16le), 2 * MAX_APPEND_SAMPLES):
            piece = pcm_s16le[start : start + 2 * MAX_APPEND_SAMPLES]
            await self.append(piece, from_sample=self.sent_samples)
            self.sent_samples += len(piece) // 2

    async def next(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> Json:
        """The next event. Raises ConnectionClosed, TimeoutError."""
        async with asyncio.timeout(timeout_s):
            message = await self.socket.recv(decode=False)
        return self.heard.take(message)

    async def until(
        self,
        name: str | tuple[str, ...],
        where: Callable[[Json], bool] = lambda event: True,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> Json:
        """The next event of that type (or of one of these) for which `where` holds. Raises Gone,
        TimeoutError."""
        names = (name,) if isinstance(name, str) else name
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    event = await self.next(timeout_s)
                    if event["type"] in names and where(event):
                        return event
        except ConnectionClosed as closed:
            code, reason = close_of(closed)
            raise Gone(code, reason, " or ".join(names)) from closed

    async def until_unit(self, number: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> Json:
        """The facts of that unit, now or when it is done."""
        for unit in self.heard.units:
            if unit["unit"] >= number:
                return unit
        return await self.until("duplex.unit", lambda unit: unit["unit"] >= number, timeout_s)

    async def refused(
        self, event: Json | str | bytes, timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> Json:
        """Send an event and return the error that answers it."""
        await self.send(event)
        return (await self.until("error", timeout_s=timeout_s))["error"]

    async def until_closed(self, timeout_s: float = DEFAULT_TIMEOUT_S) -> tuple[int, str]:
        """Read to the end of the connection. Close code and reason."""
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    await self.next(timeout_s)
        except ConnectionClosed as closed:
            return close_of(closed)

    async def cut_off_by_many(self, event: Json | str | bytes, times: int) -> int:
        """Send what the server closes the connection for when it comes again and again; it may do
        so before it has all of them. Its close code."""
        with suppress(Gone):
            for _ in range(times):
                await self.send(event)
        return (await self.until_closed())[0]

    async def cut_off_by(self, event: Json | str | bytes) -> int:
        """Send what the server closes the connection for. Its close code."""
        try:
            await self.send(event)
        except Gone as gone:
            return gone.code
        return (await self.until_closed())[0]

    async def close_session(self) -> Json:
        """End the conversation for good."""
        await self.send({"type": "session.close"})
        return await self.until("session.closed")


def close_of(closed: ConnectionClosed) -> tuple[int, str]:
    return (1006, "") if closed.rcvd is None else (closed.rcvd.code, closed.rcvd.reason)


def append_event(pcm: bytes, **more: Any) -> Json:
    audio = base64.b64encode(pcm).decode("ascii")
    return {"type": "input_audio_buffer.append", "audio": audio} | more


def session_update(kind: str = "audio/pcm", rate: int | None = UNIT_SAMPLES) -> Json:
    wanted = {"type": kind} | ({} if rate is None else {"rate": rate})
    return {
        "type": "session.update",
        "session": {"type": "realtime", "audio": {"input": {"format": wanted}}},
    }


def realtime_url(sidecar: LocalSidecar, session: str, *, resume: bool = False) -> str:
    port = sidecar.settings.port
    query = f"model=duplex&session={session}" + ("&resume=1" if resume else "")
    return f"ws://127.0.0.1:{port}/v1/realtime?{query}"


@asynccontextmanager
async def dialled(
    sidecar: LocalSidecar,
    session: str,
    token: str,
    *,
    heard: Heard | None = None,
    resume: bool = False,
    **options: Any,
) -> AsyncGenerator[RealtimeClient]:
    """A connection that has neither said nor read anything."""
    connection = connect(
        realtime_url(sidecar, session, resume=resume),
        additional_headers={"authorization": f"Bearer {token}"},
        compression=None,
        max_size=None,
        **options,
    )
    async with connection as socket:
        yield RealtimeClient(socket, session, heard)


@asynccontextmanager
async def joined(
    sidecar: LocalSidecar,
    session: str,
    token: str,
    *,
    heard: Heard | None = None,
    resume: bool = False,
    **options: Any,
) -> AsyncGenerator[RealtimeClient]:
    """A connection behind its first event, with 16 kHz input declared. With `resume` it first says
    which event it has heard last."""
    async with dialled(sidecar, session, token, heard=heard, resume=resume, **options) as client:
        if resume:
            last = client.heard.last_sequence
            await client.send({"type": "session.resume", "last_received_server_event_seq": last})
        opened = await client.until("session.resumed" if resume else "session.created")
        client.sent_samples = opened["duplex"]["acknowledged_sample"]
        await client.format()
        yield client


def new_session(sidecar: LocalSidecar, manifest: str, prefix: str = "t") -> tuple[str, str]:
    """A session of that manifest on that sidecar: its name and its token."""
    session, token = f"{prefix}-{secrets.token_hex(4)}", secrets.token_urlsafe(16)
    sidecar.open_session(session, manifest, token)
    return session, token


@asynccontextmanager
async def conversing(
    sidecar: LocalSidecar, manifest: str, prefix: str = "t"
) -> AsyncGenerator[RealtimeClient]:
    """A new session with one client; ended for good afterwards, so that its slot is free."""
    session, token = await asyncio.to_thread(new_session, sidecar, manifest, prefix)
    try:
        async with joined(sidecar, session, token) as client:
            yield client
    finally:
        await asyncio.to_thread(sidecar.admin, "DELETE", f"/sessions/{session}")
