"""Random conversations against a model: whatever turns, barge-ins, faults in transit, restarts and
re-admissions happen, a stream's sound is made from exactly the chunks 0, 1, 2, ... of one epoch.

The public regression (a first chunk lost on re-admission, a phantom state built from default
header fields, then an error for the healthy second chunk) would show as a refusal of a healthy
chunk, or as a sound of chunk 1 without chunk 0.
"""

import asyncio
from dataclasses import dataclass, field
from typing import cast

import hypothesis.strategies as st
import msgspec
import pytest
from hypothesis import given, settings

from duplex_sidecar.stages.code2wav.config import Code2WavSettings
from duplex_sidecar.stages.code2wav.service import Code2WavService
from duplex_sidecar.stages.code2wav.stream import Chunk
from duplex_sidecar.stages.code2wav.worker import Dropped, Sound, Stream, Worker
from duplex_sidecar.stages.engine.settings import Device
from duplex_sidecar.stages.envelope import WaveClose, WaveFeed, WaveOpen, WaveSamples
from duplex_sidecar.stages.errors import StageError, StageFault

pytestmark = pytest.mark.unit


class RecordingWorker:
    """Keeps, per stream, the names of the chunks that it sounded (a chunk's seed is its name)."""

    def __init__(self) -> None:
        self.heard: dict[int, list[str]] = {}
        self.streams: list[Stream] = []

    def prepare(self, stream: Stream) -> asyncio.Future[Sound]:
        self.streams.append(stream)
        return self._done(b"")

    def feed(self, stream: Stream, chunk: Chunk) -> asyncio.Future[Sound]:
        if stream.dropped is not None:
            future = asyncio.get_running_loop().create_future()
            future.set_exception(Dropped(stream.dropped))
            return future
        heard = self.heard.setdefault(id(stream), [])
        heard.append(chunk.seed)
        return self._done(",".join(heard).encode())

    @staticmethod
    def _done(pcm: bytes) -> asyncio.Future[Sound]:
        future = asyncio.get_running_loop().create_future()
        future.set_result(Sound(pcm, 0.0))
        return future


@dataclass
class Producer:
    """One session's sending side: it numbers chunks rightly and opens what it has to."""

    session: str
    epoch: int = -1
    sequence: int = 0
    taken: int = 0
    open: bool = False
    broken: bool = False
    sent: list[str] = field(default_factory=list)


Step = tuple[int, str]
STEPS = st.lists(
    st.tuples(
        st.integers(0, 2),
        st.sampled_from(
            (
                "chunk",
                "chunk",
                "chunk",
                "silent",
                "turn_end",
                "barge_in",
                "lost",
                "doubled",
                "swapped_open",
                "close",
                "restart",
            )
        ),
    ),
    max_size=60,
)


def new_service() -> tuple[Code2WavService, RecordingWorker]:
    worker = RecordingWorker()
    settings_ = Code2WavSettings(checkpoint="/c", device=Device.CPU, max_sessions=3)
    return Code2WavService(cast(Worker, worker), settings_, 64), worker


