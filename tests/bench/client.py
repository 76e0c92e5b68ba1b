"""A client that sends one unit, waits for its answer, and notes when what came.

Blocking and small, so that what is timed is the server's: plain JSON events over one WebSocket, as
the published SDK sends them. Slices of 100 ms go out faster than real time, but a unit's last slice
is sent only when the one before has been answered, so nothing ever queues.
"""

import base64
import json
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from websockets.exceptions import ConnectionClosed, InvalidHandshake
from websockets.sync.client import ClientConnection, connect

from duplex_sidecar.client.local_sidecar import LocalSidecar
from duplex_sidecar.client.media import SAMPLE_RATE_HZ
from tests.bench.figures import Broken

UNIT_SAMPLES = 16_000
UNIT_BYTES = 2 * UNIT_SAMPLES
SLICES = 10
SLICE_GAP_S = 0.004
"""Between two slices: room for the server to take one, as a microphone's pace leaves it."""
ANSWER_TIMEOUT_S = 60.0
REDIAL_PAUSE_S = 0.02


@dataclass(frozen=True)
class Unit:
    """One second to send. force_listen: the model may only listen to it."""

    pcm_s16le: bytes
    frames: tuple[bytes, ...] = ()
    force_listen: bool = False


@dataclass(frozen=True)
class Seen:
    """What came back for a unit. Times in ms; client_ms and first_audio_ms from the sending of the
    unit's last slice to the arrival of its `duplex.unit` and of its first audio. rebuild_ms: of the
    Thinker's rebuild in it, None when its stream was extended. tokens: of the answer."""

    unit: int
    decision: str
    client_ms: float
    first_audio_ms: float | None
    server_ms: float
    stage_ms: dict[str, float]
    rebuild_cause: str | None
    rebuild_ms: float | None
    window_tokens: int
    tokens: int
    audio_samples: int
    turn: int
    replica: str

    @property
    def stages_ms(self) -> float:
        """In the four stages."""
        return sum(self.stage_ms.get(name, 0.0) for name in STAGES)


STAGES = ("encoder", "thinker", "talker", "code2wav")


