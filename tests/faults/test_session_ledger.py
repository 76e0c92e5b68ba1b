"""The ledger is away in mid-conversation: input is held, refused by name after a while, and the
conversation goes on with the same tokens once the ledger is back."""

import asyncio
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
from support.patience import PATIENCE_S
from support.valkeys import dead, frozen

from duplex_sidecar.ledger.call import Head, PendingCall
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.journal import JournalBatch
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.ledger.store import LedgerOptions
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Closed, ResyncRequired
from duplex_sidecar.session import ending
from duplex_sidecar.session.staggering import SEATS
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_encoder import FakeEncoder
from fake_thinker import FakeThinker
from fake_voice import FakeCode2Wav, FakeTalker
from session_kit import (
    MODES,
    TOKEN,
    VOCABULARY,
    WORD_IDS,
    Caller,
    Mode,
    Replica,
    Stages,
    Terms,
    check_events,
    check_prompts,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
HOLD_S = 1.0
Outage = Callable[[EmbeddedValkey], AbstractContextManager[None]]


class Clock:
    """Time that passes when told to: how long input is held is not the machine's to say."""

    def __init__(self) -> None:
        self.now_s = 1_000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def here(valkey: EmbeddedValkey, clock: Clock) -> AsyncIterator[Replica]:
    async with replica(valkey.url, hold_s=HOLD_S, call_timeout_ms=400, clock_s=clock) as here:
        yield here


@pytest.mark.parametrize("outage", [frozen, dead])
@pytest.mark.parametrize("mode", MODES)
async def test_an_outage_costs_time_and_nothing_else(
    valkey: EmbeddedValkey, here: Replica, clock: Clock, outage: Outage, mode: Mode
) -> None:
    session, terms = f"outage-{outage.__name__}-{mode}", Terms(mode)
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, 30)
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(10)
    with outage(valkey):
        await caller.say(13)
        await caller.attachment_takes_mail()
        durable = here.registry.live[session]._durable
        await eventually(lambda: durable._away_since is not None)
        clock.now_s += HOLD_S
        await caller.attachment_takes_mail()
        assert caller.failures == [], "input is held"
        clock.now_s += 0.1
        refused = await caller.until_failure()
        assert refused.code is ErrorCode.LEDGER_UNAVAILABLE
        await caller.say(15)
        await caller.attachment_takes_mail()
        assert [failure.code for failure in caller.failures] == [
            ErrorCode.LEDGER_UNAVAILABLE,
            ErrorCode.LEDGER_UNAVAILABLE,
            ErrorCode.LEDGER_UNAVAILABLE,
        ]
        assert len(caller.units) == 10
        assert caller.accepted[-1].unit == 10, "nothing is acknowledged that is not durable"
    await caller.until_unit(13)
    caller.next_second = 14
    await caller.talk(30)
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    check_prompts([here.stages], session, terms, calm, caller)


async def test_an_outage_longer_than_the_lease(valkey: EmbeddedValkey, here: Replica) -> None:
    """Nobody else took the session: the same owner goes on with the same fence."""
    calm, _ = await undisturbed(valkey.url, "calm-long", Terms("context"), 20)
    await here.open("long", Terms("context"))
    caller = Caller("long")
    await caller.dial(here)
    await caller.talk(8)
    before = await here.ledger.reader.meta("long")
    with frozen(valkey):
        await caller.say(9)
        await asyncio.sleep(3.6)
        assert not here.registry.live["long"]._keeper.held
    await caller.until_unit(9)
    await caller.talk(20)
    check_events(caller)
    after = await here.ledger.reader.meta("long")
    assert before is not None
    assert after is not None
    assert (after.fence, after.nonce) == (before.fence, before.nonce)
    assert await tokens(here.ledger, "long") == calm


