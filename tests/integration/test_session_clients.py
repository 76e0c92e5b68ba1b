"""Clients that come, go, are replaced, do not read, give up; and what they are told."""

import asyncio
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from support.ledgers import assert_input_is_whole, committed_units
from support.patience import PATIENCE_S

from duplex_api.manifest import load_manifest
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.errors import LeaseHeld, LedgerFull
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.commands import (
    AppendInput,
    AudioEncoding,
    Close,
    Heartbeat,
    SetInputFormat,
)
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import (
    Alive,
    Closed,
    InputAccepted,
    InputFormatSet,
    Sequenced,
    SessionOpened,
)
from duplex_sidecar.session import outbox
from duplex_sidecar.session.ending import Ending, parked
from duplex_sidecar.session.mailbox import MAILBOX_COMMANDS
from duplex_sidecar.session.opening import UnservedManifestError
from duplex_sidecar.session.parking import ParkReason
from duplex_sidecar.session.port import Attachment

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODEL,
    RATE_HZ,
    TOKEN,
    Caller,
    Replica,
    Terms,
    check_events,
    claim,
    eventually,
    frames_of,
    png,
    replica,
    second,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.integration
SLOTS = 4


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s

    def advance(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def here(valkey: EmbeddedValkey, clock: Clock) -> AsyncIterator[Replica]:
    async with replica(valkey.url, clock_s=clock, slots=SLOTS) as here:
        yield here


async def called(here: Replica, session: str, terms: Terms | None = None) -> Caller:
    await here.open(session, terms or Terms("context"))
    caller = Caller(session)
    await caller.dial(here)
    return caller


# --- coming and going -----------------------------------------------------------------------------


async def test_a_client_that_comes_back_in_time_misses_nothing(
    valkey: EmbeddedValkey, here: Replica, clock: Clock
) -> None:
    calm, calm_call = await undisturbed(valkey.url, "calm-back", Terms("context"), 40)
    caller = await called(here, "back")
    for unit in range(4, 41, 4):
        await caller.say(unit)
        await caller.until_unit(unit - 2)
        await caller.hang_up()
        clock.advance(25)
        opened = await caller.dial(here)
        assert opened.resumed
        assert opened.attachment == len(caller.openings)
        assert opened.received_sample == unit * RATE_HZ, "held here"
        assert (unit - 2) * RATE_HZ <= opened.acknowledged_sample <= opened.received_sample
    await caller.until_unit(40)
    check_events(caller)
    assert await tokens(here.ledger, "back") == calm
    assert bodies(caller) == bodies(calm_call)


def bodies(caller: Caller) -> list[object]:
    """Everything but what measures time or names a replica."""
    return [event.body for event in caller.sequenced if not hasattr(event.body, "wall_ms")]


async def test_a_client_that_stays_away_parks_the_session(here: Replica, clock: Clock) -> None:
    caller = await called(here, "away")
    await caller.talk(3)
    await caller.hang_up()
    actor = here.registry.live["away"]
    assert not actor.attached
    clock.advance(29)
    await asyncio.sleep(0.3)
    assert actor.ending is None
    clock.advance(2)
    await eventually(lambda: not here.registry.live)
    assert actor.ending == parked(ParkReason.DISCONNECT_GRACE)
    assert (here.registry.free_slots, here.stages.held()) == (SLOTS, [])
    assert await here.ledger.phase("away") is Phase.PARKED
    assert (await caller.dial(here)).next_unit == 4


async def test_a_session_that_nobody_ever_dials_parks_too(here: Replica, clock: Clock) -> None:
    await here.open("unwanted", Terms("off"))
    clock.advance(31)
    await eventually(lambda: not here.registry.live)
    meta = await here.ledger.reader.meta("unwanted")
    assert meta is not None
    assert (meta.phase, meta.nonce) == ("parked", "")


async def test_a_client_that_says_nothing_is_told_so(here: Replica, clock: Clock) -> None:
    caller = await called(here, "silent", Terms("context", idle="1m"))
    await caller.talk(1)
    clock.advance(61)
    failure = await caller.until_failure()
    assert failure.code is ErrorCode.SESSION_EXPIRED
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert closed == Closed(ErrorCode.SESSION_EXPIRED, "no input within idleTimeout")
    assert caller.attachment is not None
    assert await caller.attachment.next_event() is None


async def test_nothing_sent_over_and_over_is_no_input(here: Replica, clock: Clock) -> None:
    caller = await called(here, "empty", Terms("context", idle="1m"))
    await caller.talk(1)
    for _ in range(3):
        clock.advance(25)
        assert caller.attachment is not None
        await caller.attachment.submit(AppendInput(b""))
        await caller.attachment_takes_mail()
    failure = await caller.until_failure()
    assert failure.code is ErrorCode.SESSION_EXPIRED


async def test_the_longest_life_of_a_session(here: Replica, clock: Clock) -> None:
    caller = await called(here, "old", Terms("context", park_after="1h"))
    for unit in range(1, 10):
        await caller.talk(unit)
        clock.advance(29 * 60)
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert closed == Closed(ErrorCode.SESSION_EXPIRED, "the session reached its maxDuration")


async def test_a_newer_client_replaces_the_one_before(here: Replica) -> None:
    older = await called(here, "taken")
    await older.talk(3)
    newer = Caller("taken")
    await newer.dial(here)
    assert older.attachment is not None
    assert newer.attachment is not None
    for _ in range(2):
        with pytest.raises(ClientError) as error:
            await older.attachment.next_event()
        assert error.value.code is ErrorCode.SESSION_TAKEN_OVER
    with pytest.raises(ClientError) as error:
        await older.attachment.submit(Heartbeat())
    assert error.value.code is ErrorCode.SESSION_TAKEN_OVER
    # The old one's farewell does not concern the new one.
    await older.attachment.detach()
    actor = here.registry.live["taken"]
    assert actor.attached
    await newer.talk(5)
    assert [unit.unit for unit in newer.units] == [4, 5], "none of the old events was asked for"


async def test_many_clients_at_once_leave_exactly_one(here: Replica) -> None:
    first = await called(here, "crowd")
    await first.talk(5)
    attachments = await asyncio.gather(
        *(here.registry.attach("crowd", TOKEN, 0) for _ in range(20))
    )
    for attachment in attachments[:-1]:
        with pytest.raises(ClientError) as error:
            await read_on(attachment)
        assert error.value.code is ErrorCode.SESSION_TAKEN_OVER
    opened = await attachments[-1].next_event()
    assert isinstance(opened, SessionOpened)
    replayed = [await attachments[-1].next_event() for _ in range(len(first.sequenced))]
    assert replayed == first.sequenced


async def read_on(attachment: Attachment) -> None:
    while await attachment.next_event() is not None:
        pass


async def test_a_client_that_does_not_read_loses_its_connection_alone(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING_EVENTS", 20)
    caller = await called(here, "lazy")
    await caller.say(25)
    await eventually(lambda: here.registry.live["lazy"].conversation.seq == 25)
    assert caller.attachment is not None
    with pytest.raises(ClientError) as error:
        await caller.attachment.next_event()
    assert error.value.code is ErrorCode.SLOW_CONSUMER
    await caller.hang_up()
    monkeypatch.undo()
    await caller.dial(here)
    await caller.talk(30)
    check_events(caller)


# --- closing --------------------------------------------------------------------------------------


async def test_close_lets_the_unit_under_way_end(here: Replica) -> None:
    caller = await called(here, "polite")
    pause = here.stages.thinker.pause(3)
    await caller.say(4)
    await pause.reached.wait()
    assert caller.attachment is not None
    await caller.attachment.submit(Close())
    await caller.attachment.submit(AppendInput(second(5)))
    failure = await caller.until_failure()
    assert failure.code is ErrorCode.OUT_OF_ORDER_EVENT
    assert here.registry.live["polite"].ending is None
    pause.go.set()
    await caller.until_unit(4)
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.SESSION_ENDED
    loaded = await here.ledger.load("polite")
    assert (loaded.head.committed_seq, loaded.closed is not None) == (4, True)


async def test_a_client_is_told_to_keep_what_is_only_in_memory(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    caller = await called(here, "keeps")
    pause = here.stages.thinker.pause(3, after=False)
    await caller.say(5)
    await pause.reached.wait()
    await caller.hang_up()
    opened = await caller.dial(here)
    assert (opened.acknowledged_sample, opened.received_sample) == (3 * RATE_HZ, 5 * RATE_HZ)
    await caller.say(6)  # from the acknowledged position, so the fourth and fifth come again
    pause.go.set()
    await caller.until_unit(6)
    assert_input_is_whole(await committed_units(valkey.url, "keeps"))


@pytest.mark.parametrize("stage", ["encoder", "thinker", "talker", "code2wav"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_ending_from_outside_waits_for_no_stage(
    here: Replica, stage: str, after: bool
) -> None:
    session = f"ends-{stage}-{after}"
    caller = await called(here, session)
    unit = 0
    while True:
        unit += 1
        pause = getattr(here.stages, stage).pause(unit, after=after)
        await caller.say(unit)
        reached = asyncio.create_task(pause.reached.wait())
        done = asyncio.create_task(caller.until_unit(unit))
        await asyncio.wait({reached, done}, return_when=asyncio.FIRST_COMPLETED)
        for task in (reached, done):
            task.cancel()
        await asyncio.gather(reached, done, return_exceptions=True)
        if pause.reached.is_set():
            break
    async with asyncio.timeout(PATIENCE_S):
        assert await here.registry.end(session)
    assert (here.registry.free_slots, here.stages.held()) == (SLOTS, [])
    meta = await here.ledger.reader.meta(session)
    assert meta is not None
    assert (meta.phase, meta.nonce) == ("ended", "")
    assert not await here.registry.end(session)


async def test_commands_after_the_end_never_hang(here: Replica) -> None:
    caller = await called(here, "over")
    await caller.talk(1)
    actor = here.registry.live["over"]
    await caller.close()
    assert caller.attachment is not None
    async with asyncio.timeout(PATIENCE_S):
        for command in (Heartbeat(), AppendInput(second(2)), Close()):
            with pytest.raises(ClientError) as error:
                await caller.attachment.submit(command)
            assert error.value.code is ErrorCode.SESSION_ENDED
        assert await caller.attachment.next_event() is None
        await caller.attachment.detach()
        await actor.end(Ending(ErrorCode.SESSION_ENDED, "again"))
        with pytest.raises(ClientError):
            actor.attach(None)


async def test_submitters_that_wait_for_room_are_let_go_at_the_end(here: Replica) -> None:
    caller = await called(here, "full")
    attachment = caller.attachment
    assert attachment is not None
    actor = here.registry.live["full"]
    # The loop is busy with nothing and gets no turn until the mailbox is full.
    for _ in range(MAILBOX_COMMANDS):
        await attachment.submit(Heartbeat())
    waiting = [asyncio.create_task(attachment.submit(Heartbeat(str(k)))) for k in range(5)]
    ending = asyncio.create_task(actor.end(Ending(ErrorCode.SESSION_ENDED, "now")))
    async with asyncio.timeout(PATIENCE_S):
        outcomes = await asyncio.gather(*waiting, return_exceptions=True)
        await ending
    assert all(outcome is None or isinstance(outcome, ClientError) for outcome in outcomes)


async def test_a_full_mailbox_makes_the_sender_wait_and_loses_nothing(here: Replica) -> None:
    caller = await called(here, "busy")
    attachment = caller.attachment
    assert attachment is not None
    sent = 5 * MAILBOX_COMMANDS

    async def send() -> None:
        for number in range(sent):
            await attachment.submit(Heartbeat(str(number)))

    sending = asyncio.create_task(send())
    answers = [await caller.until(lambda event: isinstance(event, Alive)) for _ in range(sent)]
    await sending
    assert answers == [Alive(str(number)) for number in range(sent)]


# --- who may, and whether there is room -----------------------------------------------------------


async def test_a_wrong_token_and_an_unknown_session_look_the_same(here: Replica) -> None:
    await called(here, "secret")
    for session, token in (("secret", "wrong"), ("nobody", TOKEN), ("secret", ""), ("", TOKEN)):
        with pytest.raises(ClientError) as error:
            await here.registry.attach(session, token, None)
        assert error.value.code is ErrorCode.SESSION_NOT_FOUND
    await here.registry.end("secret")
    with pytest.raises(ClientError) as error:
        await here.registry.attach("secret", "wrong", None)
    assert error.value.code is ErrorCode.SESSION_NOT_FOUND, "also when it is in the ledger alone"
    assert here.registry.free_slots == SLOTS


async def test_opening_twice_is_opening_once(here: Replica) -> None:
    terms = Terms("context")
    first = await here.registry.open("same", terms.manifest(), claim())
    assert await here.registry.open("same", terms.manifest(), claim()) is first
    both = await asyncio.gather(
        *(here.registry.open("together", terms.manifest(), claim()) for _ in range(5))
    )
    assert all(actor is both[0] for actor in both)
    assert here.registry.free_slots == SLOTS - 2
    with pytest.raises(ClientError) as error:
        await here.registry.open("same", terms.manifest(), claim("other"))
    assert error.value.code is ErrorCode.UNAUTHORIZED
    with pytest.raises(ClientError) as error:
        await here.registry.open("x" * 5000, terms.manifest(), claim())
    assert error.value.code is ErrorCode.INVALID_EVENT


async def test_no_slot_is_said_at_once(valkey: EmbeddedValkey, here: Replica) -> None:
    for number in range(SLOTS):
        await here.open(f"slot-{number}", Terms("context"))
    assert here.registry.free_slots == 0
    async with replica(valkey.url, "other") as other:
        await other.open("elsewhere", Terms("context"))
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ClientError) as error:
            await here.open("one-more", Terms("context"))
        assert error.value.code is ErrorCode.RESOURCE_EXHAUSTED
        with pytest.raises(ClientError) as error:
            await here.registry.attach("elsewhere", TOKEN, None)
        assert error.value.code is ErrorCode.RESOURCE_EXHAUSTED
        # Who has no right to it learns nothing of the slots.
        with pytest.raises(ClientError) as error:
            await here.registry.attach("elsewhere", "wrong", None)
        assert error.value.code is ErrorCode.SESSION_NOT_FOUND
    await here.registry.end("slot-0")
    await here.registry.attach("elsewhere", TOKEN, None)
    assert here.registry.free_slots == 0


async def test_what_cannot_be_served_is_refused_before_a_slot_is_taken(here: Replica) -> None:
    manifest = Terms("context").manifest()
    voice = load_manifest(
        "apiVersion: duplex.dev/v1alpha1\nkind: DuplexSession\nmetadata: {name: x}\n"
        "spec: {poolRef: {name: x}, voice: {name: nobody}}\n"
    )
    with pytest.raises(UnservedManifestError):
        await here.registry.open("voice", voice, claim())
    assert here.registry.free_slots == SLOTS
    assert await here.ledger.reader.meta("voice") is None
    here.ledger.create = refusing(LedgerFull("memory", "no room"))  # type: ignore[method-assign]
    with pytest.raises(ClientError) as error:
        await here.registry.open("memory", manifest, claim())
    assert error.value.code is ErrorCode.RESOURCE_EXHAUSTED
    assert here.registry.free_slots == SLOTS


def refusing(error: Exception) -> Callable[..., Awaitable[Any]]:
    async def refuse(*_: object, **__: object) -> None:
        raise error

    return refuse


async def test_a_session_of_another_checkpoint_stays_where_it_is(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    caller = await called(here, "foreign")
    await caller.talk(2)
    await here.registry.close()
    async with replica(valkey.url, "b", model=replace(MODEL, fingerprint="another")) as other:
        for _ in range(2):
            with pytest.raises(ClientError) as error:
                await other.registry.attach("foreign", TOKEN, None)
            assert error.value.code is ErrorCode.LEDGER_CORRUPT
        assert other.registry.free_slots == SLOTS
    async with replica(valkey.url, "c") as right:
        await caller.dial(right)
        await caller.talk(3)


# --- what is sent ---------------------------------------------------------------------------------


async def test_what_cannot_be_understood_is_refused_by_name(here: Replica) -> None:
    caller = await called(here, "wrong")
    attachment = caller.attachment
    assert attachment is not None
    await caller.talk(1)
    cases = [
        (AppendInput(b"\0"), ErrorCode.INVALID_AUDIO),
        (AppendInput(second(2), from_sample=RATE_HZ + 1), ErrorCode.OUT_OF_ORDER_EVENT),
        (AppendInput(second(2), frames=(png(96, 1),)), ErrorCode.TOO_MANY_FRAMES),
        (SetInputFormat(AudioEncoding.PCM16, 24_000), ErrorCode.IMMUTABLE_SETTING),
    ]
    for number, (command, code) in enumerate(cases):
        command = type(command)(**{**fields(command), "event_id": str(number)})
        await attachment.submit(command)
        failure = await caller.until_failure()
        assert (failure.code, failure.event_id) == (code, str(number))
    await caller.talk(3)
    check_events(caller)


def fields(command: Any) -> dict[str, Any]:
    return {name: getattr(command, name) for name in command.__struct_fields__}


async def test_frames_are_checked_before_they_count(here: Replica) -> None:
    caller = await called(here, "frames", with_camera(Terms("context")))
    attachment = caller.attachment
    assert attachment is not None
    for frames, code in (
        ((b"GIF89a",), ErrorCode.INVALID_FRAME),
        ((png(96, 1)[:20],), ErrorCode.INVALID_FRAME),
        ((png(96, 1) + bytes(5 * 1024 * 1024),), ErrorCode.FRAME_TOO_LARGE),
        ((png(96, 1), png(96, 2), png(96, 3)), ErrorCode.TOO_MANY_FRAMES),
    ):
        await attachment.submit(AppendInput(second(1), frames=frames))
        assert (await caller.until_failure()).code is code
    await caller.talk(2)
    assert caller.accepted[0].from_sample == 0, "nothing of a refused append was kept"


async def test_the_format_is_set_before_the_first_input(here: Replica) -> None:
    await here.open("format", Terms("context"))
    attachment = await here.registry.attach("format", TOKEN, None)
    opened = await attachment.next_event()
    assert isinstance(opened, SessionOpened)
    assert opened.input_rate_hz == 24_000
    await attachment.submit(SetInputFormat(AudioEncoding.FLOAT32, 48_000))
    assert await attachment.next_event() == InputFormatSet(AudioEncoding.FLOAT32, 48_000)
    await attachment.submit(SetInputFormat(AudioEncoding.FLOAT32, 1_000))
    failure = await attachment.next_event()
    assert failure is not None
    assert getattr(failure, "code", None) is ErrorCode.INVALID_SAMPLE_RATE
    await attachment.submit(AppendInput(bytes(4 * 48_000)))
    await attachment.submit(SetInputFormat(AudioEncoding.G711_ULAW, 48_000))
    assert await attachment.next_event() == InputFormatSet(AudioEncoding.G711_ULAW, 48_000)
    again = await here.registry.attach("format", TOKEN, None)
    opened = await again.next_event()
    assert isinstance(opened, SessionOpened)
    assert opened.input_rate_hz == 48_000
    await again.submit(AppendInput(b"\0\0\0", event_id="odd"))  # good mu-law
    failure = await again.next_event()
    while isinstance(failure, InputAccepted | Sequenced):
        failure = await again.next_event()
    assert getattr(failure, "code", None) is ErrorCode.INVALID_AUDIO


async def test_input_sent_again_counts_once_frames_included(
    valkey: EmbeddedValkey, here: Replica
) -> None:
    """From half a second before what is held, as a client does that slices its input anew."""
    terms = with_camera(Terms("context"))
    calm, _ = await undisturbed(valkey.url, "calm-resent", terms, 12, frames=frames_of)
    await here.open("resent", terms)
    caller = Caller("resent", frames=frames_of)
    await caller.dial(here)
    for unit in range(1, 13):
        await caller.talk(unit)
        assert caller.attachment is not None
        begin = RATE_HZ * unit - RATE_HZ // 2
        await caller.attachment.submit(
            AppendInput(second(unit)[RATE_HZ:], frames=(png(96, 250),), from_sample=begin)
        )
        await caller.attachment_takes_mail()
    assert caller.failures == []
    assert await tokens(here.ledger, "resent") == calm


# --- giving up ------------------------------------------------------------------------------------


def stall(target: object, name: str, *, after: bool) -> asyncio.Event:
    """The next call of that method never returns, before or after its work."""
    call: Callable[..., Awaitable[Any]] = getattr(target, name)
    reached = asyncio.Event()

    async def stalled(*args: Any, **kwargs: Any) -> Any:
        setattr(target, name, call)
        if after:
            await call(*args, **kwargs)
        reached.set()
        await asyncio.Event().wait()

    setattr(target, name, stalled)
    return reached


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["create", "acquire"])
async def test_an_opening_given_up_anywhere_leaves_its_slot_free(
    here: Replica, call: str, after: bool
) -> None:
    session = f"given-up-{call}-{after}"
    reached = stall(here.ledger, call, after=after)
    opening = asyncio.create_task(here.open(session, Terms("context")))
    waiting = asyncio.create_task(here.open(session, Terms("context")))
    await reached.wait()
    assert here.registry.free_slots == SLOTS - 1
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    # The one that waited for it goes on, and finds what the first one left behind.
    async with asyncio.timeout(PATIENCE_S):
        await waiting
    assert here.registry.free_slots == SLOTS - 1
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(2)
    await here.registry.end(session)
    assert here.registry.free_slots == SLOTS
    assert here.registry._turnstile._doors == {}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", ["meta", "acquire", "load"])
async def test_an_attach_given_up_anywhere_leaves_its_slot_free(
    valkey: EmbeddedValkey, here: Replica, call: str, after: bool
) -> None:
    session = f"left-{call}-{after}"
    async with replica(valkey.url, "before") as before:
        caller = Caller(session)
        await before.open(session, Terms("context"))
        await caller.dial(before)
        await caller.talk(3)
    target = here.ledger.reader if call == "meta" else here.ledger
    reached = stall(target, call, after=after)
    attaching = asyncio.create_task(here.registry.attach(session, TOKEN, 0))
    await reached.wait()
    attaching.cancel()
    await asyncio.gather(attaching, return_exceptions=True)
    assert here.registry.free_slots == SLOTS
    assert here.registry._turnstile._doors == {}
    async with asyncio.timeout(PATIENCE_S):
        await caller.dial(here)
    await caller.talk(5)
    check_events(caller)


async def test_a_caller_that_gives_up_waiting_for_another_one(here: Replica) -> None:
    reached = stall(here.ledger, "create", after=False)
    first = asyncio.create_task(here.open("queue", Terms("context")))
    second_one = asyncio.create_task(here.open("queue", Terms("context")))
    await reached.wait()
    second_one.cancel()
    await asyncio.gather(second_one, return_exceptions=True)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    assert (here.registry.free_slots, here.registry._turnstile._doors) == (SLOTS, {})
    await here.open("queue", Terms("context"))


async def test_a_shutdown_given_up_still_lets_go(valkey: EmbeddedValkey) -> None:
    async with replica(valkey.url, "impatient") as here:
        caller = await called(here, "impatient")
        await caller.talk(2)
        reached = stall(here.ledger, "release", after=False)
        closing = asyncio.create_task(here.registry.close())
        await reached.wait()
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        await eventually(lambda: not here.registry.live)
        assert (here.registry.free_slots, here.stages.held()) == (SLOTS, [])
        closed = await caller.until(lambda event: isinstance(event, Closed))
        assert isinstance(closed, Closed)
    async with replica(valkey.url, "next") as following:
        async with asyncio.timeout(PATIENCE_S):
            await caller.dial(following)


async def test_a_session_let_go_before_it_began(valkey: EmbeddedValkey) -> None:
    async with replica(valkey.url, "brief") as here:
        opening = asyncio.create_task(here.open("brief", Terms("context")))
        started = here.registry._arrivals._start
        closing: list[asyncio.Task[None]] = []

        def start_and_close(*args: Any) -> Any:
            actor = started(*args)
            closing.append(asyncio.create_task(here.registry.close()))
            actor.wishes.let_go()
            return actor

        here.registry._arrivals._start = start_and_close  # type: ignore[method-assign]
        await opening
        await closing[0]
        assert here.registry.free_slots == SLOTS
        lease = await here.ledger.acquire("brief", "anybody")
        assert lease.fence == 2
        with pytest.raises(LeaseHeld):
            await here.ledger.acquire("brief", "somebody")


async def test_events_are_not_taken_by_a_reader_that_gave_up(here: Replica) -> None:
    caller = await called(here, "reader")
    assert caller.attachment is not None
    await caller.attachment_takes_mail()
    for unit in range(1, 10):
        reading = asyncio.create_task(caller.attachment.next_event())
        await asyncio.sleep(0)
        await caller.say(unit)
        reading.cancel()
        outcome = (await asyncio.gather(reading, return_exceptions=True))[0]
        if isinstance(outcome, Sequenced):
            caller.sequenced.append(outcome)
        await caller.until_unit(unit)
    check_events(caller)
