"""Which tokens the route record lets in while a session's token changes."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_api.routes import RouteRecord
from duplex_api.session import TokenSecret
from duplex_operator import reconcile_session
from duplex_operator.context import Context
from duplex_operator.decide.facts import Token
from duplex_operator.fleet import Fleet
from duplex_operator.objects import SessionObject, read_session
from duplex_operator.observe import Known, Observer
from duplex_operator.placements import PlacementBoard
from duplex_operator.reconcile_session import SessionReconciler
from duplex_operator.session_route import LATEST_LOOK_S, SOONEST_LOOK_S, keep_route, look_s
from duplex_operator.settings import OperatorSettings
from duplex_operator.store import Store
from duplex_operator.watch import DirtySet

pytestmark = pytest.mark.unit

OLD, NEW, NEWEST = "a" * 64, "b" * 64, "c" * 64
PLACE = TokenSecret(name="mine", key="token")
PLACEMENT = {"pod": "pod-a", "podUID": "uid-a", "fence": 1}


class Ledger:
    """Route records, and the token that the session's ledger lets in."""

    def __init__(self) -> None:
        self.record: RouteRecord | None = None
        self.let_in = OLD
        self.writes = 0

    async def read(self, _: str) -> RouteRecord | None:
        return self.record

    async def write(self, _: str, record: RouteRecord, keep_ms: int) -> None:
        self.record = record
        self.writes += 1

    async def token_let_in(self, _: str) -> str:
        return self.let_in


class Rig:
    def __init__(self, *, placed: bool = False) -> None:
        self.now_ms, self.ledger, self.store = 1_000_000, Ledger(), Store()
        dirty = DirtySet()
        found = SimpleNamespace(
            settings=OperatorSettings("redis://ledger", "duplex", "test"),
            store=self.store,
            dirty=dirty,
            fleet=Fleet(self.store, dirty),
            board=PlacementBoard(),
            routes=self.ledger,
            api=None,
            now_ms=lambda: self.now_ms,
        )
        self.context = cast("Context", found)
        session = read_session(
            {
                "metadata": {
                    "name": "talk",
                    "namespace": "default",
                    "uid": "uid-s",
                    "resourceVersion": "1",
                },
                "spec": {"poolRef": {"name": "x"}},
                "status": {"phase": "Ready", "tokenSecret": {"name": "mine", "key": "token"}}
                | ({"placement": PLACEMENT} if placed else {}),
            }
        )
        assert session is not None
        self.session: SessionObject = session
        self.store.sessions.put(session)
        self.known = Known(token=Token(PLACE, OLD))

    async def keep(self) -> float | None:
        return await keep_route(self.context, self.session, self.known)

    def replace(self, sha256: str) -> None:
        """As the reconciler does: the old one is forgotten, then the new one is read."""
        reconciler: Any = SessionReconciler(self.context, lambda _: None)
        reconciler._known["uid-s"] = self.known
        reconciler.forget_token("uid-s")
        self.known.token, self.known.token_lost = Token(PLACE, sha256), False

    async def change(self, sha256: str) -> None:
        """Its Secret: by the reconciler's own steps, up to the order for the sidecar."""
        reconciler: Any = SessionReconciler(self.context, lambda _: None)
        reconciler._known["uid-s"] = self.known
        reconciler.forget_token("uid-s")
        placement = self.session.status.placement
        facts = SimpleNamespace(session=self.session, placement=placement, now_ms=self.now_ms)

        async def voice(*_: Any) -> None:
            pass

        async def token(*_: Any) -> Token:
            return Token(PLACE, sha256)

        with pytest.MonkeyPatch.context() as secrets:
            secrets.setattr(reconcile_session, "obtain_voice", voice)
            secrets.setattr(reconcile_session, "obtain_token", token)
            assert await reconciler._assign_token(facts, self.known) is None

    async def tell(self) -> None:
        """The sidecar, and look what there is to be said afterwards."""
        self.known.memory = replace(self.known.memory, token_untold=False)
        await self.keep()

    @property
    def tokens(self) -> tuple[str, str | None]:
        assert self.ledger.record is not None
        return self.ledger.record.token_sha256, self.ledger.record.token_sha256_next


async def test_both_tokens_let_in_until_the_ledger_names_the_new_one() -> None:
    rig = Rig()
    assert await rig.keep() is None
    assert rig.tokens == (OLD, None)
    rig.replace(NEW)
    assert await rig.keep() == SOONEST_LOOK_S
    assert rig.tokens == (OLD, NEW)
    writes = rig.ledger.writes
    rig.now_ms += 60_000
    assert await rig.keep() == 15.0
    assert rig.ledger.writes == writes
    rig.ledger.let_in = NEW
    assert await rig.keep() is None
    assert rig.tokens == (NEW, None)