class Conversation:
    def __init__(self) -> None:
        self.service, self.worker = new_service()
        self.producers = [Producer(f"s{i}") for i in range(3)]

    async def send(self, producer: Producer, *, last: bool, silent: bool = False) -> None:
        """A well-formed next chunk. It sounds, unless something before it was lost or doubled."""
        if not producer.open:
            await self.open_next(producer)
        name = f"{producer.session}.{producer.epoch}.{producer.sequence}"
        feed = WaveFeed(
            session=producer.session,
            epoch=producer.epoch,
            sequence=producer.sequence,
            turn=producer.epoch,
            unit=0,
            codes=(1,) * 28,
            code_count=0 if silent else 28,
            last_chunk=last,
            seed=name,
        )
        producer.sequence += 1
        if not silent:
            producer.sent.append(name)
        answer = await self.call(feed)
        if isinstance(answer, StageError):
            assert producer.broken, f"a healthy chunk was refused: {answer}"
            assert answer.fault in (StageFault.OUT_OF_ORDER, StageFault.UNKNOWN_STREAM)
            # Chunks that were already on their way: even the one that would fit is refused now.
            fitting = msgspec.structs.replace(feed, sequence=producer.taken)
            assert isinstance(await self.call(fitting), StageError)
            await self.open_next(producer)
            return
        producer.taken = feed.sequence + 1
        assert not producer.broken, "a chunk sounded although one before it was lost"
        assert isinstance(answer, WaveSamples)
        assert answer.pcm_s16le.decode() == ("" if silent else ",".join(producer.sent))
        if last:
            producer.open = False

    async def call(self, request: WaveFeed | WaveOpen) -> msgspec.Struct | StageError:
        try:
            return await self.service.handle(request)
        except StageError as error:
            return error

    async def open_next(self, producer: Producer) -> None:
        """What the session does at a turn's start and after every violation."""
        producer.epoch += 1
        await self.service.handle(WaveOpen(producer.session, producer.epoch, "v"))
        producer.sequence, producer.taken, producer.sent = 0, 0, []
        producer.open, producer.broken = True, False

    async def step(self, producer: Producer, action: str) -> None:
        match action:
            case "chunk":
                await self.send(producer, last=False)
            case "silent":
                await self.send(producer, last=False, silent=True)
            case "turn_end":
                await self.send(producer, last=True)
            case "barge_in":
                await self.open_next(producer)
            case "lost" if producer.open:
                producer.sequence += 1
                producer.broken = True
            case "doubled" if producer.open and producer.sequence and not producer.broken:
                producer.sequence -= 1
                producer.broken = True
                await self.send(producer, last=False)
            case "swapped_open" if producer.open:
                # A late copy of an old open: refused or, before the first chunk, without effect.
                copy = WaveOpen(producer.session, producer.epoch, "v")
                answer = await self.call(copy)
                if isinstance(answer, StageError):
                    assert answer.fault is StageFault.OUT_OF_ORDER
                else:
                    assert producer.sequence == 0 or producer.broken
                    producer.sent = []
                    producer.broken = producer.sequence != 0
            case "close":
                await self.service.handle(WaveClose(producer.session))
                producer.open = False
            case "restart":
                self.service, self.worker = new_service()
                for each in self.producers:
                    each.broken = each.broken or each.open
            case _:
                pass


@settings(max_examples=60, deadline=None)
@given(steps=STEPS)
def test_every_sound_is_made_of_all_chunks_of_its_epoch(steps: list[Step]) -> None:
    async def run() -> None:
        conversation = Conversation()
        for index, action in steps:
            await conversation.step(conversation.producers[index], action)

    asyncio.run(run())


async def test_the_public_regression_by_name() -> None:
    """Turn 1 ends, the stage idles through a slow rebuild and is re-admitted, then (1,0) and (1,1)
    arrive: both sound. If (1,0) is lost, (1,1) is refused by name, and nobody else notices."""
    conversation = Conversation()
    speaker, other = conversation.producers[:2]
    await conversation.send(other, last=False)
    await conversation.send(speaker, last=False)
    await conversation.send(speaker, last=True)
    await conversation.send(speaker, last=False)
    await conversation.send(speaker, last=False)
    assert speaker.sent == ["s0.1.0", "s0.1.1"]
    await conversation.send(speaker, last=True)

    await conversation.open_next(speaker)
    speaker.sequence = 1
    late = WaveFeed(
        session="s0",
        epoch=speaker.epoch,
        sequence=1,
        turn=2,
        unit=9,
        codes=(1,) * 28,
        code_count=28,
        last_chunk=False,
        seed="x",
    )
    with pytest.raises(StageError, match="missing_state_for_chunk") as caught:
        await conversation.service.handle(late)
    assert caught.value.fault is StageFault.OUT_OF_ORDER
    await conversation.send(other, last=False)
    assert other.sent == ["s1.0.0", "s1.0.1"]
