"""What the ledger's tests share: drafts with little to say, a writer that keeps its head, and a
proxy that loses replies."""

import asyncio
import hashlib
from pathlib import Path

import msgspec

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.client_calls import Cut
from duplex_sidecar.ledger.journal import JournalBatch, VoiceMark
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.media import Trim, UnitMedia
from duplex_sidecar.ledger.records import (
    AcceptDraft,
    CommitDraft,
    CutDraft,
    OpeningDraft,
    PlanAction,
    PlanFacts,
    PromptIds,
    PromptRows,
    TruncatedDraft,
    UnitInput,
)
from duplex_sidecar.ledger.store import Ledger

EMPTY = msgspec.Raw(b"{}")
CHUNK_SAMPLES = 24_000
CHUNK_CODES = 25


def noise(name: str, size: int) -> bytes:
    """Bytes that follow from a name."""
    return hashlib.shake_128(name.encode()).digest(size)


def opening_draft(session: str, *, checkpoint: str = "tiny") -> OpeningDraft:
    return OpeningDraft(
        session=session,
        checkpoint=checkpoint,
        parts=(PromptIds((1, 2, 3)), PromptRows(blob=0, rows=4), PromptIds((4,))),
        voice="default",
        window=msgspec.Raw(b'{"mode":"context"}'),
        sampling=EMPTY,
        output=EMPTY,
        limits=EMPTY,
        seed=7,
        traceparent="00-0-0-01",
    )


def plan_facts(action: PlanAction = PlanAction.EXTEND, cause: str | None = None) -> PlanFacts:
    return PlanFacts(action, "context", cause, 0, 0, 0, 100)


def accept_draft(seq: int, *, epoch: int = 0, turn: int = 1) -> AcceptDraft:
    return AcceptDraft(
        seq=seq,
        epoch=epoch,
        turn=turn,
        input=UnitInput(16_000, 1, 16_000 * (seq - 1), 16_000 * seq, None, False, False),
        plan=plan_facts(),
        directive="",
        strategy="reprefill",
        seed=seq,
        traceparent="00-0-0-01",
    )


def commit_draft(seq: int, *, epoch: int = 0, turn: int = 1, turn_end: bool = False) -> CommitDraft:
    return CommitDraft(
        seq=seq,
        epoch=epoch,
        turn=turn,
        token_ids=(10, 11, 12 + seq),
        sampled_ids=(10, 11, 12 + seq),
        terminator="turn_eos" if turn_end else "chunk_eos",
        decision="speak",
        turn_end=turn_end,
        plan=plan_facts(),
    )


def truncated_draft(seq: int, unit: int, token_index: int = 1) -> TruncatedDraft:
    return TruncatedDraft(
        seq=seq,
        turn=1,
        unit=unit,
        token_index=token_index,
        through=seq,
        played_ms=100,
        ends_turn=False,
    )


def cut_of(draft: CutDraft, first_seq: int, *, events: int = 1, client_applied: str = "") -> Cut:
    """A cut with that entry, whose events begin at `first_seq`."""
    return Cut(
        draft=draft,
        state=noise(f"cut {draft.seq}", 500),
        voice_state=noise(f"cut voice {draft.seq}", 100),
        events=JournalBatch(
            unit=draft.seq,
            first_seq=first_seq,
            events=tuple(noise(f"cut event {first_seq + n}", 200) for n in range(events)),
        ),
        client_applied=client_applied,
    )


def unit_media(seq: int) -> UnitMedia:
    frames = (noise(f"frame {seq}", 300), noise(f"frame' {seq}", 200)) if seq % 2 else ()
    return UnitMedia(pcm=noise(f"pcm {seq}", 32_000), rows=noise(f"rows {seq}", 640), frames=frames)


def state_after(seq: int) -> bytes:
    return noise(f"state {seq}", 500)


def spoken_batch(
    seq: int,
    first_seq: int,
    *,
    chunk: int,
    turn: int = 1,
    epoch: int = 0,
    done: bool = True,
    event: bytes | None = None,
) -> JournalBatch:
    """One chunk of the turn as one event."""
    mark = VoiceMark(
        epoch=epoch,
        sequence=chunk,
        turn=turn,
        unit=seq,
        code_offset=CHUNK_CODES * chunk,
        codes=tuple(range(CHUNK_CODES)),
        from_samples=CHUNK_SAMPLES * chunk,
        to_samples=CHUNK_SAMPLES * (chunk + 1),
    )
    return JournalBatch(
        unit=seq,
        first_seq=first_seq,
        events=(event or noise(f"event {first_seq}", 4_000),),
        mark=mark,
        voiced_through=seq if done else None,
        voice_state=noise(f"voice {seq}", 100) if done else None,
    )


