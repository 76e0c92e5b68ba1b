"""What has to be true of a conversation in whose middle something was lost. Pure: each answer is a
list of sentences, one for each thing that is not so."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from duplex_sidecar.client.conversation import UNIT_SAMPLES, Replies, Talk
from duplex_sidecar.ledger.errors import LedgerCorrupt
from duplex_sidecar.ledger.export import export_lines, verify_lines
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.session.catching_up import sounded_of

GIVEN_BACK = 0.9
"""Of what the dead processes held; the driver's figures of a process and of the device differ."""
SLACK_GIB = 1.0
"""By which the stages that live on may have grown meanwhile."""

Script = Sequence[tuple[int, ...]]


@dataclass(frozen=True)
class Struck:
    """One session. script: what its units emit, in turn. replies_at_kill: stretches of sound that
    the client had. at_kill, end: what the ledger held, chain and blobs checked by its reader."""

    talk: Talk
    units: int
    script: Script
    replies_at_kill: int
    at_kill: LoadedSession
    end: LoadedSession

    @property
    def last_reply(self) -> Replies:
        """The last one before the kill."""
        return self.talk.replies[self.replies_at_kill - 1]

    @property
    def next_epoch(self) -> Replies | None:
        """The first sound behind the kill that is of another epoch."""
        behind = self.talk.replies[self.replies_at_kill :]
        return next((one for one in behind if one.epoch != self.last_reply.epoch), None)


@dataclass(frozen=True)
class Memory:
    """GiB in use on the device: before the kill, at the lowest behind it, and in the end.
    victim_gib: what the killed processes held, None where the driver does not say it."""

    before_gib: float
    lowest_gib: float
    after_gib: float
    victim_gib: float | None


def what_the_client_heard(struck: Struck) -> Iterator[str]:
    """Every unit once and in order, and every sample of every turn."""
    talk = struck.talk
    numbers = [unit["unit"] for unit in talk.units]
    if numbers != list(range(1, struck.units + 1)):
        yield f"the client's units are not 1 to {struck.units}, but {numbers}"
    for error in talk.errors:
        yield f"the client was told {error.get('code')}"
    at: dict[int, int] = {}
    heard: dict[int, int] = {}
    for reply in talk.replies:
        wanted, samples = at.get(reply.turn, 0), len(reply.pcm_s16le) // 2
        if reply.from_sample != wanted:
            where = f"turn {reply.turn}, unit {reply.input_s:.0f}"
            yield f"{where} goes on at sample {reply.from_sample}, not at {wanted}"
        at[reply.turn] = reply.from_sample + samples
        heard[int(reply.input_s)] = heard.get(int(reply.input_s), 0) + samples
    for unit in talk.units:
        here = heard.get(unit["unit"], 0)
        if here != unit["audio_samples"]:
            yield f"unit {unit['unit']} has {unit['audio_samples']} samples, {here} were heard"
    turns = list(at)
    if not turns or turns != list(range(turns[0], turns[0] + len(turns))):
        yield f"the turns that sounded are {turns}"


def which_chunks_came(struck: Struck) -> Iterator[str]:
    """Neither epochs nor the chunks in one go back or come twice. One that has no sound, since the
    vocoder holds back all of it, is not sent."""
    places = [(reply.epoch, reply.sequence) for reply in struck.talk.replies]
    for before, now in pairwise(places):
        if now <= before:
            yield f"chunk {now[1]} of epoch {now[0]} follows chunk {before[1]} of epoch {before[0]}"


def whether_a_new_epoch_began(struck: Struck) -> Iterator[str]:
    """In the middle of the turn that sounded at the kill, from chunk 0: what had sounded of the
    turn comes first, muted, and what is heard goes on behind it."""
    first, last = struck.next_epoch, struck.last_reply
    if first is None or first.turn != last.turn:
        yield f"turn {last.turn} went on without a new epoch"
        return
    muted = len(sounded_of(struck.at_kill.marks, last.turn).chunks)
    if first.sequence not in (muted, muted + 1):
        yield f"epoch {first.epoch} is heard from chunk {first.sequence}, {muted} were muted"


def what_the_ledger_holds(struck: Struck) -> Iterator[str]:
    """What it held at the kill it holds unchanged; each unit is there once, with the tokens of its
    script, and every client sample is in one of them."""
    before = [entry.stored for entry in struck.at_kill.entries]
    if [entry.stored for entry in struck.end.entries][: len(before)] != before:
        yield "records that were written before the kill have changed"
    try:
        verify_lines(export_lines(struck.end))
    except LedgerCorrupt as error:
        yield f"the exported chain does not verify: {error}"
    committed = struck.end.committed
    if [unit.seq for unit in committed] != list(range(1, struck.units + 1)):
        yield f"the ledger's units are {[unit.seq for unit in committed]}"
    for unit in committed:
        if unit.token_ids != tuple(struck.script[(unit.seq - 1) % len(struck.script)]):
            yield f"unit {unit.seq} has other tokens than its script"
    for unit in struck.end.accepted:
        heard = (unit.input.client_from_samples, unit.input.client_to_samples)
        if heard != ((unit.seq - 1) * UNIT_SAMPLES, unit.seq * UNIT_SAMPLES):
            yield f"unit {unit.seq} holds the client's samples {heard[0]} to {heard[1]}"
    closed = struck.end.closed
    if closed is None or closed.reason != "session_ended":
        yield f"the session's end is {closed.reason if closed else 'not there'}"


def who_answered(struck: Struck, first: str, then: str) -> Iterator[str]:
    """first, then: replicas before and behind the kill; the same one if it lived on."""
    by = [unit["replica"] for unit in struck.talk.units]
    if first == then:
        if set(by) != {first}:
            yield f"units were answered by {sorted(set(by))}"
        if struck.talk.resumes:
            yield "the client lost its connection"
        return
    moved = by.index(then) if then in by else len(by)
    if not 0 < moved < len(by) or by != [first] * moved + [then] * (len(by) - moved):
        yield f"units were answered by {by}"
    if len(struck.talk.resumes) != 1:
        yield f"the client resumed {len(struck.talk.resumes)} times"


def whether_memory_came_back(memory: Memory, *, restarts: bool) -> Iterator[str]:
    """restarts: what was killed comes again and takes as much as before."""
    freed_gib = memory.before_gib - memory.lowest_gib
    if memory.victim_gib is not None and freed_gib < GIVEN_BACK * memory.victim_gib:
        yield f"of {memory.victim_gib:.1f} GiB on the GPU {freed_gib:.1f} came back"
    if freed_gib <= 0:
        yield "no memory of the GPU came back"
    if restarts and memory.after_gib > memory.before_gib + SLACK_GIB:
        yield f"{memory.after_gib:.1f} GiB are in use now, {memory.before_gib:.1f} were before"
