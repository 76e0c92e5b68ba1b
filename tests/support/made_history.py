"""A small right history, made by hand: two owners, a handful of units, one client. Rules are tried
on what becomes of it when one thing in it is changed."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from msgspec import structs
from support.ledger_kit import accept_draft, commit_draft, opening_draft

from duplex_api.resolve import ResolvedCamera
from duplex_api.window import DEFAULT_WINDOW
from duplex_sidecar.history.check import check_history
from duplex_sidecar.history.observations import (
    SCHEMA,
    Acknowledged,
    ChainWrite,
    Command,
    EventFacts,
    Frame,
    JournalWrite,
    LedgerEnd,
    Observation,
    Opened,
    Reference,
    Run,
    StageChunk,
)
from duplex_sidecar.history.verdict import Report
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.export import Line

SESSION = "made"
SAMPLES = 16_000
CONTEXT_TOKENS = 3
UNIT_TOKENS = 11
CLOSURE_TOKENS = 2
STEP_NS = 1_000_000
LEASE_MS, MARGIN_MS = 3_000, 500
TAKEOVER_AFTER = 2

T = TypeVar("T", bound=msgspec.Struct)


@dataclass
class Maker:
    """replica, fence: of the present owner. connection: of the client. skipped: samples of it that
    came into no unit so far."""

    observations: list[Observation] = field(default_factory=list[Observation])
    now_ns: int = 0
    replica: str = "a"
    fence: int = 0
    connection: int = 0
    sequence: int = 0
    head: str = records.GENESIS_HASH
    index: int = 0
    prompt_tokens: int = 0
    completed: int = 0
    lines: list[Line] = field(default_factory=list[Line])
    turn_samples: int = 0
    chunks: int = 0
    skipped: int = 0

    def tick(self) -> int:
        self.now_ns += STEP_NS
        return self.now_ns

    def command(self, name: str, **more: Any) -> None:
        facts: dict[str, Any] = {
            "replica": self.replica,
            "connection": 1,
            "number": len(self.observations),
            "name": name,
            "session": SESSION,
            "fence": self.fence,
            "nonce": f"nonce {self.fence}",
            "operation": f"{name} {len(self.observations)}",
            "write": None,
            "arguments": (),
            "seen_ns": self.tick(),
            "sent": True,
            "executed_ns": self.tick(),
            "replied_ns": self.tick(),
            "reply": ("ok",),
        }
        self.observations.append(Command(**(facts | more)))

    def frame(self, kind: str, *, down: bool = True, **more: Any) -> None:
        facts: dict[str, Any] = {
            "client": "c",
            "connection": self.connection,
            "replica": self.replica,
            "session": SESSION,
            "down": down,
            "at_ns": self.tick(),
            "passed_on": True,
            "type": kind,
            "size_bytes": 100,
        }
        self.observations.append(Frame(**(facts | more)))

    # --- the story --------------------------------------------------------------------------------

    def own(self, replica: str) -> None:
        self.replica, self.fence, self.chunks = replica, self.fence + 1, 0
        self.command("acquire", reply=("ok", str(self.fence), "era"), fence=None)

    def dial(self) -> None:
        self.connection += 1
        if self.connection > 1:
            self.frame("session.resume", down=False, resumes_after=self.sequence)
        opened = Opened(SESSION, SAMPLES * len(self.lines[1:]), self.sequence)
        self.frame("session.created", opened=opened)

    def open(self) -> None:
        draft = structs.replace(
            opening_draft(SESSION),
            parts=(records.PromptIds((1, 2)), records.PromptIds((3,)), records.PromptIds(())),
            window=msgspec.Raw(msgspec.json.encode(DEFAULT_WINDOW)),
            output=msgspec.Raw(msgspec.json.encode(ResolvedCamera(0, False))),
        )
        opening = records.Opening(
            **structs.asdict(draft),
            schema=records.SCHEMA,
            rows=(),
            state_sha256="0",
            replica=self.replica,
            at_ms=1,
            prev_hash=records.GENESIS_HASH,
        )
        self.write("create", "opening", 0, (opening,))
        self.line("opening", 0, (opening,))

    def write(self, name: str, entry: str, seq: int, written: tuple[records.Record, ...]) -> None:
        record = written[-1]
        stored = records.encode(record)
        digest = records.sha256(stored)
        write = ChainWrite(entry, seq, record.prev_hash, digest, stored.decode())
        self.command(name, write=write)
        self.head = digest

    def line(self, kind: str, seq: int, kept: tuple[records.Record, ...]) -> None:
        accepted = next((one for one in kept if isinstance(one, records.Accepted)), None)
        committed = next((one for one in kept if isinstance(one, records.Committed)), None)
        stored = tuple(records.encode(record) for record in kept)
        self.index += len(kept) if seq else 0
        self.lines.append(
            Line(
                kind=kind,
                session=SESSION,
                seq=seq,
                epoch=0,
                turn=1,
                committed=committed is not None,
                token_ids=committed.token_ids if committed else (),
                sampled_ids=committed.sampled_ids if committed else (),
                terminator=committed.terminator if committed else None,
                decision=committed.decision if committed else None,
                turn_end=False,
                plan=committed.plan if committed else None,
                input=accepted.input if accepted else None,
                attempts=1,
                accepted_by=None,
                replica=self.replica,
                at_ms=1,
                index=self.index,
                prev_hash=kept[0].prev_hash,
                hash=records.sha256(stored[-1]),
                records=tuple(record.decode() for record in stored),
            )
        )

    def unit(self, seq: int) -> None:
        accepted = self.accept(seq)
        self.frame(
            "input_audio_buffer.committed",
            acknowledged=Acknowledged(seq, *self.place(seq)),
        )
        committed = self.commit(seq)
        self.line("unit", seq, (accepted, committed))

    def place(self, seq: int) -> tuple[int, int]:
        """Its first sample and the one behind its last."""
        return SAMPLES * (seq - 1) + self.skipped, SAMPLES * seq + self.skipped

    def clear(self, samples: int, *, said: bool) -> None:
        """The next unit begins so many samples later; said: because the client wanted it."""
        self.skipped += samples
        if said:
            self.frame("input_audio_buffer.clear", down=False)
            self.frame("input_audio_buffer.cleared")

    def accept(self, seq: int) -> records.Accepted:
        self.prompt_tokens += UNIT_TOKENS + self.completed
        self.prompt_tokens += CLOSURE_TOKENS if seq > 1 else CONTEXT_TOKENS
        draft = structs.replace(accept_draft(seq), plan=self.plan())
        first, last = self.place(seq)
        input_ = structs.replace(draft.input, client_from_samples=first, client_to_samples=last)
        draft = structs.replace(draft, input=input_)
        accepted = records.Accepted(
            **structs.asdict(draft),
            schema=records.SCHEMA,
            media=records.MediaRefs(None, None, ()),
            state_sha256=None,
            attempts=1,
            replica=self.replica,
            at_ms=1,
            prev_hash=self.head,
        )
        self.write("accept", "accepted", seq, (accepted,))
        return accepted

    def commit(self, seq: int) -> records.Committed:
        draft = structs.replace(commit_draft(seq), plan=self.plan())
        committed = records.Committed(
            **structs.asdict(draft),
            schema=records.SCHEMA,
            state_sha256="0",
            replica=self.replica,
            at_ms=1,
            prev_hash=self.head,
        )
        self.completed = len(committed.token_ids) - 1
        self.write("commit", "committed", seq, (committed,))
        return committed

    def plan(self) -> records.PlanFacts:
        return records.PlanFacts(
            records.PlanAction.EXTEND, "off", None, 0, 0, 0, self.prompt_tokens
        )

    def speak(self, seq: int) -> None:
        """One chunk of sound and the unit's facts."""
        self.observations.append(StageChunk(self.replica, SESSION, self.fence - 1, self.chunks))
        first = self.sequence + 1
        events = [self.audio(first, seq), self.done(first + 1, seq)]
        self.command("journal", write=JournalWrite(seq, first, tuple(events)))
        self.sequence += len(events)
        for event in events:
            self.frame("event", event=structs.replace(event, sha256=f"wire {event.sequence}"))
        self.turn_samples += events[0].samples
        self.chunks += 1

    def audio(self, sequence: int, seq: int) -> EventFacts:
        return EventFacts(
            sequence=sequence,
            kind="audio",
            sha256=f"journal {sequence}",
            turn=1,
            unit=seq,
            epoch=self.fence - 1,
            stage2_sequence=self.chunks,
            from_sample=self.turn_samples,
            samples=600,
            pcm_sha256=hashlib.sha256(b"%d" % seq).hexdigest(),
        )

    def done(self, sequence: int, seq: int) -> EventFacts:
        name = f"journal {sequence}"
        return EventFacts(sequence=sequence, kind="unit_done", sha256=name, turn=1, unit=seq)


