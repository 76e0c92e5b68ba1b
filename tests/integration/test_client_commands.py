"""Commands of a client that change what was said: the reply stops, what was not heard is taken out
of the context, and each numbered command counts once, wherever the session runs."""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duplex_sidecar.ledger.call import Head
from duplex_sidecar.ledger.client_calls import Cut
from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.lease import Lease
from duplex_sidecar.ledger.records import Cancelled, Truncated
from duplex_sidecar.protocol.commands import (
    AcknowledgePlayback,
    AudioEncoding,
    CancelReply,
    Heartbeat,
    SetInputFormat,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    Alive,
    Audio,
    Closed,
    CommandApplied,
    Decision,
    Failure,
    InputAccepted,
    InputFormatSet,
    PlaybackAcknowledged,
    ResyncRequired,
    Sequenced,
    SessionOpened,
    TurnMark,
    TurnTruncated,
    UnitDone,
)
from duplex_sidecar.session.client_commands import (
    MAX_TRUNCATIONS,
    MAX_WAITING_COMMANDS,
    CommandDesk,
)
from duplex_sidecar.session.conversation import Conversation, Speech
from duplex_sidecar.session.handing_over import HandOver
from duplex_sidecar.stages.envelope import ThinkerAnswer, ThinkerFeed
from duplex_sidecar.telemetry.metrics import Metrics
from duplex_sidecar.telemetry.names import EpochCause, RebuildCause

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    RATE_HZ,
    TOKEN,
    VOCABULARY,
    Caller,
    Cuts,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    claim,
    eventually,
    replica,
    tokens,
)

pytestmark = pytest.mark.integration

LISTENS = (VOCABULARY.listen,)


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here") as started:
        yield started


@pytest.fixture
async def there(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "there") as started:
        yield started


def turn_is_open(caller: Caller) -> bool:
    marks = [event.body for event in caller.sequenced if isinstance(event.body, TurnMark)]
    return bool(marks) and marks[-1].step not in CLOSING_STEPS


def sounds(caller: Caller) -> list[Audio]:
    """Of the newest turn."""
    heard = [event.body for event in caller.sequenced if isinstance(event.body, Audio)]
    return sounds_of(caller, heard[-1].turn) if heard else []


def sounds_of(caller: Caller, turn: int) -> list[Audio]:
    heard = [event.body for event in caller.sequenced if isinstance(event.body, Audio)]
    return [audio for audio in heard if audio.turn == turn]


async def in_mid_reply(caller: Caller, *, units: int = 2) -> int:
    """Talk until the model has spoken for so many units and has not finished; the last unit."""
    number = caller.next_second - 1
    while True:
        number += 1
        await caller.talk(number)
        if turn_is_open(caller) and len({audio.unit for audio in sounds(caller)}) >= units:
            return number


def closing(caller: Caller) -> list[TurnMark]:
    marks = [event.body for event in caller.sequenced if isinstance(event.body, TurnMark)]
    return [mark for mark in marks if mark.step in CLOSING_STEPS and mark.cancelled]


@pytest.mark.parametrize("mode", MODES)
async def test_a_reply_stops_between_two_units(here: Replica, mode: Mode) -> None:
    session, terms = f"cancel-{mode}", Terms(mode)
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    last = await in_mid_reply(caller)
    before = sounds(caller)[-1]
    turn = before.turn

    answer = await caller.ask(CancelReply(client_sequence=1, event_id="stop"))
    assert answer == CommandApplied(1, "stop")
    assert [mark.step for mark in closing(caller)] == list(CLOSING_STEPS)
    assert {(mark.turn, mark.unit) for mark in closing(caller)} == {(turn, last)}

    await caller.talk(last + 1)
    assert caller.units[-1].decision is Decision.LISTEN, "the reply is over"
    assert caller.units[-1].rebuild_cause in (None, "slide"), "nothing was taken back"
    await in_mid_reply(caller, units=1)
    heard = [event.body for event in caller.sequenced if isinstance(event.body, Audio)]
    following = heard[heard.index(before) + 1]
    assert (following.turn, following.epoch) == (turn + 1, before.epoch + 1)
    assert following.stage2_sequence == 0
    check_events(caller)
    said = await tokens(here.ledger, session)
    check_prompts([here.stages], session, terms, said, caller)
    check_stage2(here.stages, session)
    loaded = await here.ledger.load(session)
    notes = [entry.record for entry in loaded.entries if isinstance(entry.record, Cancelled)]
    assert [(note.seq, note.turn) for note in notes] == [(last, turn)]


