"""A conversation that lost something in its middle: the right one passes, and each thing that can
be wrong with it is found."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from msgspec import structs
from support.ledger_kit import accept_draft, commit_draft, opening_draft

from duplex_sidecar.client.conversation import Replies, Talk
from duplex_sidecar.ledger import records
from duplex_sidecar.ledger.journal import VoiceMark
from duplex_sidecar.ledger.session_view import LoadedSession, Phase, parse_meta
from tests.gpu.recovery_judge import (
    Memory,
    Struck,
    what_the_client_heard,
    what_the_ledger_holds,
    whether_a_new_epoch_began,
    whether_memory_came_back,
    which_chunks_came,
    who_answered,
)

pytestmark = pytest.mark.unit

UNITS, KILLED_BEHIND = 4, 3
SCRIPT = ((1,), (2, 3))
SAMPLES = 100
COMMON: dict[str, Any] = {"schema": 1, "replica": "one", "at_ms": 5}


def chunk(unit: int, epoch: int, sequence: int, from_sample: int) -> Replies:
    return Replies(float(unit), 1, epoch, sequence, from_sample, bytes(2 * SAMPLES))


def talk() -> Talk:
    """Units 2 to 4 sound; behind the third one the next epoch begins, two chunks muted."""
    replies = [chunk(2, 0, 0, 0), chunk(3, 0, 1, SAMPLES), chunk(4, 1, 2, 2 * SAMPLES)]
    by = ["one", "one", "one", "two"]
    units = [
        {"unit": unit, "audio_samples": SAMPLES if unit > 1 else 0, "replica": by[unit - 1]}
        for unit in range(1, UNITS + 1)
    ]
    return Talk(units=units, replies=replies, resumes=[{}])


MARKS = tuple(
    VoiceMark(
        0, number, 1, number + 2, 25 * number, (7,) * 25, SAMPLES * number, SAMPLES * (number + 1)
    )
    for number in range(2)
)
"""Units 2 and 3 had sounded at the kill."""


def session(units: int, tokens: Callable[[int], tuple[int, ...]], reason: str) -> LoadedSession:
    """A chain of so many units. reason: why it was closed, "" if it was not."""
    chain: list[records.Record] = []
    opening = records.Opening(
        **structs.asdict(opening_draft("s")), rows=(), state_sha256="", prev_hash="0" * 64, **COMMON
    )
    last = records.sha256(records.encode(opening))
    first = records.Entry(0, last, opening, records.encode(opening))

    def add(kind: type[Any], draft: msgspec.Struct, **more: Any) -> None:
        nonlocal last
        chain.append(kind(**(structs.asdict(draft) | more), prev_hash=last, **COMMON))
        last = records.sha256(records.encode(chain[-1]))

    for seq in range(1, units + 1):
        nothing = records.MediaRefs(None, None, ())
        add(records.Accepted, accept_draft(seq), media=nothing, state_sha256=None, attempts=1)
        said = {"token_ids": tokens(seq), "sampled_ids": tokens(seq)}
        add(records.Committed, commit_draft(seq), state_sha256="", **said)
    if reason:
        add(records.Closed, records.ClosedDraft(seq=units, reason=reason), state_sha256=None)
    stored = [records.encode(record) for record in chain]
    return LoadedSession(
        session="s",
        meta=META,
        opening=opening,
        opening_entry=first,
        reference_rows=(),
        entries=records.link("s", 1, first.hash, stored),
        state=b"",
        accepted_state=None,
        media={},
        marks=MARKS,
        voice_state=None,
        voice_unit=0,
    )


_FIELDS = {
    **dict.fromkeys(("fence", "index", "bytes", "until", "voiced", "voice_samples"), "0"),
    **dict.fromkeys(("records_first", "window_floor", "pcm_floor", "events_first"), "1"),
    **dict.fromkeys(("reason", "nonce", "replica", "head", "opening_hash", "floor_hash"), ""),
    **dict.fromkeys(("token", "token_offered", "open", "voice_turn"), ""),
    "phase": Phase.ENDED.value,
    "events_last": "9",
    "committed": str(UNITS),
}
META = parse_meta("s", {name.encode(): value.encode() for name, value in _FIELDS.items()})


def scripted(seq: int) -> tuple[int, ...]:
    return SCRIPT[(seq - 1) % len(SCRIPT)]


AT_KILL = session(KILLED_BEHIND, scripted, "")
END = session(UNITS, scripted, "session_ended")


def struck(heard: Talk | None = None, end: LoadedSession = END) -> Struck:
    return Struck(talk() if heard is None else heard, UNITS, SCRIPT, 2, AT_KILL, end)


def everything(one: Struck) -> Iterator[str]:
    yield from what_the_client_heard(one)
    yield from which_chunks_came(one)
    yield from whether_a_new_epoch_began(one)
    yield from what_the_ledger_holds(one)
    yield from who_answered(one, "one", "two")


def test_the_right_one_passes() -> None:
    assert list(everything(struck())) == []


def lost_unit(one: Talk) -> None:
    del one.units[2]


def said_error(one: Talk) -> None:
    one.errors.append({"code": "unit_failed"})


def lost_sound(one: Talk) -> None:
    one.replies[2] = replace(one.replies[2], from_sample=3 * SAMPLES)


def short_sound(one: Talk) -> None:
    one.replies[2] = replace(one.replies[2], pcm_s16le=bytes(2))


def twice_the_sound(one: Talk) -> None:
    one.replies.append(one.replies[2])


def old_epoch(one: Talk) -> None:
    one.replies[2] = replace(one.replies[2], epoch=0)


def chunk_in_mid_air(one: Talk) -> None:
    one.replies[2] = replace(one.replies[2], sequence=4)


def nothing_muted(one: Talk) -> None:
    one.replies[2] = replace(one.replies[2], sequence=0)


def stayed(one: Talk) -> None:
    one.units[3]["replica"] = "one"


def never_resumed(one: Talk) -> None:
    one.resumes.clear()


def silent(one: Talk) -> None:
    one.replies = one.replies[:2]


def test_a_chunk_may_have_no_sound() -> None:
    heard = talk()
    heard.replies[2] = replace(heard.replies[2], sequence=3)
    assert list(everything(struck(heard))) == []


@pytest.mark.parametrize(
    "spoil",
    [
        lost_unit,
        said_error,
        lost_sound,
        short_sound,
        twice_the_sound,
        old_epoch,
        chunk_in_mid_air,
        nothing_muted,
        stayed,
        never_resumed,
        silent,
    ],
)
def test_what_a_client_must_not_hear(spoil: Callable[[Talk], None]) -> None:
    heard = talk()
    spoil(heard)
    assert list(everything(struck(heard)))


@pytest.mark.parametrize(
    "end",
    [
        session(UNITS, lambda seq: (9,) if seq == 1 else scripted(seq), "session_ended"),
        session(UNITS, lambda seq: (9,) if seq == UNITS else scripted(seq), "session_ended"),
        session(UNITS - 1, scripted, "session_ended"),
        session(UNITS, scripted, "unit_failed"),
        session(UNITS, scripted, ""),
        structs.replace(END, entries=END.entries[2:]),
    ],
)
def test_what_a_ledger_must_not_hold(end: LoadedSession) -> None:
    assert list(what_the_ledger_holds(struck(end=end)))


def test_one_sidecar_that_lived_on() -> None:
    heard = talk()
    heard.units[3]["replica"] = "one"
    assert list(who_answered(struck(heard), "one", "one")), "the client lost its connection"
    heard.resumes.clear()
    assert list(who_answered(struck(heard), "one", "one")) == []


@pytest.mark.parametrize(
    ("memory", "restarts", "right"),
    [
        (Memory(70.0, 50.0, 70.2, 20.0), True, True),
        (Memory(70.0, 50.0, 70.2, None), True, True),
        (Memory(70.0, 40.0, 40.0, 30.0), False, True),
        (Memory(70.0, 60.0, 70.0, 20.0), True, False),
        (Memory(70.0, 70.0, 70.0, None), True, False),
        (Memory(70.0, 50.0, 90.0, 20.0), True, False),
        (Memory(70.0, 60.0, 60.0, 30.0), False, False),
    ],
)
def test_memory(memory: Memory, restarts: bool, right: bool) -> None:
    assert (list(whether_memory_came_back(memory, restarts=restarts)) == []) is right
