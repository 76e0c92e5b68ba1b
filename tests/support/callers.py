"""Clients of a session on a cluster: the demo's own, talking through the gateway at real time."""

import asyncio
import base64
import json
import ssl
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import pytest
from support.kube import Json, Kube, KubeError
from support.material import speech
from support.releases import RELEASE, Voice
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from duplex_sidecar.client.conversation import Conversation, ConversationFailed, Talk

UNIT_TIMEOUT_S = 120.0
LONGEST_TALK_S = 600.0
"""Longer than a test: a client that has said all closes its session."""
OPEN_TIMEOUT_S = 60.0
REFUSED = ("session_not_found", 1008)
"""Of whoever has not the token, whether there is such a session or not."""


@dataclass(frozen=True, slots=True)
class Ticket:
    """What a client dials with. uid: the session's id at the gateway and in the ledger."""

    uid: str
    token: str


def ticket(kube: Kube, session: str, namespace: str) -> Ticket:
    """Of a session that was accepted: its token is in the Secret that its status names."""
    status: Json = kube.get("dxs", session, namespace)["status"]
    named: Json = status["tokenSecret"]
    token = kube.secret(named["name"], namespace)[named["key"]]
    return Ticket(status["ledgerId"], token.decode())


def tickets(kube: Kube, sessions: Sequence[str], namespace: str) -> list[Ticket]:
    """The same of many, in two requests."""
    found = {each["metadata"]["name"]: each for each in kube.items("dxs", namespace)}
    secrets = {each["metadata"]["name"]: each for each in kube.items("secrets", namespace)}

    def read(session: str) -> Ticket:
        status: Json = found[session]["status"]
        named: Json = status["tokenSecret"]
        token = base64.b64decode(secrets[named["name"]]["data"][named["key"]])
        return Ticket(status["ledgerId"], token.decode())

    return [read(session) for session in sessions]


@dataclass
class Caller:
    """A conversation that goes on beside the test."""

    conversation: Conversation
    task: asyncio.Task[Talk]
    events: list[Json]
    came: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def talk(self) -> Talk:
        return self.conversation.talk

    @property
    def last_unit(self) -> int:
        return max((unit["unit"] for unit in self.talk.units), default=0)

    async def until(
        self, where: Callable[[Json], bool], what: str, timeout_s: float = UNIT_TIMEOUT_S
    ) -> Json:
        """The first event for which it holds, now or when it comes. Raises TimeoutError, and what
        ended the conversation before."""
        seen = 0
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    for event in self.events[seen:]:
                        if where(event):
                            return event
                    seen = len(self.events)
                    if self.task.done():
                        raise AssertionError(f"over before {what}") from self.task.exception()
                    self.came.clear()
                    await self.came.wait()
        except TimeoutError:
            said = [event["type"] for event in self.events[-5:]]
            raise TimeoutError(f"{what}: not within {timeout_s} s; last came {said}") from None

    async def until_unit(self, number: int, timeout_s: float = UNIT_TIMEOUT_S) -> Json:
        return await self.until(
            lambda event: event["type"] == "duplex.unit" and event["unit"] >= number,
            f"unit {number}",
            timeout_s,
        )

    async def until_mid_sentence(self, after_unit: int) -> Json:
        """The facts of a unit behind that one which speaks, in a turn that is not over with it."""

        def speaking(event: Json) -> bool:
            if event["type"] != "duplex.unit" or event["unit"] <= after_unit:
                return False
            over = any(
                each["type"] == "response.done" and each["duplex"]["unit"] == event["unit"]
                for each in self.events
            )
            return event["decision"] == "speak" and not over

        return await self.until(speaking, f"a sentence after unit {after_unit}")

    async def hang_up(self) -> None:
        """Without a word, as a client whose network is gone."""
        self.task.cancel()
        with suppress(asyncio.CancelledError, ConversationFailed):
            await self.task

    def dial_again(self) -> None:
        """After `hang_up`: goes on behind what it has had."""
        self.task = asyncio.create_task(self.conversation.run())
        self.task.add_done_callback(lambda _: self.came.set())

    def assert_whole(self, connections: int = 1) -> None:
        """Every unit and every numbered event once and in order, over that many connections."""
        numbers = [unit["unit"] for unit in self.talk.units]
        assert numbers == list(range(1, len(numbers) + 1))
        sequences = [
            event["server_event_seq"] for event in self.events if "server_event_seq" in event
        ]
        assert sequences == list(range(1, len(sequences) + 1))
        assert self.talk.repeated == 0
        assert len(self.talk.resumes) == connections - 1
        codes = Counter(str(error["code"]) for error in self.talk.errors)
        assert not codes, codes


