"""One live conversation over the published `openai` SDK, unmodified: speech in, speech out.

The SDK's realtime connection carries the standard events; our extensions go and come as raw events
of the same connection. A lost connection is dialled again with the same token: the server says up
to which of the client's own samples input is durable, and the client goes on from there.
"""

import asyncio
import base64
import contextlib
import json
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from openai import AsyncOpenAI
from openai.resources.realtime.realtime import AsyncRealtimeConnection
from openai.types.websocket_connection_options import WebSocketConnectionOptions
from websockets.exceptions import ConnectionClosed, InvalidHandshake

SAMPLE_RATE_HZ = 16_000
SLICE_SAMPLES = 1_600
"""Appends of 100 ms, as a microphone callback would send them."""
UNIT_SAMPLES = 16_000
OUTPUT_RATE_HZ = 24_000
REDIAL_EVERY_S = 0.5


@dataclass(frozen=True)
class Replies:
    """A stretch of reply audio: when its unit ended on the input's clock, and its samples.
    from_sample: its place in its turn. epoch, sequence: which chunk of stage 2 it is."""

    input_s: float
    turn: int
    epoch: int
    sequence: int
    from_sample: int
    pcm_s16le: bytes


@dataclass
class Talk:
    """What the conversation has brought so far."""

    units: list[dict[str, Any]] = field(default_factory=list)
    replies: list[Replies] = field(default_factory=list)
    transcript: dict[int, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    resumes: list[dict[str, Any]] = field(default_factory=list)
    repeated: int = 0
    """Numbered events that came once more, and were dropped."""
    sent_at_s: dict[int, float] = field(default_factory=dict)
    """Unit -> monotonic time at which its last sample was sent."""
    done_at_s: dict[int, float] = field(default_factory=dict)
    """Unit -> monotonic time at which its answer was there."""

    def away_s(self) -> float:
        """Seconds from the last unit of the first replica to the first of the next one; 0.0 where
        there was only one."""
        for before, unit in pairwise(self.units):
            if before["replica"] != unit["replica"]:
                return self.done_at_s[unit["unit"]] - self.done_at_s[before["unit"]]
        return 0.0


class ConversationFailed(Exception):
    """The server ended the conversation, or could not be reached again in time."""


class Conversation:
    """Streams a recording at `speed` times real time and collects what comes back.

    tls: whom an https address is believed; default: whom this machine believes.
    """

    def __init__(
        self,
        base_url: str,
        session: str,
        token: str,
        pcm_s16le: bytes,
        frames: list[bytes] | None = None,
        *,
        speed: float = 1.0,
        redial_for_s: float = 180.0,
        tls: ssl.SSLContext | None = None,
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
    ) -> None:
        self._client = AsyncOpenAI(base_url=base_url, api_key=token, max_retries=0)
        self._session = session
        self._pcm = pcm_s16le
        self._frames = frames or []
        self._speed = speed
        self._redial_for_s = redial_for_s
        # The SDK names only a part of what it passes on to the connection.
        options: Any = {} if tls is None else {"ssl": tls}
        self._options: WebSocketConnectionOptions = options
        self._on_event = on_event
        self._last_sequence = 0
        self._position = 0
        self._total_samples = len(pcm_s16le) // 2
        self._expected_units = -(-self._total_samples // UNIT_SAMPLES)
        self._finished = asyncio.Event()
        self.talk = Talk()

    async def run(self) -> Talk:
        """The whole recording, through any number of reconnects. Raises ConversationFailed.

        Run again after it was cancelled it resumes behind what it has had.
        """
        first = not self._last_sequence
        while not self._finished.is_set():
            connection = await self._dial(first)
            first = False
            sender = asyncio.create_task(self._send(connection))
            try:
                await self._receive(connection)
            except ConnectionClosed:
                pass
            finally:
                sender.cancel()
                with contextlib.suppress(asyncio.CancelledError, ConnectionClosed):
                    await sender
                with contextlib.suppress(Exception):
                    await connection.close()
        return self.talk

    async def _dial(self, first: bool) -> AsyncRealtimeConnection:
        """Connect and take the first event. After a loss: resume behind the last sequence seen."""
        deadline = time.monotonic() + self._redial_for_s
        while True:
            connection: AsyncRealtimeConnection | None = None
            try:
                query = {"session": self._session} | ({} if first else {"resume": "1"})
                connection = await self._client.realtime.connect(
                    model="duplex",
                    extra_query=query,
                    websocket_connection_options=self._options,
                ).enter()
                if not first:
                    resume = {
                        "type": "session.resume",
                        "last_received_server_event_seq": self._last_sequence,
                    }
                    await connection.send_raw(json.dumps(resume))
                opening = json.loads(await connection.recv_bytes())
                while opening["type"] == "session.queued":  # of a gateway: nobody runs it yet
                    opening = json.loads(await connection.recv_bytes())
                if opening["type"] in ("session.created", "session.resumed"):
                    await self._greet(connection, opening)
                    return connection
                error = opening.get("error", opening)
                if not error.get("retryable"):
                    raise ConversationFailed(f"{error.get('code')}: {error.get('message')}")
            except (OSError, ConnectionClosed, InvalidHandshake, TimeoutError) as error:
                if time.monotonic() > deadline:
                    raise ConversationFailed(f"no connection: {error}") from error
            if connection is not None:
                with contextlib.suppress(Exception):
                    await connection.close()
            if time.monotonic() > deadline:
                raise ConversationFailed("no replica took the session in time")
            await asyncio.sleep(REDIAL_EVERY_S)

    async def _greet(self, connection: AsyncRealtimeConnection, opening: dict[str, Any]) -> None:
        self._on_event(opening)
        facts = opening["duplex"]
        self._position = int(facts["acknowledged_sample"])
        if facts["resumed"]:
            self.talk.resumes.append(facts)
        update = {
            "type": "session.update",
            "session": {
                "type": "realtime",
                "audio": {"input": {"format": {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}}},
            },
        }
        await connection.send_raw(json.dumps(update))

    async def _send(self, connection: AsyncRealtimeConnection) -> None:
        """From the acknowledged position to the end, paced; then close the tail into a unit."""
        start, start_position = time.monotonic(), self._position
        position = start_position
        while position < self._total_samples:
            until = min(position + SLICE_SAMPLES, self._total_samples)
            due_s = (until - start_position) / SAMPLE_RATE_HZ / self._speed
            await asyncio.sleep(max(0.0, start + due_s - time.monotonic()))
            event: dict[str, Any] = {
                "type": "input_audio_buffer.append",
                "audio": base64.b64encode(self._pcm[2 * position : 2 * until]).decode("ascii"),
                "from_sample": position,
            }
            second = position // UNIT_SAMPLES
            if position % UNIT_SAMPLES == 0 and second < len(self._frames):
                event["video_frames"] = [base64.b64encode(self._frames[second]).decode("ascii")]
            await connection.send_raw(json.dumps(event))
            position = until
            if position % UNIT_SAMPLES == 0 or position == self._total_samples:
                self.talk.sent_at_s[-(-position // UNIT_SAMPLES)] = time.monotonic()
        await connection.send_raw(json.dumps({"type": "input_audio_buffer.commit"}))

    async def _receive(self, connection: AsyncRealtimeConnection) -> None:
        while True:
            event: dict[str, Any] = json.loads(await connection.recv_bytes())
            sequence = event.get("server_event_seq")
            if sequence is not None:
                if sequence <= self._last_sequence:
                    self.talk.repeated += 1
                    continue
                self._last_sequence = sequence
            self._take(event)
            self._on_event(event)
            if event["type"] == "duplex.unit" and event["unit"] >= self._expected_units:
                await connection.send_raw(json.dumps({"type": "session.close"}))
            if event["type"] == "session.closed":
                self._finished.set()
                if event["reason"] != "session_ended":
                    raise ConversationFailed(f"{event['reason']}: {event['message']}")
                return

    def _take(self, event: dict[str, Any]) -> None:
        match event["type"]:
            case "duplex.unit":
                self.talk.units.append(event)
                self.talk.done_at_s[event["unit"]] = time.monotonic()
            case "response.output_audio.delta":
                turn = int(str(event["response_id"]).rsplit("_", 1)[1])
                facts = event["duplex"]
                self.talk.replies.append(
                    Replies(
                        input_s=float(facts["unit"]),
                        turn=turn,
                        epoch=facts["epoch"],
                        sequence=facts["stage2_sequence"],
                        from_sample=facts["from_sample"],
                        pcm_s16le=base64.b64decode(event["delta"]),
                    )
                )
            case "response.output_audio_transcript.delta":
                turn = int(str(event["response_id"]).rsplit("_", 1)[1])
                self.talk.transcript[turn] = self.talk.transcript.get(turn, "") + event["delta"]
            case "error":
                self.talk.errors.append(event["error"])
            case _:
                pass


def lay_out_replies(replies: list[Replies]) -> bytes:
    """Reply audio on the input's clock, 24 kHz s16le: each stretch starts when its unit has ended,
    or when the one before it has been played, whichever is later."""
    track = bytearray()
    for stretch in replies:
        start = int(stretch.input_s * OUTPUT_RATE_HZ) * 2
        if len(track) < start:
            track.extend(bytes(start - len(track)))
        track.extend(stretch.pcm_s16le)
    return bytes(track)
