"""A replica dies at any point of a unit, another one takes the session up: the same tokens, every
event exactly once, a new epoch at chunk 0."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from support.patience import PATIENCE_S, leases_run_out, unhurried

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LeaseLost
from duplex_sidecar.ledger.records import Redo
from duplex_sidecar.ledger.session_view import LoadedSession
from duplex_sidecar.protocol.commands import Heartbeat
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Audio, Closed, Event, InputAccepted
from duplex_sidecar.session import assembly
from duplex_sidecar.session.actor import Phase
from duplex_sidecar.session.catching_up import FULL_CHUNKS
from duplex_sidecar.stages.errors import StageFault

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from fake_stage import Pause
from session_kit import (
    MODES,
    RATE_HZ,
    TOKEN,
    Caller,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    committed,
    eventually,
    frames_of,
    replica,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.fault
UNITS = 60
POINTS = (
    ("encoder", False),
    ("encoder", True),
    ("thinker", False),
    ("thinker", True),
    ("talker", False),
    ("talker", True),
    ("code2wav", False),
    ("code2wav", True),
)
"""Where the lost owner's unit stands: not accepted; accepted only; committed, but not said."""


def no_frames(_: int) -> tuple[bytes, ...]:
    return ()


@pytest.fixture(autouse=True)
def _unhurried() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        unhurried(patch)
        yield


class Fleet:
    """Replicas that are started one after another; a lost one keeps standing where it was."""

    def __init__(self, url: str, stack: AsyncExitStack) -> None:
        self._url = url
        self._stack = stack
        self.replicas: list[Replica] = []

    async def start(self) -> Replica:
        name = f"replica-{len(self.replicas)}"
        started = await self._stack.enter_async_context(replica(self._url, name))
        for lost in self.replicas:
            started.registry.declare_dead(lost.name)
        self.replicas.append(started)
        return started


@pytest.fixture
async def fleet(valkey: EmbeddedValkey) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        yield Fleet(valkey.url, stack)


def speaking_units(caller: Caller) -> set[int]:
    return {unit.unit for unit in caller.units if unit.audio_samples}


async def stand_still(here: Replica, caller: Caller, stage: str, after: bool, unit: int) -> bool:
    """Let the unit get to that point. False: it did not need the stage."""
    pause: Pause = getattr(here.stages, stage).pause(unit, after=after)
    await caller.say(unit)
    reached = asyncio.create_task(pause.reached.wait())
    done = asyncio.create_task(caller.until_unit(unit))
    try:
        await asyncio.wait({reached, done}, return_when=asyncio.FIRST_COMPLETED)
        return reached.done()
    finally:
        reached.cancel()
        done.cancel()
        await asyncio.gather(reached, done, return_exceptions=True)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("camera", [False, True], ids=["audio", "camera"])
@pytest.mark.parametrize("greedy", [False, True], ids=["sampled", "greedy"])
async def test_a_conversation_over_many_deaths(
    valkey: EmbeddedValkey, fleet: Fleet, mode: Mode, camera: bool, greedy: bool
) -> None:
    session = f"deaths-{mode}-{camera}-{greedy}"
    terms = Terms(mode, greedy=greedy)
    terms, frames = (with_camera(terms), frames_of) if camera else (terms, no_frames)
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS, frames=frames)

    here = await fleet.start()
    await here.open(session, terms)
    caller = Caller(session, frames=frames)
    await caller.dial(here)
    unit = 0
    stood: list[tuple[int, str]] = []
    for stage, after in POINTS:
        unit += 3
        await caller.talk(unit)
        while True:
            unit += 1
            if await stand_still(here, caller, stage, after, unit):
                break
        stood.append((unit, stage))
        here = await fleet.start()
        opened = await caller.dial(here)
        # Before the accept the input is lost with the replica, after it never.
        heard = unit - 1 if stage == "encoder" else unit
        assert opened.acknowledged_sample == RATE_HZ * heard
        assert opened.next_unit == heard + 1
        assert opened.resumed
    await caller.talk(UNITS)
    check_events(caller)

    assert await tokens(here.ledger, session) == calm
    check_prompts([each.stages for each in fleet.replicas], session, terms, calm, caller, frames)
    redone = {
        entry.record.seq
        for entry in (await here.ledger.load(session)).entries
        if isinstance(entry.record, Redo)
    }
    assert redone == {unit for unit, stage in stood if stage == "thinker"}
    for each in fleet.replicas:
        check_stage2(each.stages, session)
    check_seams(fleet, caller)
    epochs = [epoch for each in fleet.replicas for epoch in check_stage2(each.stages, session)]
    assert sorted(set(epochs)) == list(range(max(epochs) + 1))
    assert [unit.replica for unit in caller.units] == sorted(unit.replica for unit in caller.units)