class Writer:
    """An owner of one session that keeps its lease and head."""

    def __init__(self, ledger: Ledger, lease: Lease, head: Head) -> None:
        self.ledger = ledger
        self.lease = lease
        self.head = head

    @classmethod
    async def create(
        cls,
        ledger: Ledger,
        session: str,
        replica: str = "replica-a",
        *,
        retention_ms: int | None = None,
    ) -> "Writer":
        head = await ledger.create(
            opening_draft(session),
            replica=replica,
            token_sha256="0" * 64,
            state=state_after(0),
            reference_rows=(noise("reference", 160),),
            retention_ms=retention_ms,
        )
        return cls(ledger, await ledger.acquire(session, replica), head)

    @classmethod
    async def take_over(cls, ledger: Ledger, session: str, replica: str) -> "Writer":
        lease = await ledger.acquire(session, replica)
        return cls(ledger, lease, (await ledger.load(session)).head)

    async def accept(self, seq: int, *, state: bytes | None = None, epoch: int = 0) -> None:
        draft = accept_draft(seq, epoch=epoch)
        self.head = await self.ledger.accept(
            self.lease, self.head, draft, unit_media(seq), state=state
        )

    async def commit(self, seq: int, *, trim: Trim | None = None, turn_end: bool = False) -> None:
        draft = commit_draft(seq, turn_end=turn_end)
        self.head = await self.ledger.commit(
            self.lease, self.head, draft, state=state_after(seq), trim=trim or Trim()
        )

    async def cut(self, cut: Cut) -> None:
        self.head = await self.ledger.cut(self.lease, self.head, cut)

    async def unit(self, seq: int, *, trim: Trim | None = None) -> None:
        await self.accept(seq)
        await self.commit(seq, trim=trim)

    async def units(self, count: int) -> None:
        for seq in range(1, count + 1):
            await self.unit(seq)


class LossyProxy:
    """Stands between client and server on Unix sockets.

    lose_replies: so many replies are swallowed, after `let_through` that are not; then the
    connection is closed, or with `hang` left open and silent. hold: requests are kept back while it
    is set, and sent on later.
    """

    def __init__(self, upstream: str, folder: Path) -> None:
        self._upstream = upstream
        self._path = folder / "p.sock"
        self._vanished = 0
        self.connections = 0
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.lose_replies = 0
        self.let_through = 0
        self.hang = False
        self.lost = 0
        self.open_gate = asyncio.Event()
        self.open_gate.set()

    @property
    def url(self) -> str:
        return f"unix://{self._path}"

    async def __aenter__(self) -> "LossyProxy":
        self._server = await asyncio.start_unix_server(self._serve, str(self._path))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def vanish(self) -> None:
        """Connections of now stay open and carry nothing any more; new ones work."""
        self._vanished = self.connections

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self.connections += 1
        number = self.connections
        upstream_reader, upstream_writer = await asyncio.open_unix_connection(
            self._upstream.removeprefix("unix://")
        )
        self._writers |= {writer, upstream_writer}
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._requests(reader, upstream_writer))
                group.create_task(self._replies(upstream_reader, writer, number))
        except* OSError:
            pass
        finally:
            writer.close()
            upstream_writer.close()
            self._tasks.discard(task)

    async def _requests(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            # Even a client that has gone has sent this: it arrives late, as in a real network.
            await self.open_gate.wait()
            sink.write(data)
            await sink.drain()
        await asyncio.sleep(0.05)
        raise ConnectionResetError("client has gone")

    async def _replies(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, number: int
    ) -> None:
        silent = False
        while data := await source.read(65_536):
            if number <= self._vanished:
                continue
            if self.let_through > 0:
                self.let_through -= 1
            elif self.lose_replies > 0:
                self.lose_replies -= 1
                self.lost += 1
                if not self.hang:
                    raise ConnectionResetError("reply lost")
                silent = True
            if not silent:
                sink.write(data)
                await sink.drain()
        raise ConnectionResetError("server has gone")
