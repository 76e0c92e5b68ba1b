"""Commands of a client that change what was said: the reply stops, what was not heard is taken out
of the context, and each numbered command counts once, wherever the session runs."""

import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.records import Cancelled, Truncated
from duplex_sidecar.protocol.commands import (
    CancelReply,
    TruncateReply,
)
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import (
    CLOSING_STEPS,
    Audio,
    CommandApplied,
    Decision,
    TurnMark,
    TurnTruncated,
)

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    MODES,
    VOCABULARY,
    Caller,
    Cuts,
    Mode,
    Replica,
    Terms,
    check_events,
    check_prompts,
    check_stage2,
    replica,
    tokens,
)

pytestmark = pytest.mark.integration

LISTENS = (VOCABULARY.listen,)


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path_factory.mktemp("valkey"))
    server.start()
    yield server
    server.stop()


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
    return [audio for audio in heard if audio.turn == heard[-1].turn]


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