def check_seams(fleet: Fleet, caller: Caller) -> None:
    """What the client heard of a turn is what the turn's last epoch made, from its first sample on:
    the lost epochs' part of it again, muted, and then its own. No sample is missing, none comes
    twice. (Turns that were caught up from two chunks back have the right length only.)"""
    heard: dict[int, list[Audio]] = {}
    for event in caller.sequenced:
        if isinstance(event.body, Audio):
            heard.setdefault(event.body.turn, []).append(event.body)
    made: dict[int, bytes] = {}
    for each in fleet.replicas:
        vocoder = each.stages.code2wav
        for feed, pcm in zip(vocoder.fed, vocoder.made, strict=True):
            sound = heard.get(feed.turn)
            if feed.session == caller.session and sound and sound[-1].epoch == feed.epoch:
                made[feed.turn] = pcm if feed.sequence == 0 else made[feed.turn] + pcm
    short = [turn for turn, sound in heard.items() if len(sound) <= FULL_CHUNKS]
    for turn in short:
        assert b"".join(body.pcm_s16le for body in heard[turn]) == made[turn], f"turn {turn}"


@pytest.mark.parametrize("point", ["", "thinker", "talker"], ids=["clean", "redo", "respeak"])
@pytest.mark.parametrize("mode", MODES)
async def test_a_take_up_reads_the_ledger_once(
    fleet: Fleet, mode: Mode, point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = f"once-{mode}-{point or 'clean'}"
    here = await fleet.start()
    await here.open(session, Terms(mode))
    caller = Caller(session)
    await caller.dial(here)
    unit = 8
    await caller.talk(unit)
    while point and not await stand_still(here, caller, point, False, unit + 1):
        unit += 1
    here = await fleet.start()
    load, loads = here.ledger.load, list[str]()

    async def counted(name: str) -> LoadedSession:
        loads.append(name)
        return await load(name)

    monkeypatch.setattr(here.ledger, "load", counted)
    await caller.dial(here)
    await caller.until_unit(unit)
    assert loads == [session]


async def test_a_voice_goes_on_where_it_was_cut(fleet: Fleet) -> None:
    """In the middle of three turns the replica is lost: between two units, before the unit's sound,
    and with it made but not journaled."""
    here = await fleet.start()
    await here.open("seams", Terms("context"))
    caller = Caller("seams")
    await caller.dial(here)
    unit, cut = 0, set[int]()
    for stage in ("", "talker", "code2wav"):
        while not here.registry.live["seams"].speech.turn_open:
            unit += 1
            await caller.talk(unit)
        if stage:
            while not await stand_still(here, caller, stage, bool(cut), unit + 1):
                unit += 1
            unit += 1
        cut.add(here.registry.live["seams"].speech.turn)
        here = await fleet.start()
        await caller.dial(here)
        await caller.talk(unit + 6)
        unit += 6
    check_events(caller)
    epochs: dict[int, set[int]] = {}
    for event in caller.sequenced:
        if isinstance(event.body, Audio):
            epochs.setdefault(event.body.turn, set()).add(event.body.epoch)
    assert [turn for turn in cut if len(epochs[turn]) > 1]
    check_seams(fleet, caller)


@pytest.mark.parametrize("mode", MODES)
async def test_a_death_between_two_units_is_one_rebuild(
    valkey: EmbeddedValkey, fleet: Fleet, mode: Mode
) -> None:
    session, terms = f"between-{mode}", Terms(mode)
    calm, _ = await undisturbed(valkey.url, f"calm-{session}", terms, UNITS)
    here = await fleet.start()
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    for unit in (1, 2, 15, 16, 40, UNITS):
        await caller.talk(unit)
        if unit < UNITS:
            here = await fleet.start()
            await caller.dial(here)
    check_events(caller)
    assert await tokens(here.ledger, session) == calm
    check_prompts([each.stages for each in fleet.replicas], session, terms, calm, caller)
    causes = {unit.unit: unit.rebuild_cause for unit in caller.units}
    for first in (2, 3, 16, 17, 41):
        assert causes[first] == "replica_restart" or (causes[first] == "slide" and mode != "off")
    for second in (4, 18, 42):
        assert causes[second] in ((None,) if mode == "off" else (None, "slide"))


async def test_mode_off_keeps_nothing_after_a_recovery(fleet: Fleet) -> None:
    here = await fleet.start()
    await here.open("bare", Terms("off"))
    caller = Caller("bare")
    await caller.dial(here)
    await caller.talk(8)
    here = await fleet.start()
    await caller.dial(here)
    retained = here.registry.live["bare"].runner._retained
    assert (len(retained), retained.held_bytes) == (0, 0)
    unit = 8
    while not await stand_still(here, caller, "talker", False, unit + 1):
        unit += 1
    here = await fleet.start()
    await caller.dial(here)
    retained = here.registry.live["bare"].runner._retained
    assert (len(retained), retained.held_bytes) == (0, 0)
    assert caller.units[-1].unit == unit


async def test_the_first_unit_is_redone_at_the_rate_it_came_in(
    valkey: EmbeddedValkey, fleet: Fleet
) -> None:
    """Nothing is committed yet: the rate is that of the open unit."""
    calm, _ = await undisturbed(valkey.url, "calm-first", Terms("context"), 5)
    here = await fleet.start()
    await here.open("first", Terms("context"))
    caller = Caller("first")
    await caller.dial(here)
    assert await stand_still(here, caller, "thinker", False, 1)
    here = await fleet.start()
    opened = await caller.dial(here)
    assert (opened.input_rate_hz, opened.next_unit) == (RATE_HZ, 2)
    await caller.talk(5)
    check_events(caller)
    assert caller.failures == []
    assert await tokens(here.ledger, "first") == calm


async def test_an_owner_wrongly_declared_dead_says_nothing_more(
    valkey: EmbeddedValkey, fleet: Fleet
) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-zombie", Terms("context"), 20)
    zombie = await fleet.start()
    await zombie.open("zombie", Terms("context"))
    caller = Caller("zombie")
    await caller.dial(zombie)
    await caller.talk(9)
    pause = zombie.stages.thinker.pause(10)
    await caller.say(10)
    await pause.reached.wait()
    old = caller.attachment
    assert old is not None
    here = await fleet.start()
    await caller.dial(here)
    await caller.until_unit(10)
    pause.go.set()
    seen: list[Event] = []
    while (event := await old.next_event()) is not None:
        seen.append(event)
    assert seen == [
        InputAccepted(10, 9 * RATE_HZ, 10 * RATE_HZ),
        Closed(ErrorCode.LEASE_LOST, "another replica runs the session"),
    ]
    await eventually(lambda: not zombie.registry.live)
    assert zombie.stages.held() == []
    await caller.talk(20)
    check_events(caller)
    assert await tokens(here.ledger, "zombie") == calm
    with pytest.raises(ClientError) as error:
        await old.submit(Heartbeat())
    assert error.value.code is ErrorCode.LEASE_LOST


async def test_a_replica_takes_its_own_session_again(valkey: EmbeddedValkey) -> None:
    """The same stages, which may still hold what the lost owner left in them."""
    calm, _ = await undisturbed(valkey.url, "calm-again", Terms("context"), UNITS)
    async with replica(valkey.url, "first") as first:
        await first.open("again", Terms("context"))
        caller = Caller("again")
        await caller.dial(first)
        await caller.talk(20)
        unit = 20
        while not await stand_still(first, caller, "code2wav", True, unit + 1):
            unit += 1
        async with replica(valkey.url, "second", stages=first.stages) as second:
            second.registry.declare_dead("first")
            await caller.dial(second)
            await caller.talk(UNITS)
            check_events(caller)
            assert await tokens(second.ledger, "again") == calm
            check_prompts([second.stages], "again", Terms("context"), calm, caller)


async def test_an_orderly_shutdown_lets_go_at_once(valkey: EmbeddedValkey) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-drain", Terms("basic"), 30)
    caller = Caller("drain")
    async with replica(valkey.url, "leaves") as leaves:
        await leaves.open("drain", Terms("basic"))
        await caller.dial(leaves)
        await caller.talk(12)
        assert await stand_still(leaves, caller, "thinker", True, 13)
        await leaves.registry.close()
        assert (leaves.registry.free_slots, leaves.stages.held()) == (4, [])
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.LEASE_LOST
        with pytest.raises(ClientError) as error:
            await leaves.registry.attach("drain", TOKEN, None)
        assert error.value.code is ErrorCode.NOT_READY
    async with replica(valkey.url, "comes") as comes:
        # Nobody was declared dead: the lease was given back.
        async with asyncio.timeout(PATIENCE_S):
            await caller.dial(comes)
        await caller.talk(30)
        check_events(caller)
        assert await tokens(comes.ledger, "drain") == calm


async def test_a_lease_that_nobody_proves_lost_runs_out(
    fleet: Fleet, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases_run_out(monkeypatch)
    here = await fleet.start()
    await here.open("expires", Terms("context"))
    caller = Caller("expires")
    await caller.dial(here)
    await caller.talk(3)
    # As after a SIGKILL: nobody renews.
    await here.registry.live["expires"]._keeper.stop()
    async with replica(valkey.url, "heir") as heir:
        await caller.dial(heir)
        await caller.talk(5)
        check_events(caller)


async def test_a_unit_that_was_tried_often_enough_ends_the_session(fleet: Fleet) -> None:
    here = await fleet.start()
    await here.open("cursed", Terms("context"))
    caller = Caller("cursed")
    await caller.dial(here)
    await caller.talk(4)
    assert await stand_still(here, caller, "thinker", False, 5)
    # The successor recovers and gets stuck in the same unit.
    here = await fleet.start()
    pause = here.stages.thinker.pause(5)
    await here.registry.attach("cursed", TOKEN, caller.last_sequence)
    await pause.reached.wait()
    here = await fleet.start()
    with pytest.raises(ClientError) as error:
        await here.registry.attach("cursed", TOKEN, caller.last_sequence)
    assert error.value.code is ErrorCode.UNIT_FAILED
    assert here.registry.free_slots == 4
    with pytest.raises(ClientError) as error:
        await here.registry.attach("cursed", TOKEN, caller.last_sequence)
    assert error.value.code is ErrorCode.SESSION_ENDED


async def test_a_committed_unit_that_is_never_spoken_ends_the_session(fleet: Fleet) -> None:
    """What is counted before each try lies in the ledger: no number of replicas tries it more often
    than twice."""
    here = await fleet.start()
    await here.open("mute", Terms("context"))
    caller = Caller("mute")
    await caller.dial(here)
    await caller.talk(4)
    unit = 5
    while not await stand_still(here, caller, "talker", False, unit):
        unit += 1
    for _ in range(2):
        here = await fleet.start()
        pause = here.stages.thinker.pause(unit)
        await here.registry.attach("mute", TOKEN, caller.last_sequence)
        await pause.reached.wait()
    here = await fleet.start()
    attachment = await here.registry.attach("mute", TOKEN, caller.last_sequence)
    closed = await attachment.next_event()
    while not isinstance(closed, Closed):
        closed = await attachment.next_event()
    assert closed.code is ErrorCode.UNIT_FAILED
    assert f"unit {unit}" in closed.detail
    assert here.stages.thinker.submissions == []


async def test_a_redo_takes_no_other_session_with_it(valkey: EmbeddedValkey) -> None:
    """Two units were in the engine when it died; the one that is at fault kills it again, alone."""
    calm, _ = await undisturbed(valkey.url, "calm-innocent", Terms("basic"), 12, voice=3)
    async with replica(valkey.url, "crowded") as here:
        guilty, innocent = Caller("guilty"), Caller("innocent", voice=3)
        thinker = here.stages.thinker
        await here.open("guilty", Terms("context"))
        await here.open("innocent", Terms("basic"))
        await guilty.dial(here)
        await innocent.dial(here)
        await guilty.talk(9)
        await innocent.talk(10)
        both = [thinker.pause(11), thinker.pause(10)]
        await innocent.say(11)
        await guilty.say(10)
        for pause in both:
            await pause.reached.wait()
        thinker.fail(10, StageFault.GONE, times=2)
        guilty_again, innocent_again = thinker.pause(10), thinker.pause(11)
        both[1].go.set()
        await guilty_again.reached.wait()
        both[0].go.set()
        await innocent.attachment_takes_mail()
        assert not innocent_again.reached.is_set()
        guilty_again.go.set()
        closed = await guilty.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
        assert closed.code is ErrorCode.UNIT_FAILED
        innocent_again.go.set()
        await innocent.talk(12)
        assert (thinker.deaths, (await here.ledger.load("innocent")).meta.phase) == (2, "open")
        assert await tokens(here.ledger, "innocent") == calm


async def test_a_stage_lost_during_the_recovery(valkey: EmbeddedValkey, fleet: Fleet) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-both", Terms("context"), 30)
    for point in ("thinker", "talker"):
        session = f"both-{point}"
        here = await fleet.start()
        await here.open(session, Terms("context"))
        caller = Caller(session)
        await caller.dial(here)
        unit = 10
        await caller.talk(unit)
        while not await stand_still(here, caller, point, False, unit + 1):
            unit += 1
        here = await fleet.start()
        if point == "talker":  # a redo that is lost, too, is the last one
            here.stages.thinker.fail(unit + 1, StageFault.GONE, after=True)
        here.stages.encoder.fail(unit, StageFault.GONE)
        here.stages.encoder.fail(unit + 1, StageFault.GONE)
        here.stages.talker.fail(unit + 1, StageFault.GONE)
        await caller.dial(here)
        await caller.talk(30)
        check_events(caller)
        assert await tokens(here.ledger, session) == calm
        check_prompts(
            [each.stages for each in fleet.replicas], session, Terms("context"), calm, caller
        )


async def test_a_client_waits_for_a_recovery_and_may_leave_during_it(fleet: Fleet) -> None:
    here = await fleet.start()
    await here.open("slow", Terms("context"))
    caller = Caller("slow")
    await caller.dial(here)
    await caller.talk(6)
    assert await stand_still(here, caller, "thinker", False, 7)
    here = await fleet.start()
    pause = here.stages.thinker.pause(7)
    impatient = await here.registry.attach("slow", TOKEN, caller.last_sequence)
    await pause.reached.wait()
    actor = here.registry.live["slow"]
    assert actor.phase is Phase.OPENING
    await impatient.detach()
    dialing = asyncio.create_task(caller.dial(here))
    await asyncio.sleep(0.02)
    assert not dialing.done()
    pause.go.set()
    opened = await dialing
    assert (opened.next_unit, opened.acknowledged_sample) == (8, 7 * RATE_HZ)
    await caller.talk(9)
    check_events(caller)


async def test_ending_during_a_recovery(fleet: Fleet) -> None:
    here = await fleet.start()
    await here.open("cut", Terms("context"))
    caller = Caller("cut")
    await caller.dial(here)
    await caller.talk(6)
    assert await stand_still(here, caller, "thinker", False, 7)
    here = await fleet.start()
    pause = here.stages.thinker.pause(7)
    waiting = await here.registry.attach("cut", TOKEN, caller.last_sequence)
    await pause.reached.wait()
    async with asyncio.timeout(PATIENCE_S):
        assert await here.registry.end("cut")
    closed = await waiting.next_event()
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.SESSION_ENDED
    assert (await here.ledger.reader.meta("cut")).reason == ErrorCode.SESSION_ENDED  # type: ignore[union-attr]
    assert (here.registry.free_slots, here.stages.held()) == (4, [])


async def test_a_lost_owner_cannot_write(fleet: Fleet) -> None:
    """What the tests above stand on: the fence."""
    here = await fleet.start()
    await here.open("fence", Terms("context"))
    caller = Caller("fence")
    await caller.dial(here)
    await caller.talk(2)
    lost = here.registry.live["fence"]._durable
    successor = await fleet.start()
    await caller.dial(successor)
    with pytest.raises(LeaseLost):
        await lost.redo(2, 1, "engine_restart")
    assert len(await committed(successor.ledger, "fence")) == 2


async def test_a_session_grows_old_wherever_it_runs(valkey: EmbeddedValkey) -> None:
    later = 5 * 3600.0
    async with replica(valkey.url, "young") as young:
        await young.open("ages", Terms("context"))
        caller = Caller("ages")
        await caller.dial(young)
        await caller.talk(2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly, "time", FutureTime(later))
        async with replica(valkey.url, "old") as old:
            await old.registry.attach("ages", TOKEN, caller.last_sequence)
            await eventually(lambda: not old.registry.live)
            meta = await old.ledger.reader.meta("ages")
            assert meta is not None
            assert meta.reason == ErrorCode.SESSION_EXPIRED


class FutureTime:
    """`time`, so many seconds later."""

    def __init__(self, later_s: float) -> None:
        self._later_s = later_s

    def time(self) -> float:
        return time.time() + self._later_s
