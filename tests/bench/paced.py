"""A client that speaks in real time, as a microphone does, also while its connection is away.

Where `client.UnitClient` waits for each answer, this one never does: what is late for it is late
for a listener. It follows its session to another sidecar, resumes behind the last event that it has
seen and goes on from the acknowledged sample.
"""

import asyncio
import base64
import contextlib
import json
import time
from dataclasses import dataclass, field
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import SAMPLE_RATE_HZ
from tests.bench.client import UNIT_SAMPLES
from tests.bench.figures import Broken

SLICE_SAMPLES = UNIT_SAMPLES // 10
REDIAL_PAUSE_S = 0.02
REDIAL_FOR_S = 30.0
MOVES_ELSEWHERE = 1012


@dataclass(frozen=True)
class Answer:
    """What came for a unit. late_s: from the moment at which its last sample was spoken to its
    `duplex.unit`, whenever that was heard; sound_late_s: to its first sound, None without."""

    unit: int
    turn: int
    replica: str
    late_s: float
    sound_late_s: float | None


@dataclass
class PacedTalk:
    """speech: s16le of the whole talk. Answers by unit, as they come."""

    session: str
    token: str
    speech: bytes
    answers: dict[int, Answer] = field(default_factory=dict[int, Answer])
    _began_s: float = 0.0
    _last_sequence: int = 0
    _sounds_s: dict[int, float] = field(default_factory=dict[int, float])
    _heard: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def units(self) -> int:
        return len(self.speech) // (2 * UNIT_SAMPLES)

    async def talk(self, places: "asyncio.Queue[LocalSidecar]") -> None:
        """Until all units are answered. places: where the session runs, one after another. Raises
        Broken."""
        resume = False
        while len(self.answers) < self.units:
            place = await places.get()
            async with contextlib.AsyncExitStack() as stack:
                socket, acknowledged = await self._dial(stack, place, resume)
                resume, self._began_s = True, self._began_s or time.monotonic()
                speaking = asyncio.create_task(self._speak(socket, acknowledged))
                try:
                    await self._listen(socket)
                except ConnectionClosed as closed:
                    if closed.rcvd is None or closed.rcvd.code != MOVES_ELSEWHERE:
                        raise Broken(f"the connection ended: {closed}") from closed
                finally:
                    speaking.cancel()
                    await asyncio.gather(speaking, return_exceptions=True)

    async def answered(self, unit: int) -> Answer:
        while unit not in self.answers:
            self._heard.clear()
            await self._heard.wait()
        return self.answers[unit]

    async def _dial(
        self, stack: contextlib.AsyncExitStack, place: LocalSidecar, resume: bool
    ) -> tuple[ClientConnection, int]:
        """A connection behind its opening event, and the acknowledged sample."""
        url = place.base_url.replace("http://", "ws://")
        query = f"model=duplex&session={self.session}{'&resume=1' if resume else ''}"
        deadline_s = time.monotonic() + REDIAL_FOR_S
        while True:
            try:
                socket = await stack.enter_async_context(
                    connect(
                        f"{url}/v1/realtime?{query}",
                        additional_headers={"Authorization": f"Bearer {self.token}"},
                        compression=None,
                        max_size=None,
                    )
                )
                return socket, await self._greet(socket, resume)
            except (OSError, ConnectionClosed, InvalidHandshake) as error:
                if time.monotonic() > deadline_s:
                    raise Broken(f"no connection: {error}") from error
            await asyncio.sleep(REDIAL_PAUSE_S)

    async def _greet(self, socket: ClientConnection, resume: bool) -> int:
        if resume:
            last = {"last_received_server_event_seq": self._last_sequence}
            await socket.send(json.dumps({"type": "session.resume"} | last))
        while True:
            event = json.loads(await socket.recv())
            self._take(event)
            if event["type"] in ("session.created", "session.resumed"):
                break
            if event["type"] == "error" and not event["error"].get("retryable"):
                raise Broken(f"{event['error']['code']}: {event['error']['message']}")
        pcm = {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}
        session = {"type": "realtime", "audio": {"input": {"format": pcm}}}
        await socket.send(json.dumps({"type": "session.update", "session": session}))
        return int(event["duplex"]["acknowledged_sample"])

    async def _speak(self, socket: ClientConnection, sent: int) -> None:
        whole = self.units * UNIT_SAMPLES
        with contextlib.suppress(ConnectionClosed):
            while sent < whole:
                spoken = int((time.monotonic() - self._began_s) * SAMPLE_RATE_HZ)
                if sent + SLICE_SAMPLES > spoken:
                    await asyncio.sleep((sent + SLICE_SAMPLES - spoken) / SAMPLE_RATE_HZ)
                    continue
                pcm = self.speech[2 * sent : 2 * (sent + SLICE_SAMPLES)]
                event = {
                    "type": "input_audio_buffer.append",
                    "audio": base64.b64encode(pcm).decode("ascii"),
                    "from_sample": sent,
                }
                await socket.send(json.dumps(event))
                sent += SLICE_SAMPLES

    async def _listen(self, socket: ClientConnection) -> None:
        while len(self.answers) < self.units:
            self._take(json.loads(await socket.recv()))

    def _take(self, event: dict[str, Any]) -> None:
        now_s, kind = time.monotonic(), event["type"]
        self._last_sequence = event.get("server_event_seq", self._last_sequence)
        if kind == "response.output_audio.delta":
            self._sounds_s.setdefault(int(event["duplex"]["unit"]), now_s)
        elif kind == "duplex.unit" and event["unit"] not in self.answers:
            unit = int(event["unit"])
            spoken_s = self._began_s + unit
            sound_s = self._sounds_s.get(unit)
            self.answers[unit] = Answer(
                unit,
                int(event["turn"]),
                str(event["replica"]),
                now_s - spoken_s,
                None if sound_s is None else sound_s - spoken_s,
            )
            self._heard.set()