@asynccontextmanager
async def calling(
    voice: Voice, session: str, *, namespace: str = "", seconds: float = LONGEST_TALK_S
) -> AsyncGenerator[Caller]:
    """A client that speaks until this context ends, or until it has said that many seconds and
    closed the session."""
    named = ticket(voice.cluster, session, namespace or voice.namespace)
    with gateway_port(voice) as port:
        tls = trusting(voice)
        url = f"http{'s' if tls else ''}://127.0.0.1:{port}/v1"
        async with speaking(url, named, seconds, tls) as caller:
            yield caller


@asynccontextmanager
async def all_calling(
    voice: Voice, sessions: Sequence[str], *, seconds: float, speed: float
) -> AsyncGenerator[list[Caller]]:
    """A client for each, all over one port of one gateway. speed: of their speech, in real time's:
    many clients at full speed would want more than a small machine has."""
    named = await asyncio.to_thread(tickets, voice.cluster, sessions, voice.namespace)
    tls = trusting(voice)
    async with AsyncExitStack() as stack:
        port = stack.enter_context(gateway_port(voice))
        url = f"http{'s' if tls else ''}://127.0.0.1:{port}/v1"
        yield [
            await stack.enter_async_context(speaking(url, each, seconds, tls, speed))
            for each in named
        ]


@contextmanager
def gateway_port(voice: Voice) -> Generator[int]:
    """A loopback port that leads to the gateway's Service."""
    service, port = f"service/{RELEASE}-gateway", 443 if voice.authority else 80
    with voice.cluster.port_forward(service, port, voice.namespace) as local:
        yield local


@asynccontextmanager
async def lasting_gateway_port(voice: Voice) -> AsyncGenerator[int]:
    """A loopback port that leads to whichever gateway there is when somebody connects: a forward of
    its own for each connection, as `kubectl port-forward` of a Service ends with its first pod."""
    forwards = ThreadPoolExecutor(4)

    async def carry(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while data := await source.read(2**16):
                target.write(data)
                await target.drain()
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with ExitStack() as stack, suppress(KubeError, OSError):
            stack.callback(writer.close)
            forward = gateway_port(voice)
            port = await loop.run_in_executor(forwards, stack.enter_context, forward)
            onward_reader, onward_writer = await asyncio.open_connection("127.0.0.1", port)
            await asyncio.gather(carry(reader, onward_writer), carry(onward_reader, writer))

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        forwards.shutdown(wait=False, cancel_futures=True)


def trusting(voice: Voice) -> ssl.SSLContext | None:
    """What a client needs to believe the gateway; None: that speaks no TLS."""
    return ssl.create_default_context(cadata=voice.authority) if voice.authority else None


def realtime_url(voice: Voice, port: int, session: str) -> str:
    """port: of `gateway_port`. session: its uid."""
    scheme = "wss" if voice.authority else "ws"
    return f"{scheme}://127.0.0.1:{port}/v1/realtime?model=duplex&session={session}"


@asynccontextmanager
async def speaking(
    url: str,
    named: Ticket,
    seconds: float = LONGEST_TALK_S,
    tls: ssl.SSLContext | None = None,
    speed: float = 1.0,
) -> AsyncGenerator[Caller]:
    """url: of a gateway, up to /v1."""
    events: list[Json] = []
    came = asyncio.Event()

    def take(event: Json) -> None:
        events.append(event)
        came.set()

    conversation = Conversation(
        url,
        named.uid,
        named.token,
        speech(seconds),
        speed=speed,
        redial_for_s=UNIT_TIMEOUT_S,
        tls=tls,
        on_event=take,
    )
    task = asyncio.create_task(conversation.run())
    task.add_done_callback(lambda _: came.set())
    caller = Caller(conversation, task, events, came)
    try:
        yield caller
    finally:
        await caller.hang_up()


async def turned_away(url: str, token: str, tls: ssl.SSLContext | None = None) -> tuple[str, int]:
    """The one error that such a client gets, and the close code behind it."""
    headers = {"authorization": f"Bearer {token}"} if token else {}
    opening = connect(url, additional_headers=headers, ssl=tls, open_timeout=OPEN_TIMEOUT_S)
    async with opening as socket:
        error: Json = json.loads(await socket.recv())["error"]
        with pytest.raises(ConnectionClosed) as closed:
            await socket.recv()
        return error["code"], closed.value.rcvd.code if closed.value.rcvd else 0
