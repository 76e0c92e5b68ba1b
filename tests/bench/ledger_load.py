"""What 200 sessions do to a ledger, one unit a second each: accept, commit, journal, renewals; and
beside them plain SETs of the same bytes on the same server."""

import asyncio
import hashlib
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import msgspec

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.connection import pack
from duplex_sidecar.ledger.journal import JournalBatch, VoiceMark
from duplex_sidecar.ledger.lease import Lease, LeaseKeeper
from duplex_sidecar.ledger.media import Trim, UnitMedia
from duplex_sidecar.ledger.nodes import Node
from duplex_sidecar.ledger.records import (
    AcceptDraft,
    CommitDraft,
    OpeningDraft,
    PlanAction,
    PlanFacts,
    PromptIds,
    UnitInput,
)
from duplex_sidecar.ledger.store import Ledger

ROWS_BYTES = 20 * 1024
PCM_BYTES = 32_000
SPOKEN_BYTES = 48_000
STATE_BYTES = 1_024
VOICE_STATE_BYTES = 600
EVENT_BYTES = 300
SPOKEN_CODES = 25
SPOKEN_SAMPLES = 24_000
WINDOW_UNITS = 24
"""Rows of so many units are kept, as by a session in `context` mode."""
PCM_UNITS = 58
TURN_UNITS = 8
THINKING_S = 0.15
"""Between a unit's accept and its commit."""
_BLOBS = 61
EMPTY = msgspec.Raw(b"{}")
_PLAN = PlanFacts(PlanAction.EXTEND, "context", None, 0, 0, 0, 1_300)
_IDS = tuple(range(1_000, 1_012))


@dataclass
class Times:
    """Milliseconds to the answer: since the call was due, and since it was made. The difference is
    how late the process's own timers and its other work let it begin."""

    since_due: list[float] = field(default_factory=list[float])
    since_call: list[float] = field(default_factory=list[float])


@dataclass
class Samples:
    accept: Times = field(default_factory=Times)
    commit: Times = field(default_factory=Times)
    journal: Times = field(default_factory=Times)
    set_accept: Times = field(default_factory=Times)
    set_commit: Times = field(default_factory=Times)
    bare_accept: Times = field(default_factory=Times)
    bare_commit: Times = field(default_factory=Times)
    renew: list[float] = field(default_factory=list[float])
    """Milliseconds, since the call."""
    units: int = 0
    late_units: int = 0
    """Begun when their second was over."""


class Payload:
    """Bytes that differ from unit to unit and cost nothing to make."""

    def __init__(self, rows_bytes: int = ROWS_BYTES) -> None:
        chance = random.Random(5)
        size = rows_bytes + PCM_BYTES + SPOKEN_BYTES
        self._blobs = [chance.randbytes(size) for _ in range(_BLOBS)]
        self._pcm = [blob[:PCM_BYTES] for blob in self._blobs]
        self._rows = [blob[PCM_BYTES : PCM_BYTES + rows_bytes] for blob in self._blobs]
        self._spoken = [blob[-SPOKEN_BYTES:] for blob in self._blobs]
        self.state = chance.randbytes(STATE_BYTES)
        self.voice_state = chance.randbytes(VOICE_STATE_BYTES)
        self.event = chance.randbytes(EVENT_BYTES)

    def media(self, seq: int, who: int) -> UnitMedia:
        at = (seq * 7 + who) % _BLOBS
        return UnitMedia(pcm=self._pcm[at], rows=self._rows[(at + 13) % _BLOBS])

    def spoken(self, seq: int, who: int) -> bytes:
        return self._spoken[(seq * 5 + who) % _BLOBS]


def context_trim(seq: int) -> Trim:
    """What the commit of that unit drops."""
    return Trim(window_below=max(1, seq - WINDOW_UNITS + 1), pcm_below=max(1, seq - PCM_UNITS + 1))