@dataclass
class UnitClient:
    """One connection to one session."""

    sidecar: LocalSidecar
    session: str
    token: str
    last_sequence: int = 0
    _socket: ClientConnection | None = field(default=None, repr=False)
    _replayed: deque[dict[str, Any]] = field(default_factory=deque[dict[str, Any]], repr=False)
    """What came before the server had answered the greeting."""

    def __enter__(self) -> Self:
        self.dial()
        return self

    def __exit__(self, *_: object) -> None:
        self.hang_up()

    def dial(self, *, resume: bool = False, for_s: float = 0.0) -> dict[str, Any]:
        """Connect, again for `for_s` seconds while the server is not ready. Returns the facts of
        the opening event. Raises Broken."""
        deadline = time.monotonic() + for_s
        while True:
            try:
                return self._dial(resume)
            except (OSError, ConnectionClosed, InvalidHandshake, _NotYet) as error:
                self.hang_up()
                if time.monotonic() > deadline:
                    raise Broken(f"no connection: {error}") from error
            time.sleep(REDIAL_PAUSE_S)

    def _dial(self, resume: bool) -> dict[str, Any]:
        url = self.sidecar.base_url.replace("http://", "ws://")
        query = f"model=duplex&session={self.session}{'&resume=1' if resume else ''}"
        self._socket = connect(
            f"{url}/v1/realtime?{query}",
            additional_headers={"Authorization": f"Bearer {self.token}"},
            compression=None,
            max_size=None,
            open_timeout=ANSWER_TIMEOUT_S,
            close_timeout=2,
        )
        if resume:
            self._send(
                {
                    "type": "session.resume",
                    "last_received_server_event_seq": self.last_sequence,
                }
            )
        opening = self._receive()
        if opening["type"] not in ("session.created", "session.resumed"):
            error = opening.get("error", opening)
            if error.get("retryable"):
                raise _NotYet(str(error.get("code")))
            raise Broken(f"{error.get('code')}: {error.get('message')}")
        pcm = {"type": "audio/pcm", "rate": SAMPLE_RATE_HZ}
        self._send(
            {
                "type": "session.update",
                "session": {"type": "realtime", "audio": {"input": {"format": pcm}}},
            }
        )
        self._replayed = self._until("session.updated")
        return opening["duplex"]

    def say(self, unit: Unit, seq: int) -> Seen:
        """Send unit number `seq` and wait for its answer. Raises Broken."""
        sent_s = self.send(unit, seq)
        return self.wait(seq, sent_s)

    def send(self, unit: Unit, seq: int, gap_s: float = SLICE_GAP_S) -> float:
        """Send the unit's slices. Returns the monotonic time at which the last one was handed
        over."""
        step = UNIT_BYTES // SLICES
        first_sample = (seq - 1) * UNIT_SAMPLES
        sent_s = time.perf_counter()
        for number in range(SLICES):
            if number:
                time.sleep(gap_s)
            event: dict[str, Any] = {
                "type": "input_audio_buffer.append",
                "audio": base64.b64encode(
                    unit.pcm_s16le[number * step : (number + 1) * step]
                ).decode("ascii"),
                "from_sample": first_sample + number * step // 2,
            }
            if unit.force_listen:
                event["force_listen"] = True
            if number == 0 and unit.frames:
                event["video_frames"] = [
                    base64.b64encode(frame).decode("ascii") for frame in unit.frames
                ]
            text = json.dumps(event)
            sent_s = time.perf_counter()
            self._connection.send(text)
        return sent_s

    def wait(self, seq: int, sent_s: float) -> Seen:
        """Until the `duplex.unit` of unit `seq`; older ones are passed over. Raises Broken."""
        first_audio_ms: float | None = None
        while True:
            event = self._replayed.popleft() if self._replayed else self._receive()
            now_ms = (time.perf_counter() - sent_s) * 1000
            kind = event["type"]
            if kind == "response.output_audio.delta":
                if first_audio_ms is None and event["duplex"]["unit"] == seq:
                    first_audio_ms = now_ms
            elif kind == "error":
                raise Broken(f"{event['error']['code']}: {event['error']['message']}")
            elif kind == "session.closed":
                raise Broken(f"the session ended: {event['reason']}")
            elif kind == "duplex.unit" and event["unit"] == seq:
                return _seen(event, now_ms, first_audio_ms)

    def close_session(self) -> None:
        """End the session for good."""
        self._send({"type": "session.close"})
        self._until("session.closed")
        self.hang_up()

    def hang_up(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            socket.close()

    @property
    def _connection(self) -> ClientConnection:
        if self._socket is None:
            raise Broken("not connected")
        return self._socket

    def _send(self, event: dict[str, Any]) -> None:
        self._connection.send(json.dumps(event))

    def _receive(self) -> dict[str, Any]:
        try:
            event: dict[str, Any] = json.loads(self._connection.recv(timeout=ANSWER_TIMEOUT_S))
        except TimeoutError as error:
            raise Broken(f"no event in {ANSWER_TIMEOUT_S:.0f} s") from error
        self.last_sequence = event.get("server_event_seq", self.last_sequence)
        return event

    def _until(self, kind: str) -> deque[dict[str, Any]]:
        """Wait for an event of that type. Returns those before it."""
        before: deque[dict[str, Any]] = deque()
        while (event := self._receive())["type"] != kind:
            before.append(event)
        return before


class _NotYet(Exception):
    """The server said that trying again may help."""


def _seen(event: dict[str, Any], client_ms: float, first_audio_ms: float | None) -> Seen:
    return Seen(
        unit=event["unit"],
        decision=event["decision"],
        client_ms=client_ms,
        first_audio_ms=first_audio_ms,
        server_ms=event["wall_ms"],
        stage_ms=event["stage_ms"],
        rebuild_cause=event["rebuild_cause"],
        rebuild_ms=event["rebuild_ms"],
        window_tokens=event["window_tokens"],
        tokens=event["tokens"],
        audio_samples=event["audio_samples"],
        turn=event["turn"],
        replica=event["replica"],
    )


def quiet_at_end(pcm_s16le: bytes, threshold: float = 0.01) -> bool:
    """Whether the last 200 ms of a unit are quiet: that is when a fitted checkpoint speaks.
    threshold: root mean square, full scale 1."""
    import numpy as np

    tail = np.frombuffer(pcm_s16le[-2 * SAMPLE_RATE_HZ // 5 :], dtype="<i2").astype(np.float64)
    return bool(np.sqrt(np.mean((tail / 32768.0) ** 2)) < threshold)


def script(
    speech: bytes, count: int, *, frames: Sequence[bytes] = (), forced: bool = False
) -> list[Unit]:
    """`count` units of the recording, over and over. forced: every other unit may only be listened
    to, for a checkpoint that would not listen by itself."""
    seconds = len(speech) // UNIT_BYTES
    if not seconds:
        raise Broken("the recording is shorter than one unit")
    return [
        Unit(
            pcm_s16le=speech[(at := number % seconds * UNIT_BYTES) : at + UNIT_BYTES],
            frames=(frames[number % len(frames)],) if frames else (),
            force_listen=forced and number % 2 == 0,
        )
        for number in range(count)
    ]