async def test_thirty_sessions_come_back_a_few_at_a_time(
    valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All hold a unit when the ledger dies. Once it is back, their held writes and the rest of
    those units run on a few seats, and all get through."""
    names = [f"herd-{number}" for number in range(30)]
    running, at_once, tries, behind = set[str](), [0], 0, 0
    stages = Stages(
        encoder=FakeEncoder(max_sessions=30),
        thinker=FakeThinker(VOCABULARY, WORD_IDS, seats=32),
        talker=FakeTalker(seats=32),
        code2wav=FakeCode2Wav(max_sessions=30),
    )
    async with replica(valkey.url, slots=30, stages=stages, call_timeout_ms=400) as here:
        callers = [Caller(name) for name in names]
        for caller in callers:
            await here.open(caller.session, Terms("context"))
            await caller.dial(here)
        retry, journal = here.ledger.retry_unknown, here.ledger.journal

        async def watched_retry(call: PendingCall) -> Head | None:
            nonlocal tries
            tries += 1
            head = await retry(call)
            running.add(call.session)
            at_once.append(len(running))
            return head

        async def watched_journal(lease: Lease, batch: JournalBatch) -> int:
            nonlocal behind
            last = await journal(lease, batch)
            running.discard(lease.session)
            behind += 1
            return last

        monkeypatch.setattr(here.ledger, "retry_unknown", watched_retry)
        monkeypatch.setattr(here.ledger, "journal", watched_journal)
        with dead(valkey):
            for caller in callers:
                await caller.say(1)
            for name in names:
                actor = here.registry.live[name]
                await eventually(lambda actor=actor: actor._durable._away_since is not None)
        await asyncio.gather(*(caller.until_unit(1) for caller in callers))
        assert behind == len(names)
        assert 0 < max(at_once) <= SEATS
        assert tries >= len(names)
        monkeypatch.undo()
        for caller in callers:
            caller.next_second = 2
            await caller.talk(3)
            check_events(caller)


@pytest.mark.parametrize("point", ["accept", "commit", "journal"])
@pytest.mark.parametrize("outage", [frozen, dead])
async def test_an_outage_at_each_write_of_a_unit(
    valkey: EmbeddedValkey, here: Replica, outage: Outage, point: str
) -> None:
    session, terms = f"write-{outage.__name__}-{point}", Terms("context")
    calm, calm_call = await undisturbed(valkey.url, f"calm-{session}", terms, 20)
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    unit = next(done.unit for done in calm_call.units if done.unit > 5 and done.audio_samples)
    await caller.talk(unit - 1)
    stage = {
        "accept": here.stages.encoder,
        "commit": here.stages.thinker,
        "journal": here.stages.code2wav,
    }[point]
    pause = stage.pause(unit, after=True)
    await caller.say(unit)
    await pause.reached.wait()
    if point == "journal":
        await asyncio.sleep(0.1)  # the commit runs beside the Talker
    with outage(valkey):
        pause.go.set()
        await asyncio.sleep(0.3)
        assert len(caller.units) == unit - 1
    await caller.until_unit(unit)
    await caller.talk(20)
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    loaded = await here.ledger.load(session)
    assert len(loaded.entries) == 40, "each write happened once"


async def test_mode_off_waits_for_the_ledger_when_it_needs_its_history(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    """A lost Thinker and a lost ledger at once."""
    calm, _ = await undisturbed(valkey.url, "calm-twice", Terms("off"), 15)
    await here.open("twice", Terms("off"))
    caller = Caller("twice")
    await caller.dial(here)
    await caller.talk(8)
    here.stages.thinker.fail(9, StageFault.GONE, after=True)
    here.stages.encoder.fail(10, StageFault.GONE, after=True)
    pause = here.stages.thinker.pause(9, after=True)
    await caller.say(10)
    await pause.reached.wait()
    with dead(valkey):
        pause.go.set()
        await asyncio.sleep(0.3)
    await caller.until_unit(10)
    await caller.talk(15)
    check_events(caller)
    assert await tokens(here.ledger, "twice") == calm


async def test_ending_while_the_ledger_is_away_takes_bounded_time(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "END_TIMEOUT_S", 3.0)
    await here.open("stuck", Terms("context"))
    caller = Caller("stuck")
    await caller.dial(here)
    await caller.talk(3)
    with frozen(valkey):
        await caller.say(5)
        await asyncio.sleep(0.1)
        async with asyncio.timeout(PATIENCE_S):
            with pytest.raises(ClientError) as away:
                await here.registry.end("stuck")
        assert away.value.code is ErrorCode.LEDGER_UNAVAILABLE
        assert here.registry.free_slots == 4
        assert here.stages.held() == []
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.SESSION_ENDED
    # Its ledger was not told: the session is there for whoever asks.
    again = Caller("stuck")
    again.attachment = caller.attachment
    again.sequenced = list(caller.sequenced)
    await again.dial(here)
    await again.talk(7)
    check_events(again)


async def test_time_without_the_ledger_is_nobodys_silence(
    valkey: EmbeddedValkey, here: Replica, clock: Clock
) -> None:
    """Longer than idleTimeout, parkAfter and disconnectGrace: nobody is ended or parked for it."""
    terms = Terms("context", idle="5m", park_after="2m", grace="30s")
    callers = [Caller("stays"), Caller("leaves")]
    for caller in callers:
        await here.open(caller.session, terms)
        await caller.dial(here)
        await caller.talk(3)
    stays, leaves = callers
    actors = [here.registry.live[caller.session] for caller in callers]
    with frozen(valkey):
        await leaves.hang_up()
        await eventually(lambda: not any(actor.holds_lease for actor in actors))
        clock.now_s += 600
        await eventually(lambda: all(a._without_ledger_at == clock.now_s for a in actors))
        assert not any(actor.leaving for actor in actors)
    await eventually(lambda: all(actor.ledger_answers for actor in actors))
    clock.now_s += 29
    await stays.talk(5)
    assert not any(actor.leaving for actor in actors)
    async with asyncio.timeout(PATIENCE_S):
        while "leaves" in here.registry.live:
            # A machine that stands still may have been without the ledger once more.
            clock.now_s = max(clock.now_s, actors[1]._without_ledger_at + 31)
            await asyncio.sleep(0.02)
    meta = await here.ledger.reader.meta("leaves")
    assert meta is not None
    assert (meta.phase, meta.reason) == (Phase.PARKED, "disconnect_grace")
    await stays.talk(7)
    check_events(stays)


async def test_asking_for_sessions_while_the_ledger_is_away(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    await here.open("known", Terms("context"))
    caller = Caller("known")
    await caller.dial(here)
    await caller.talk(2)
    assert await here.registry.end("known")
    with dead(valkey):
        for _ in range(2):
            with pytest.raises(ClientError) as error:
                await here.open("new", Terms("context"))
            assert error.value.code is ErrorCode.LEDGER_UNAVAILABLE
            with pytest.raises(ClientError) as error:
                await here.registry.attach("known", TOKEN, None)
            assert error.value.code is ErrorCode.LEDGER_UNAVAILABLE
            assert here.registry.free_slots == 4
    await here.open("new", Terms("context"))
    with pytest.raises(ClientError) as error:
        await here.registry.attach("known", TOKEN, None)
    assert error.value.code is ErrorCode.SESSION_ENDED


async def test_a_resume_while_the_ledger_is_away_can_be_tried_again(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    await here.open("resumes", Terms("context"))
    caller = Caller("resumes")
    await caller.dial(here)
    await caller.talk(4)
    with dead(valkey):
        attachment = await here.registry.attach("resumes", TOKEN, 1)
        with pytest.raises(ClientError) as error:
            await attachment.next_event()
        assert error.value.code is ErrorCode.LEDGER_UNAVAILABLE
        await attachment.detach()
    await caller.dial(here)
    await caller.talk(6)
    check_events(caller)


async def test_a_server_that_lost_everything_never_starts_a_session_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "END_TIMEOUT_S", 1.0)
    server = EmbeddedValkey(tmp_path / "empty")
    server.start()
    try:
        async with replica(server.url, hold_s=HOLD_S, call_timeout_ms=400) as here:
            await here.open("lost", Terms("context"))
            caller = Caller("lost")
            await caller.dial(here)
            await caller.talk(3)
            server.kill()
            for part in (tmp_path / "empty").rglob("*.aof"):
                part.write_bytes(b"")
            for part in (tmp_path / "empty").rglob("*.rdb"):
                part.unlink()
            for part in (tmp_path / "empty").rglob("*.manifest"):
                part.unlink()
            server.start()
            await caller.say(4)
            closed = await caller.until(lambda event: isinstance(event, Closed))
            assert isinstance(closed, Closed)
            assert closed.code is ErrorCode.LEDGER_CORRUPT
            await eventually(lambda: here.registry.free_slots == 4)
            with pytest.raises(ClientError) as error:
                await here.registry.attach("lost", TOKEN, caller.last_sequence)
            assert error.value.code is ErrorCode.SESSION_NOT_FOUND
    finally:
        server.stop()


async def test_what_the_journal_has_forgotten_is_said_and_the_rest_replayed(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        here.ledger, "_options", LedgerOptions(max_journal_bytes=20_000), raising=True
    )
    await here.open("forgets", Terms("context"))
    caller = Caller("forgets")
    await caller.dial(here)
    await caller.talk(40)
    meta = await here.ledger.reader.meta("forgets")
    assert meta is not None
    assert meta.events_first > 1
    attachment = await here.registry.attach("forgets", TOKEN, 0)
    seen = [await attachment.next_event() for _ in range(2)]
    assert seen[1] == ResyncRequired(0, meta.events_first)
    replayed = [
        await attachment.next_event() for _ in range(meta.events_last - meta.events_first + 1)
    ]
    assert replayed == caller.sequenced[meta.events_first - 1 :]
    # One that claims to have seen what its first owner never gave: no loss of the ledger's.
    attachment = await here.registry.attach("forgets", TOKEN, meta.events_last + 5)
    seen = [await attachment.next_event() for _ in range(2)]
    assert seen[1] == ResyncRequired(meta.events_last + 5, meta.events_last + 1)


async def test_a_full_ledger_is_said_and_other_sessions_go_on(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-room", Terms("context"), 20)
    await here.open("full", Terms("off"))
    await here.open("room", Terms("context"))
    full, room = Caller("full"), Caller("room")
    await full.dial(here)
    await room.dial(here)
    await full.talk(5)
    await room.talk(5)
    loaded = await here.ledger.load("full")
    options = LedgerOptions(max_session_bytes=loaded.meta.bytes + 3 * 33_000)
    monkeypatch.setattr(here.ledger, "_options", options)
    await full.say(12)
    closed = await full.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.RESOURCE_EXHAUSTED
    check_events(full)
    assert 5 < len(full.units) < 12
    monkeypatch.undo()
    await room.talk(20)
    check_events(room)
    assert await tokens(here.ledger, "room") == calm
    # Nothing was lost: with room it goes on.
    await full.dial(here)
    await full.talk(12)
    check_events(full)


async def test_a_state_that_cannot_be_read_is_said_and_kept(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.open("strange", Terms("context"))
    caller = Caller("strange")
    await caller.dial(here)
    commit = here.ledger.commit

    async def other_state(*args: Any, state: bytes, **rest: Any) -> Any:
        return await commit(*args, state=b"\xc0", **rest)

    monkeypatch.setattr(here.ledger, "commit", other_state)
    await caller.talk(2)
    await here.registry.close()
    async with replica(here_url(here), "reader") as reader:
        for _ in range(2):
            with pytest.raises(ClientError) as error:
                await reader.registry.attach("strange", TOKEN, None)
            assert error.value.code is ErrorCode.LEDGER_CORRUPT
            assert reader.registry.free_slots == 4
        assert len(await tokens(reader.ledger, "strange")) == 2


def here_url(here: Replica) -> str:
    pool = here.ledger._connection._nodes.holding("").pool
    return f"unix://{pool.connection_kwargs['path']}"


async def test_a_stage_that_does_not_let_go_keeps_no_session_open(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ending, "END_TIMEOUT_S", 0.3)
    await here.open("held", Terms("context"))
    caller = Caller("held")
    await caller.dial(here)
    await caller.talk(3)

    async def never(_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(here.stages.thinker, "close", never)
    async with asyncio.timeout(PATIENCE_S):
        closed = await caller.close()
    assert closed.code is ErrorCode.SESSION_ENDED
    meta = await here.ledger.reader.meta("held")
    assert meta is not None
    assert (meta.phase, meta.nonce) == ("ended", "")
