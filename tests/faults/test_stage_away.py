"""A stage that was lost and does not come back in time: its sessions are let go of, not ended."""

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from duplex_sidecar.ledger.embedded import EmbeddedValkey
from duplex_sidecar.ledger.session_view import Phase
from duplex_sidecar.protocol.errors import ErrorCode
from duplex_sidecar.protocol.events import Closed
from duplex_sidecar.session import stages

sys.path.append(str(Path(__file__).resolve().parents[1] / "fakes"))
from session_kit import (
    TOKEN,
    Caller,
    Replica,
    Terms,
    check_events,
    eventually,
    replica,
    tokens,
    undisturbed,
)

pytestmark = pytest.mark.fault
TERMS = Terms("context")
UNITS, HEARD_UNITS, SAID_UNITS = 16, 3, 10
NEVER = 1_000_000
"""Health calls until it is back."""


@pytest.fixture
async def here(valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
    monkeypatch.setattr(stages, "READY_TIMEOUT_S", 0.3)
    async with replica(valkey.url, "here") as started:
        yield started


@pytest.fixture
async def there(valkey: EmbeddedValkey) -> AsyncIterator[Replica]:
    async with replica(valkey.url, "there") as started:
        yield started


async def let_go(here: Replica, caller: Caller) -> None:
    """The client is told to dial again, and nobody has the session."""
    closed = await caller.until(lambda event: isinstance(event, Closed))
    assert isinstance(closed, Closed)
    assert closed.code is ErrorCode.LEASE_LOST
    await eventually(lambda: not here.registry.live)
    meta = await here.ledger.reader.meta(caller.session)
    assert meta is not None
    assert (meta.phase, meta.lease_until_ms) == (Phase.OPEN, 0)


async def struck(here: Replica, session: str, stage: str) -> Caller:
    """A conversation in which that stage has gone for good."""
    await here.open(session, TERMS)
    caller = Caller(session)
    await caller.dial(here)
    await caller.talk(HEARD_UNITS)
    getattr(here.stages, stage).kill(health_calls=NEVER)
    await caller.say(SAID_UNITS)
    await let_go(here, caller)
    return caller


@pytest.mark.parametrize("stage", ["encoder", "thinker", "talker", "code2wav"])
async def test_the_conversation_goes_on_at_another_replica(
    valkey: EmbeddedValkey, here: Replica, there: Replica, stage: str
) -> None:
    calm, _ = await undisturbed(valkey.url, f"calm-{stage}", TERMS, UNITS)
    caller = await struck(here, f"elsewhere-{stage}", stage)
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, caller.session) == calm


async def test_or_at_the_same_one_later(valkey: EmbeddedValkey, here: Replica) -> None:
    calm, _ = await undisturbed(valkey.url, "calm-later", TERMS, UNITS)
    caller = await struck(here, "later", "thinker")
    here.stages.thinker.kill()
    await caller.dial(here)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(here.ledger, caller.session) == calm


async def test_a_unit_that_is_to_be_spoken_again_waits_no_longer(
    valkey: EmbeddedValkey, here: Replica, there: Replica
) -> None:
    """It was answered and never spoken; who takes it up has no Thinker either."""
    calm, _ = await undisturbed(valkey.url, "calm-respeak", TERMS, UNITS)
    caller = await struck(here, "respeak", "talker")
    there.stages.thinker.kill(health_calls=NEVER)
    caller.attachment = await there.registry.attach(caller.session, TOKEN, caller.last_sequence)
    await let_go(there, caller)
    there.stages.thinker.kill()
    await caller.dial(there)
    await caller.talk(UNITS)
    check_events(caller)
    assert await tokens(there.ledger, caller.session) == calm