async def test_a_token_that_is_replaced_twice() -> None:
    """The one in between lets in if somebody talked under it, seen here or not."""
    for let_in in (OLD, NEW):
        rig = Rig()
        rig.replace(NEW)
        await rig.keep()
        rig.ledger.let_in = let_in
        rig.replace(NEWEST)
        await rig.keep()
        assert rig.tokens == (let_in, NEWEST)


async def test_a_token_that_changes_while_the_ledger_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rig = Rig()
    rig.replace(NEW)
    await rig.keep()

    async def meanwhile(_: str) -> str:
        rig.replace(NEWEST)
        return NEW

    monkeypatch.setattr(rig.ledger, "token_let_in", meanwhile)
    assert await rig.keep() == SOONEST_LOOK_S
    assert (rig.known.replaced, rig.tokens) == (OLD, (OLD, NEW))
    monkeypatch.undo()
    rig.ledger.let_in = NEW
    await rig.keep()
    assert rig.tokens == (NEW, NEWEST)


async def test_a_token_that_is_changed_back_before_anybody_came_with_the_other() -> None:
    rig = Rig(placed=True)
    await rig.change(NEW)
    await rig.tell()
    assert rig.tokens == (OLD, NEW)
    await rig.change(OLD)
    assert rig.tokens == (OLD, OLD), "the other opens no more; the sidecar does not know it yet"
    await rig.tell()
    assert rig.tokens == (OLD, None)
    assert await rig.keep() is None


@pytest.mark.parametrize("before_the_change", [False, True])
async def test_a_token_that_is_changed_back_after_somebody_came_with_the_other(
    before_the_change: bool,
) -> None:
    """Unnoticed by the operator, or at the last moment before the sidecar is told."""
    rig = Rig(placed=True)
    await rig.change(NEW)
    await rig.tell()
    if before_the_change:
        rig.ledger.let_in = NEW
    await rig.change(OLD)
    assert rig.tokens == ((NEW, OLD) if before_the_change else (OLD, OLD))
    rig.ledger.let_in = NEW
    await rig.tell()
    assert rig.tokens == (NEW, OLD), "as in the ledger: until somebody comes with the old one again"
    rig.ledger.let_in = OLD
    assert await rig.keep() is None
    assert rig.tokens == (OLD, None)


async def test_a_token_that_is_changed_back_while_nobody_runs_the_session() -> None:
    """Who runs it next is told the one that lets in, which takes back the other."""
    rig = Rig()
    await rig.change(NEW)
    assert rig.tokens == (OLD, NEW)
    await rig.change(OLD)
    assert rig.tokens == (OLD, None)


async def test_an_operator_that_starts_again_tells_of_a_token_that_was_changed_back() -> None:
    rig = Rig(placed=True)
    await rig.change(NEW)
    await rig.change(OLD)
    assert rig.tokens == (OLD, OLD)
    later = Rig()
    later.ledger.record, later.known = rig.ledger.record, Known()
    facts = await Observer(later.context).facts(later.session, later.known)
    assert (facts.token, facts.memory.token_untold) == (Token(PLACE, OLD), True)


async def test_a_session_without_a_ledger_lets_in_the_new_one_alone() -> None:
    rig = Rig()
    rig.ledger.let_in = ""
    rig.replace(NEW)
    assert await rig.keep() is None
    assert rig.tokens == (NEW, None)


async def test_an_operator_that_starts_again_goes_on_with_both() -> None:
    rig = Rig()
    rig.replace(NEW)
    await rig.keep()
    rig.known = Known()
    facts = await Observer(rig.context).facts(rig.session, rig.known)
    assert rig.known.token == Token(PLACE, NEW)
    assert facts.memory.token_untold, "whether the sidecar knows of it cannot be seen"
    assert await rig.keep() is not None
    assert rig.tokens == (OLD, NEW)


async def test_an_operator_that_starts_again_has_nothing_to_tell_of_a_token_that_stays() -> None:
    rig = Rig()
    await rig.keep()
    rig.known = Known()
    facts = await Observer(rig.context).facts(rig.session, rig.known)
    assert (facts.token, facts.memory.token_untold) == (Token(PLACE, OLD), False)


def test_the_longer_nobody_talks_the_less_often_is_looked() -> None:
    looks = [look_s(ms) for ms in range(0, 3_600_000, 1000)]
    assert looks == sorted(looks)
    assert (looks[0], looks[-1]) == (SOONEST_LOOK_S, LATEST_LOOK_S)
