"""Errors that nobody has a name for: one costs a moment, the same again ends its session."""

import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.commands import AppendInput
from duplex_sidecar.protocol.errors import ClientError, ErrorCode
from duplex_sidecar.protocol.events import Closed
from duplex_sidecar.session.speaking import Speaker
from duplex_sidecar.session.thinking import ThinkerDriver

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    RATE_HZ,
    TOKEN,
    Caller,
    Replica,
    Terms,
    check_events,
    eventually,
    png,
    replica,
    second,
    tokens,
    undisturbed,
    with_camera,
)

pytestmark = pytest.mark.fault
TERMS = Terms("context")
PLACES = [(ThinkerDriver, "plan"), (ThinkerDriver, "answer"), (Speaker, "voice")]
"""Before the input is durable, before the answer is, and before its sound is."""


@pytest.fixture
async def here(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "here") as started:
        yield started


def breaks(monkeypatch: pytest.MonkeyPatch, kind: type, name: str, times: int) -> list[int]:
    """So many calls of that method end without a named reason. Returns which call it was."""
    method, calls = getattr(kind, name), [0]

    def fail(self: Any, *given: Any, **named: Any) -> Any:
        calls[0] += 1
        if calls[0] <= times:
            raise ArithmeticError("nobody has thought of this")
        return method(self, *given, **named)

    monkeypatch.setattr(kind, name, fail)
    return calls


async def until_closed(caller: Caller) -> Closed:
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    return closed


@pytest.mark.parametrize(("kind", "name"), PLACES)
async def test_one_error_without_a_name_costs_no_conversation(
    valkey: EmbeddedValkey, here: Replica, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    calm, _ = await undisturbed(valkey.url, f"calm-{name}", TERMS, 6)
    session = f"once-{name}"
    await here.open(session, TERMS)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(3)
    breaks(monkeypatch, kind, name, 1)
    await caller.say(4)
    assert (await until_closed(caller)).code is ErrorCode.LEASE_LOST
    await caller.dial(here)
    await caller.talk(6)
    assert await tokens(here.ledger, session) == calm
    check_events(caller)


@pytest.mark.parametrize(("kind", "name"), PLACES)
async def test_the_same_error_again_ends_the_session(
    here: Replica, monkeypatch: pytest.MonkeyPatch, kind: type, name: str
) -> None:
    session = f"always-{name}"
    await here.open(session, TERMS)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(3)
    calls = breaks(monkeypatch, kind, name, 1_000)
    await caller.say(4)
    assert (await until_closed(caller)).code is ErrorCode.LEASE_LOST
    # Where the unit is durable, the session's recovery fails before it greets anybody.
    caller.attachment = await here.registry.attach(session, TOKEN, None)
    caller.next_second = 4
    with suppress(ClientError):
        await caller.say(4)
    assert (await until_closed(caller)).code is ErrorCode.UNIT_FAILED
    await eventually(lambda: not here.registry.live)
    assert calls == [2]
    meta = await here.ledger.reader.meta(session)
    assert meta is not None
    assert (meta.phase, meta.reason) == (Phase.ENDED, ErrorCode.UNIT_FAILED)
    with pytest.raises(ClientError) as over:
        await caller.dial(here)
    assert over.value.code is ErrorCode.SESSION_ENDED


async def test_errors_behind_different_units_are_not_added_up(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    await here.open("apart", TERMS)
    caller = Caller("apart")
    await caller.dial(here)
    for unit in (2, 4, 6):
        await caller.talk(unit)
        with monkeypatch.context() as patched:
            breaks(patched, ThinkerDriver, "plan", 1)
            await caller.say(unit + 1)
            assert (await until_closed(caller)).code is ErrorCode.LEASE_LOST
        await caller.dial(here)
    await caller.talk(8)
    check_events(caller)


async def test_a_client_that_cannot_be_greeted_is_told(
    here: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise ArithmeticError("nobody has thought of this")

    await here.open("greeted", TERMS)
    caller = Caller("greeted")
    with monkeypatch.context() as patched:
        patched.setattr("duplex_sidecar.session.actor.greet", fail)
        with pytest.raises(ClientError) as told:
            await caller.dial(here)
    assert told.value.code is ErrorCode.NOT_READY
    await caller.dial(here)
    await caller.talk(2)


async def test_pictures_that_the_ledger_cannot_hold_are_refused_and_the_session_goes_on(
    here: Replica,
) -> None:
    session, pictures = "pictures", [png(96, shade) + bytes(2_100_000) for shade in range(4)]
    await here.open(session, with_camera(TERMS))
    caller = Caller(session)
    await caller.dial(here)
    assert caller.attachment is not None
    quarter = len(second(1)) // 4
    for number, picture in enumerate(pictures):
        sound = second(1)[quarter * number :][:quarter]
        at = RATE_HZ // 4 * number
        await caller.attachment.submit(AppendInput(sound, (picture,), from_sample=at))
        if number:
            assert (await caller.until_failure()).code is ErrorCode.INPUT_OVERFLOW
            await caller.attachment.submit(AppendInput(sound, from_sample=at))
    await caller.until_unit(1)
    caller.next_second = 2
    await caller.talk(4)
    check_events(caller)
