"""A changed token that the sidecar cannot be told of: the conversation goes on there."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from duplex_api.session import Placement, SessionPhase, SessionStatus, TokenSecret
from duplex_api.window import DEFAULT_WINDOW
from duplex_operator import session_opening
from duplex_operator.context import Context
from duplex_operator.decide.acceptance import Accepted
from duplex_operator.decide.actions import AskForSlot, Nothing, Open, WriteStatus
from duplex_operator.decide.facts import Memory, PodHealth, PodView, SessionFacts, Token
from duplex_operator.decide.lifecycle import decide
from duplex_operator.decide.status import LEDGER_DURABLE, condition_of
from duplex_operator.feed import FeedPhase, FeedSession
from duplex_operator.names import SESSION_FINALIZER
from duplex_operator.objects import read_session
from duplex_operator.observe import Known
from duplex_operator.placements import PlacementBoard
from duplex_operator.session_opening import open_on_pod
from duplex_operator.sidecar_client import SidecarRefusalError, SidecarUnreachableError
from duplex_operator.store import Store
from duplex_operator.voices import VoiceUnusableError

pytestmark = pytest.mark.unit

NOW_MS = 1_900_000_000_000
ON_A = Placement(pod="pod-a", pod_uid="uid-a", fence=3)
SAID = FeedSession(session="uid-s", phase=FeedPhase.ACTIVE, fence=3, attached=True)


def facts_of(**changes: Any) -> SessionFacts:
    """It talks on pod-a; its token was changed, and nothing else is to be said of it."""
    meta = {"name": "talk", "namespace": "default", "uid": "uid-s", "resourceVersion": "1"}
    session = read_session(
        {
            "metadata": meta | {"finalizers": [SESSION_FINALIZER]},
            "spec": {"poolRef": {"name": "x"}},
        }
    )
    assert session is not None
    status = SessionStatus(phase=SessionPhase.READY, placement=ON_A)
    facts = SessionFacts(
        session=replace(session, status=status),
        verdict=Accepted(DEFAULT_WINDOW.as_policy()),
        now_ms=NOW_MS,
        endpoint="wss://example",
        memory=Memory(token_untold=True),
        pod=PodView("uid-a", "pod-a", PodHealth.LIVE),
        said=SAID,
        token=Token(TokenSecret(name="mine", key="token"), "b" * 64),
    )
    return replace(facts, **changes)


async def told(facts: SessionFacts, error: Exception, where: str) -> tuple[Nothing | None, Memory]:
    """The order for its sidecar, which fails. where: in reading its voice, or at the sidecar."""

    async def fails(*_: Any, **__: Any) -> None:
        raise error

    async def works(*_: Any, **__: Any) -> None:
        return None

    client = SimpleNamespace(put_session=fails if where == "sidecar" else works)
    context = SimpleNamespace(
        store=Store(),
        api=None,
        board=PlacementBoard(),
        monotonic_s=lambda: 0.0,
        fleet=SimpleNamespace(client=lambda _: client, pod=lambda _: None),
        occupancy=SimpleNamespace(occupy=works),
    )
    known = Known(memory=facts.memory, token=facts.token)
    action = decide(facts)
    assert isinstance(action, Open)
    with pytest.MonkeyPatch.context() as secrets:
        voice = fails if where == "voice" else works
        secrets.setattr(session_opening, "obtain_voice", voice)
        rest = await open_on_pod(cast("Context", context), facts, known, action)
    return rest, known.memory


@pytest.mark.parametrize(
    ("error", "where"),
    [
        (SidecarRefusalError(503, "ledger_unavailable", "later"), "sidecar"),
        (SidecarRefusalError(409, "manifest_conflict", "it runs with another voice"), "sidecar"),
        (SidecarRefusalError(422, "unserved_manifest", "not served"), "sidecar"),
        (SidecarUnreachableError("no answer"), "sidecar"),
        (VoiceUnusableError("there is no Secret voice"), "voice"),
    ],
)
async def test_it_is_neither_moved_nor_left_unlooked_at(error: Exception, where: str) -> None:
    facts = facts_of()
    rest, memory = await told(facts, error, where)
    assert rest is None
    after = replace(facts, memory=memory)
    told_of = decide(replace(after, said=msgspec.structs.replace(SAID, ledger_durable=False)))
    assert isinstance(told_of, WriteStatus)
    assert told_of.status.placement == ON_A
    durable = condition_of(told_of.status, LEDGER_DURABLE)
    assert durable is not None
    assert durable.status == "False"
    leaving = replace(after, pod=PodView("uid-a", "pod-a", PodHealth.LIVE, leaving=True))
    assert decide(leaving) == AskForSlot()
    assert isinstance(decide(replace(after, now_ms=NOW_MS + 5_000)), Open)


@pytest.mark.parametrize("code", ["session_ended", "stale_fence", "ledger_lost"])
async def test_what_does_not_run_there_any_more_is_believed(code: str) -> None:
    facts = facts_of()
    rest, memory = await told(facts, SidecarRefusalError(410, code, "no"), "sidecar")
    assert rest is None
    assert memory.refusal is not None
    assert memory.refusal.code == code