async def test_there_has_to_be_a_reply_to_stop(here: Replica) -> None:
    await here.open("silent", Terms("context"))
    caller = Caller("silent")
    await caller.dial(here)
    await caller.tell(CancelReply(event_id="too early"))
    failure = await caller.until_failure()
    assert (failure.code, failure.event_id) == (
        ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE,
        "too early",
    )
    await in_mid_reply(caller)
    await caller.tell(CancelReply(turn=99))
    assert (await caller.until_failure()).code is ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE
    assert turn_is_open(caller)


@pytest.mark.parametrize("mode", MODES)
async def test_what_was_not_heard_is_taken_out_of_the_context(here: Replica, mode: Mode) -> None:
    """Three units have sounded; the client heard the first and half of the second."""
    session, terms = f"cut-{mode}", Terms(mode)
    await here.open(session, terms)
    caller = Caller(session)
    await caller.dial(here)
    last = await in_mid_reply(caller, units=3)
    parts = sounds(caller)
    second = next(a for a in parts if a.unit != parts[0].unit)
    length = sum(len(a.pcm_s16le) // 2 for a in parts if a.unit == second.unit)
    heard_ms = (second.from_sample + length // 2) // 24
    await caller.tell(CancelReply())
    answer = await caller.ask(TruncateReply(second.turn, heard_ms, client_sequence=1))
    assert isinstance(answer, CommandApplied)
    told = [e.body for e in caller.sequenced if isinstance(e.body, TurnTruncated)]
    assert [(t.turn, t.unit, t.heard_ms) for t in told] == [(second.turn, last, heard_ms)]
    assert told[0].taken_back_tokens > 0

    await caller.talk(last + 12)
    after = caller.units[last]
    assert (after.unit, after.rebuild_cause) == (last + 1, "truncation")
    assert after.decision is Decision.LISTEN
    check_events(caller)
    check_stage2(here.stages, session)
    said = await tokens(here.ledger, session)
    loaded = await here.ledger.load(session)
    (mark,) = [e.record for e in loaded.entries if isinstance(e.record, Truncated)]
    assert (mark.unit, mark.through, mark.ends_turn) == (second.unit, last, False)
    assert 0 < mark.token_index < len(said[second.unit - 1])
    cut: dict[int, tuple[int, ...]] = dict.fromkeys(range(second.unit + 1, last + 1), LISTENS)
    cut[second.unit] = (*said[second.unit - 1][: mark.token_index], VOCABULARY.chunk_eos)
    cuts: Cuts = {last + 1: cut}
    submissions = check_prompts([here.stages], session, terms, said, caller, cuts=cuts)
    rebuilt = next(one for one in submissions if one.unit == last + 1)
    assert rebuilt.opened, "a new stream, never a patched one"
    ahead = {one.stream for one in here.stages.thinker.opened_ahead}
    assert (rebuilt.stream in ahead) == (mode != "off"), "made before its append came"


async def test_a_truncation_stops_a_reply_that_is_under_way(here: Replica) -> None:
    await here.open("stops", Terms("context"))
    caller = Caller("stops")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    turn = sounds(caller)[-1].turn
    await caller.ask(TruncateReply(turn, 0, client_sequence=7))
    assert [mark.step for mark in closing(caller)] == list(CLOSING_STEPS)
    await caller.talk(last + 1)
    assert (caller.units[-1].rebuild_cause, caller.units[-1].decision) == (
        "truncation",
        Decision.LISTEN,
    )
    said = await tokens(here.ledger, "stops")
    cut = dict.fromkeys({audio.unit for audio in sounds(caller)}, LISTENS)
    check_prompts([here.stages], "stops", Terms("context"), said, caller, cuts={last + 1: cut})
    check_events(caller)


async def test_a_reply_that_was_heard_to_the_end_stays(here: Replica) -> None:
    await here.open("whole", Terms("basic"))
    caller = Caller("whole")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    parts = sounds(caller)
    samples = sum(len(part.pcm_s16le) // 2 for part in parts)
    await caller.ask(CancelReply(client_sequence=1))
    await caller.ask(TruncateReply(parts[0].turn, samples // 24 + 1, client_sequence=2))
    told = [e.body for e in caller.sequenced if isinstance(e.body, TurnTruncated)]
    assert [event.taken_back_tokens for event in told] == [0]
    await caller.talk(last + 1)
    assert caller.units[-1].rebuild_cause != "truncation"
    check_prompts(
        [here.stages], "whole", Terms("basic"), await tokens(here.ledger, "whole"), caller
    )


async def test_the_policy_goes_on_from_what_was_heard(here: Replica) -> None:
    """Ids that nobody heard are not penalised, and the user is still owed an answer."""
    await here.open("policy", Terms("off"))
    caller = Caller("policy")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    parts = sounds(caller)
    await caller.ask(TruncateReply(parts[0].turn, 0, client_sequence=1))
    await caller.talk(last + 1)
    loaded = await here.ledger.load("policy")
    unheard = {part.unit for part in parts}
    sampled = [
        id_
        for unit in loaded.committed
        if unit.seq <= last and unit.seq not in unheard
        for id_ in unit.sampled_ids
        if id_ != VOCABULARY.chunk_eos
    ]
    (next_,) = [one for one in here.stages.thinker.submissions if one.unit == last + 1]
    policy = next_.rules.policy
    assert list(policy.penalty_ids) == sampled
    assert (policy.turn_ended, policy.response_open, policy.speech_pending) == (True, False, True)
    assert next_.rules.force_listen


@pytest.mark.parametrize("mode", MODES)
async def test_another_replica_goes_on_from_the_same_records(
    here: Replica, there: Replica, valkey: EmbeddedValkey, mode: Mode
) -> None:
    """The same conversation, cut at the same place, once in peace and once with an owner that dies
    right behind the cut: the same tokens, the same prompts."""
    terms = Terms(mode)
    said: dict[str, list[tuple[int, ...]]] = {}
    for session, dies in ((f"calm-{mode}", False), (f"taken-over-{mode}", True)):
        await here.open(session, terms)
        caller = Caller(session)
        await caller.dial(here)
        last = await in_mid_reply(caller)
        turn, heard_ms = sounds(caller)[-1].turn, sounds(caller)[-1].from_sample // 48
        truncate = TruncateReply(turn, heard_ms, client_sequence=3)
        await caller.ask(truncate)
        if dies:
            there.registry.declare_dead(here.name)
            opened = await caller.dial(there)
            assert opened.client_sequence == 3
            assert await caller.ask(truncate) == CommandApplied(3, None), "and nothing happens"
        await caller.talk(last + 15)
        check_events(caller)
        cause = caller.units[last].rebuild_cause
        assert cause == "truncation"
        said[session] = await tokens(here.ledger, session)
        loaded = await here.ledger.load(session)
        assert sum(isinstance(entry.record, Truncated) for entry in loaded.entries) == 1
    calm, taken_over = said.values()
    assert calm == taken_over


async def test_a_numbered_command_counts_once(here: Replica) -> None:
    await here.open("once", Terms("context"))
    caller = Caller("once")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    cancel = CancelReply(client_sequence=5, event_id="a")
    assert await caller.ask(cancel) == CommandApplied(5, "a")
    before = await here.ledger.load("once")
    assert await caller.ask(CancelReply(client_sequence=5, event_id="b")) == CommandApplied(5, "b")
    after = await here.ledger.load("once")
    assert after.head == before.head
    assert after.meta.events_last == before.meta.events_last
    turn = sounds(caller)[-1].turn
    for wrong in (TruncateReply(turn, 0, client_sequence=4), TruncateReply(turn, 0, None, 5)):
        failure = await caller.ask(wrong)
        assert isinstance(failure, Failure)
        assert (failure.code, failure.param) == (ErrorCode.OUT_OF_ORDER_EVENT, "client_sequence")
    refused = await caller.ask(CancelReply(client_sequence=6))
    assert isinstance(refused, Failure)
    assert refused.code is ErrorCode.RESPONSE_CANCEL_NOT_ACTIVE
    assert (await here.ledger.load("once")).meta.client.last == 5, "it changed nothing"
    assert await caller.ask(TruncateReply(turn, 0, client_sequence=6)) == CommandApplied(6, None)
    await caller.talk(last + 1)
    assert (await here.ledger.load("once")).meta.client.last == 6


async def test_a_format_is_set_each_time_and_its_number_noted_once(here: Replica) -> None:
    await here.open("format", Terms("context"))
    caller = Caller("format")
    await caller.dial(here)
    update = SetInputFormat(AudioEncoding.PCM16, RATE_HZ, None, 2)
    assert await caller.ask(update) == CommandApplied(2, None)
    await caller.talk(2)
    opened = await caller.dial(here)
    assert opened.client_sequence == 2
    assert await caller.ask(update) == CommandApplied(2, None)
    await caller.talk(3)
    other = await caller.ask(SetInputFormat(AudioEncoding.FLOAT32, RATE_HZ, None, 2))
    assert isinstance(other, Failure)
    assert other.code is ErrorCode.OUT_OF_ORDER_EVENT
    await caller.talk(4)


async def test_a_format_that_waits_for_a_units_end_is_said_again_over_another_connection(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number is not applied yet; the new connection must hear it all the same, for what comes
    behind it is in that format."""
    await here.open("format-waits", Terms("context"))
    caller = Caller("format-waits")
    await caller.dial(here)
    await caller.talk(1)
    goes_on, feed = asyncio.Event(), here.stages.thinker.feed

    async def slow(request: ThinkerFeed) -> ThinkerAnswer:
        await goes_on.wait()
        return await feed(request)

    monkeypatch.setattr(here.stages.thinker, "feed", slow)
    await caller.say(2)
    await caller.until(lambda event: isinstance(event, InputAccepted))
    update = SetInputFormat(AudioEncoding.FLOAT32, RATE_HZ, None, 1)
    for _ in range(2):
        await caller.dial(here)
        assert caller.attachment is not None
        await caller.attachment.submit(update)
        heard = await caller.until(lambda event: isinstance(event, InputFormatSet | Failure))
        while isinstance(heard, InputFormatSet) and heard.encoding is AudioEncoding.PCM16:
            heard = await caller.until(lambda event: isinstance(event, InputFormatSet | Failure))
        assert isinstance(heard, InputFormatSet), heard
    goes_on.set()
    applied = await caller.until(lambda event: isinstance(event, CommandApplied))
    assert applied == CommandApplied(1, None)
    assert (await here.ledger.load("format-waits")).meta.client.last == 1


async def test_who_dials_between_two_commands_is_told_of_the_first_ones_events(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers that a new client counts on from are those that were given, also by commands that
    are carried out together with one that is under way yet."""
    await here.open("between", Terms("context"))
    caller = Caller("between")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    turn = sounds(caller)[-1].turn
    goes_on, feed, cut = asyncio.Event(), here.stages.thinker.feed, here.ledger.cut
    cuts_go_on, cuts_begun = asyncio.Event(), list[int]()

    async def slow(request: ThinkerFeed) -> ThinkerAnswer:
        await goes_on.wait()
        return await feed(request)

    async def slow_cut(lease: Lease, head: Head, what: Cut) -> Head:
        cuts_begun.append(1)
        if len(cuts_begun) == 2:
            await cuts_go_on.wait()
        return await cut(lease, head, what)

    monkeypatch.setattr(here.stages.thinker, "feed", slow)
    monkeypatch.setattr(here.ledger, "cut", slow_cut)
    await caller.say(last + 1)
    await caller.until(lambda event: isinstance(event, InputAccepted))
    assert caller.attachment is not None
    await caller.attachment.submit(TruncateReply(turn, 100, None, 1))
    await caller.attachment.submit(TruncateReply(turn, 0, None, 2))
    await caller.attachment.submit(Heartbeat())
    await caller.until(lambda event: isinstance(event, Alive))
    goes_on.set()
    await eventually(lambda: len(cuts_begun) == 2)
    told = caller.last_sequence
    while told < (await here.ledger.load("between")).meta.events_last:
        event = await caller.next()
        told = event.sequence if isinstance(event, Sequenced) else told
    other = await here.registry.attach("between", TOKEN, None)
    opened = await other.next_event()
    cuts_go_on.set()
    assert isinstance(opened, SessionOpened)
    assert opened.last_sequence == told


async def test_what_is_played_is_known_and_leaves_the_journal(
    here: Replica, there: Replica
) -> None:
    await here.open("played", Terms("context"))
    caller = Caller("played")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    first, *_, newest = sounds(caller)
    done = next(
        event.sequence
        for event in caller.sequenced
        if isinstance(event.body, UnitDone) and event.body.unit == first.unit
    )
    through = len(first.pcm_s16le) // 2
    assert newest.unit > first.unit
    await caller.tell(AcknowledgePlayback(first.turn, through - 1))
    await caller.ask(AcknowledgePlayback(first.turn, through, client_sequence=1))
    acknowledged = [e for e in caller.events if isinstance(e, PlaybackAcknowledged)]
    assert [e.played_samples for e in acknowledged] == [through - 1, through]
    meta = (await here.ledger.load("played")).meta
    assert (meta.played_turn, meta.played_samples) == (first.turn, through)
    heard = next(event.sequence for event in caller.sequenced if event.body is first)
    missed = await here.ledger.events_after("played", heard)
    assert not missed.resync_required, "what comes behind the sound may not have come yet"
    await caller.ask(AcknowledgePlayback(first.turn, through + 1, client_sequence=2))
    meta = (await here.ledger.load("played")).meta
    assert meta.events_first == done + 1
    too_much = await caller.ask(AcknowledgePlayback(first.turn, 10**9, client_sequence=3))
    assert isinstance(too_much, Failure)
    assert too_much.code is ErrorCode.PLAYBACK_ITEM_MISMATCH
    unheard = await caller.ask(TruncateReply(first.turn, 0, client_sequence=3))
    assert isinstance(unheard, Failure)
    assert unheard.code is ErrorCode.PLAYBACK_ITEM_MISMATCH
    unknown = await caller.ask(AcknowledgePlayback(99, 1, client_sequence=4))
    assert isinstance(unknown, Failure)
    assert unknown.code is ErrorCode.PLAYBACK_ITEM_NOT_FOUND

    there.registry.declare_dead(here.name)
    await caller.dial(there)
    await caller.talk(last + 3)
    check_events(caller)
    still = await caller.ask(TruncateReply(first.turn, 0, client_sequence=5))
    assert isinstance(still, Failure), "another replica knows what was played"
    newcomer = Caller("played")
    newcomer.attachment = await there.registry.attach("played", TOKEN, 0)
    resync = await newcomer.until(lambda event: isinstance(event, ResyncRequired))
    assert isinstance(resync, ResyncRequired)
    assert resync.oldest == done + 1


async def test_units_go_on_beside_commands_that_never_cease(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    carry_out = CommandDesk.run

    async def and_one_more_waits(
        desk: CommandDesk, known: Conversation, speech: Speech
    ) -> tuple[Conversation, Speech]:
        after = await carry_out(desk, known, speech)
        desk.put(AcknowledgePlayback(1, 0))
        return after

    monkeypatch.setattr(CommandDesk, "run", and_one_more_waits)
    await here.open("endless", Terms("off"))
    caller = Caller("endless")
    await caller.dial(here)
    await caller.tell(AcknowledgePlayback(1, 0))
    await caller.talk(3)
    check_events(caller)


async def test_what_has_left_the_window_is_said_for_good(here: Replica) -> None:
    await here.open("too-late", Terms("context"))
    caller = Caller("too-late")
    await caller.dial(here)
    last = await in_mid_reply(caller)
    turn = sounds(caller)[-1].turn
    await caller.ask(CancelReply(client_sequence=1))
    await caller.talk(last + 12)
    failure = await caller.ask(TruncateReply(turn, 0, client_sequence=2))
    assert isinstance(failure, Failure)
    assert failure.code is ErrorCode.PLAYBACK_ACK_TOO_LATE
    never = await caller.ask(TruncateReply(turn + 99, 0, client_sequence=2))
    assert isinstance(never, Failure)
    assert never.code is ErrorCode.PLAYBACK_ITEM_NOT_FOUND


async def test_more_than_the_desk_holds_is_refused_by_name(here: Replica) -> None:
    await here.open("flood", Terms("off"))
    caller = Caller("flood")
    await caller.dial(here)
    pause = here.stages.thinker.pause(1, after=False)
    await caller.say(1)
    await pause.reached.wait()
    for _ in range(MAX_WAITING_COMMANDS + 1):
        await caller.tell(AcknowledgePlayback(1, 0))
        await caller.attachment_takes_mail()
    assert caller.failures[-1].code is ErrorCode.INPUT_OVERFLOW
    pause.go.set()
    await caller.until_unit(1)


async def test_truncations_without_a_unit_between_them_do_not_grow_the_ledger(
    here: Replica,
) -> None:
    """Only a commit drops anything of chain and journal: without a bound a client that says it
    again and again fills the ledger's server past the session's limit."""
    await here.open("again", Terms("context"))
    caller = Caller("again")
    await caller.dial(here)
    unit = await in_mid_reply(caller)
    turn, grown = sounds(caller)[-1].turn, list[int]()

    async def truncated() -> bool:
        await caller.tell(TruncateReply(turn=turn, heard_ms=1))
        told = await caller.until(
            lambda event: (
                isinstance(event, Failure)
                or (isinstance(event, Sequenced) and isinstance(event.body, TurnTruncated))
            )
        )
        return not isinstance(told, Failure)

    done = 0
    while done < 3 * MAX_TRUNCATIONS and await truncated():
        done += 1
    assert done == MAX_TRUNCATIONS
    assert caller.failures[-1].code is ErrorCode.INPUT_OVERFLOW
    for _ in range(3):
        meta = await here.ledger.reader.meta("again")
        assert meta is not None
        grown.append(meta.bytes)
        assert not await truncated()
    assert grown[0] == grown[-1]
    await caller.talk(unit + 1)
    assert await truncated()
    await caller.talk(unit + 8)
    check_events(caller)


@pytest.mark.parametrize("mode", MODES)
async def test_a_stream_that_was_made_ready_before_a_cut_is_not_used(
    here: Replica, there: Replica, mode: Mode
) -> None:
    """The next owner has followed up to the last unit; then the client takes it back, then the
    session moves."""
    session, terms = f"ready-{mode}", Terms(mode)
    await here.open(session, terms, fence=1)
    caller = Caller(session)
    await caller.dial(here)
    last = await in_mid_reply(caller)
    await there.registry.prepare(session, terms.manifest(), claim(fence=2))
    turn = sounds(caller)[-1].turn
    await caller.ask(TruncateReply(turn, 0, client_sequence=1))
    order = HandOver(there.name, 2)
    await here.registry.departures.hand_over(session, order, grace_s=0.0)
    await caller.until(lambda event: isinstance(event, Closed))
    opened = await caller.dial(there)
    assert opened.client_sequence == 1
    await caller.talk(last + 4)
    check_events(caller)
    assert caller.units[last].rebuild_cause == "truncation"
    said = await tokens(here.ledger, session)
    cut = dict.fromkeys({audio.unit for audio in sounds_of(caller, turn)}, LISTENS)
    stages = [here.stages, there.stages]
    check_prompts(stages, session, terms, said, caller, cuts={last + 1: cut})


async def test_telemetry_says_why_prompt_and_epoch_are_new(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    rebuilds: list[RebuildCause] = []
    epochs: list[EpochCause] = []
    monkeypatch.setattr(Metrics, "rebuild", lambda _, cause, ms: rebuilds.append(cause))
    monkeypatch.setattr(Metrics, "epoch", lambda _, cause: epochs.append(cause))
    await here.open("told", Terms("off"))
    caller = Caller("told")
    await caller.dial(here)
    await in_mid_reply(caller)
    before = len(epochs)
    await caller.ask(TruncateReply(sounds(caller)[-1].turn, 0, client_sequence=1))
    await in_mid_reply(caller)
    assert rebuilds == [RebuildCause.TRUNCATION]
    assert epochs[before] is EpochCause.BARGE_IN
    assert EpochCause.BARGE_IN not in epochs[before + 1 :]
    quality = here.registry.live["told"].quality
    assert quality.last_rebuild is not None
    assert quality.last_rebuild.cause == "truncation"