def made_history(
    units: int = 4,
    said: Sequence[int] | None = None,
    cleared: Mapping[int, tuple[int, bool]] | None = None,
) -> list[Observation]:
    """The first two units of one owner, the others of its successor. said: which of them sound,
    None: each once. cleared: samples that are missing in front of a unit, and whether the client
    said so."""
    run = Run(schema=SCHEMA, name="made", lease_ms=LEASE_MS, margin_ms=MARGIN_MS)
    maker = Maker([run])
    maker.open()
    maker.own("a")
    maker.dial()
    for seq in range(1, units + 1):
        if seq == TAKEOVER_AFTER + 1:
            maker.own("b")
            maker.dial()
        samples, by_client = (cleared or {}).get(seq, (0, False))
        if samples or by_client:
            maker.clear(samples, said=by_client)
        maker.unit(seq)
        for _ in range((said or range(units + 1)).count(seq)):
            maker.speak(seq)
    maker.frame("session.closed", problem="session_ended")
    lines = tuple(msgspec.json.encode(line).decode() for line in maker.lines)
    maker.observations.append(LedgerEnd(session=SESSION, lines=lines, events_last=maker.sequence))
    tokens = tuple(line.token_ids for line in maker.lines[1:])
    maker.observations.append(Reference(SESSION, tokens))
    return maker.observations


def changed(
    history: list[Observation], kind: type[T], where: Callable[[T], bool], **change: Any
) -> list[Observation]:
    """The first observation of that kind for which `where` holds, changed; all else as it is."""
    place = next(n for n, one in enumerate(history) if isinstance(one, kind) and where(one))
    found: Any = history[place]
    return [*history[:place], structs.replace(found, **change), *history[place + 1 :]]


def report_of(history: list[Observation]) -> Report:
    return check_history(history)