class Session:
    """One owner with its lease."""

    def __init__(
        self,
        ledger: Ledger,
        payload: Payload,
        who: int,
        lease: Lease,
        head: Head,
        trim: Callable[[int], Trim],
    ) -> None:
        self.name = lease.session
        self._trim = trim
        self._ledger = ledger
        self._payload = payload
        self._who = who
        self._head = head
        self._events = 0
        self.renewals: list[float] = []
        self.keeper = LeaseKeeper(self._renew, lease)

    @classmethod
    async def open(
        cls,
        ledger: Ledger,
        payload: Payload,
        who: int,
        trim: Callable[[int], Trim] = context_trim,
    ) -> "Session":
        name = f"bench-{who}"
        head = await ledger.create(
            OpeningDraft(
                session=name,
                checkpoint="bench",
                parts=(PromptIds(tuple(range(64))),),
                voice="default",
                window=EMPTY,
                sampling=EMPTY,
                output=EMPTY,
                limits=EMPTY,
                seed=who,
                traceparent="00-0-0-01",
            ),
            replica="bench",
            token_sha256=hashlib.sha256(name.encode()).hexdigest(),
            state=payload.state,
        )
        return cls(ledger, payload, who, await ledger.acquire(name, "bench"), head, trim)

    async def _renew(self, lease: Lease) -> Lease:
        began = time.perf_counter()
        renewed = await self._ledger.renew(lease)
        self.renewals.append((time.perf_counter() - began) * 1000)
        return renewed

    async def accept(self) -> None:
        seq = self._head.committed_seq + 1
        draft = AcceptDraft(
            seq=seq,
            epoch=0,
            turn=1 + seq // TURN_UNITS,
            input=UnitInput(16_000, 1, 16_000 * (seq - 1), 16_000 * seq, None, False, False),
            plan=_PLAN,
            directive="",
            strategy="reprefill",
            seed=seq,
            traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        )
        media = self._payload.media(seq, self._who)
        self._head = await self._ledger.accept(
            self.keeper.lease, self._head, draft, media, state=self._payload.state
        )

    async def commit(self) -> None:
        seq = self._head.committed_seq + 1
        draft = CommitDraft(
            seq=seq,
            epoch=0,
            turn=1 + seq // TURN_UNITS,
            token_ids=_IDS,
            sampled_ids=_IDS,
            terminator="chunk_eos",
            decision="speak",
            turn_end=False,
            plan=_PLAN,
        )
        self._head = await self._ledger.commit(
            self.keeper.lease, self._head, draft, state=self._payload.state, trim=self._trim(seq)
        )

    async def journal(self) -> None:
        """The unit spoke for its whole second: the sound, what was said, and that it is done."""
        seq = self._head.committed_seq
        turn, place = 1 + seq // TURN_UNITS, seq % TURN_UNITS if seq >= TURN_UNITS else seq - 1
        mark = VoiceMark(
            epoch=0,
            sequence=seq,
            turn=turn,
            unit=seq,
            code_offset=SPOKEN_CODES * place,
            codes=tuple(range(SPOKEN_CODES)),
            from_samples=SPOKEN_SAMPLES * place,
            to_samples=SPOKEN_SAMPLES * (place + 1),
        )
        event = self._payload.event
        batch = JournalBatch(
            unit=seq,
            first_seq=self._events + 1,
            events=(event, self._payload.spoken(seq, self._who), event),
            mark=mark,
            voiced_through=seq,
            voice_state=self._payload.voice_state,
        )
        self._events = await self._ledger.journal(self.keeper.lease, batch)


class PlainWriter:
    """SETs of as many bytes as the scripts carry: as an application makes them (`Redis.set`), or
    bare, a packed command over a connection at hand, as the ledger's client sends its scripts."""

    def __init__(self, node: Node, payload: Payload, who: int, *, bare: bool) -> None:
        self._node = node
        self.bare = bare
        self._payload = payload
        self._who = who
        self._seq = 0
        self.accept_bytes = PCM_BYTES + ROWS_BYTES + STATE_BYTES + 1_000
        self.commit_bytes = STATE_BYTES + 800

    async def accept(self) -> None:
        self._seq += 1
        media = self._payload.media(self._seq, self._who)
        rest = self.accept_bytes - len(media.pcm) - len(media.rows)
        value = media.pcm + media.rows + self._payload.spoken(self._seq, self._who)[:rest]
        await self._set(f"plain:{self._who}:{self._seq % WINDOW_UNITS}", value)

    async def commit(self) -> None:
        value = self._payload.spoken(self._seq, self._who)[: self.commit_bytes]
        await self._set(f"plain:{self._who}:c{self._seq % WINDOW_UNITS}", value)

    async def _set(self, key: str, value: bytes) -> None:
        if not self.bare:
            await self._node.redis.set(key, value)
            return
        async with self._node.connection() as connection:
            await connection.send_packed_command(pack(("SET", key, value)))
            await connection.read_response()


async def timed(into: Times, call: Callable[[], Awaitable[None]], due: float | None = None) -> None:
    """due: by `perf_counter`; None: now."""
    began = time.perf_counter()
    await call()
    done = time.perf_counter()
    into.since_call.append((done - began) * 1000)
    into.since_due.append((done - (began if due is None else due)) * 1000)


async def until(due: float) -> None:
    left = due - time.perf_counter()
    if left > 0:
        await asyncio.sleep(left)
