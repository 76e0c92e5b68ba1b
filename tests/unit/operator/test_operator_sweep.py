"""What falls behind is dealt with one by one: nobody's trouble is somebody else's."""

import itertools
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest

from duplex_api.routes import RouteRecord
from duplex_api.session import SessionPhase
from duplex_operator.context import Context
from duplex_operator.kube.api import Listing
from duplex_operator.kube.errors import RefusedError
from duplex_operator.kube.resources import SECRETS, SESSIONS, Resource
from duplex_operator.objects import ObjectKey, read_session
from duplex_operator.settings import OperatorSettings
from duplex_operator.sidecar_client import SidecarRefusalError
from duplex_operator.store import Store
from duplex_operator.sweep import SWEEP_PERIOD_S, Refusals, check_tokens, sweep_once

pytestmark = pytest.mark.unit

ROUTE = RouteRecord(
    token_sha256="a" * 64, phase=SessionPhase.ENDED, pool="default/x", session="default/talk"
)


@dataclass
class Outside:
    """The ledger, a sidecar and the API server, as far as they are asked here."""

    routes: list[str] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)
    erased: list[str] = field(default_factory=list)
    meanwhile: Callable[[], None] = lambda: None
    """Done while a list is on its way."""
    refusal: tuple[int, str] = (500, "ledger_corrupt")
    asked: list[float] = field(default_factory=list)
    """When it was asked for what it refuses."""
    now_s: float = 0.0

    async def records(self, known: Callable[[str], bool]) -> AsyncIterator[tuple[str, RouteRecord]]:
        for uid in list(self.routes):
            if not known(uid):
                yield uid, ROUTE

    async def drop(self, uid: str) -> None:
        self.routes.remove(uid)

    async def erase(self, uid: str) -> None:
        if uid in self.refused:
            self.asked.append(self.now_s)
            raise SidecarRefusalError(*self.refusal, "not this one")
        self.erased.append(uid)

    def any_client(self) -> "Outside":
        return self

    async def list(self, resource: Resource, _: str, **__: Any) -> Listing[Any]:
        assert resource in (SESSIONS, SECRETS)
        self.meanwhile()
        return Listing((), "1")

    async def get(self, _: Resource, key: ObjectKey) -> Mapping[str, Any]:
        if key.name in self.refused:
            raise RefusedError(403, "Forbidden", "not this one")
        return {"data": {}}

    def context(self, store: Store) -> Context:
        found = SimpleNamespace(
            settings=OperatorSettings("redis://ledger", "duplex", "test"),
            store=store,
            api=self,
            fleet=self,
            routes=self,
            monotonic_s=lambda: self.now_s,
        )
        return cast("Context", found)


async def test_one_erasure_that_is_refused_stops_none_behind_it() -> None:
    outside = Outside(routes=["first", "second", "third"], refused={"first"})
    assert await sweep_once(outside.context(Store())) == 2
    assert outside.erased == ["second", "third"]
    assert outside.routes == ["first"], "it is tried again"


async def test_a_token_that_is_made_while_the_list_comes_has_not_changed() -> None:
    store, forgotten = Store(), list[str]()

    def place() -> None:
        found = read_session(
            {
                "metadata": {
                    "name": "talk",
                    "namespace": "default",
                    "uid": "talk",
                    "resourceVersion": "1",
                },
                "spec": {"poolRef": {"name": "x"}},
                "status": {"tokenSecret": {"name": "talk-token", "key": "token"}},
            }
        )
        assert found is not None
        store.sessions.put(found)

    sessions = SimpleNamespace(token_hash=lambda _uid: "known", forget_token=forgotten.append)
    context = Outside(meanwhile=place).context(store)
    await check_tokens(context, cast("Any", sessions))
    assert forgotten == []
    await check_tokens(context, cast("Any", sessions))
    assert forgotten == ["talk"], "it is gone"


@pytest.mark.parametrize(("code", "times"), [("ledger_corrupt", 10), ("ledger_unavailable", 300)])
async def test_what_is_refused_each_time_is_asked_for_ever_more_rarely(
    code: str, times: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Five hours of sweeps; what passes by itself is asked for at each."""
    caplog.set_level(logging.WARNING)
    outside = Outside(routes=["foreign"], refused={"foreign"}, refusal=(500, code))
    refusals = Refusals()
    for _ in range(300):
        outside.now_s += SWEEP_PERIOD_S
        assert await sweep_once(outside.context(Store()), refusals) == 0
    assert len(outside.asked) == times
    pauses = [b - a for a, b in itertools.pairwise(outside.asked)]
    assert pauses == sorted(pauses)
    assert max(pauses) <= 3_660
    assert len(caplog.records) == (code == "ledger_corrupt"), "it is said once"
    # It can be erased after all, and nothing is remembered of it.
    outside.refused.clear()
    outside.now_s += 3_700
    assert await sweep_once(outside.context(Store()), refusals) == 1
    await sweep_once(outside.context(Store()), refusals)
    assert refusals == Refusals()


async def test_one_secret_that_is_refused_hides_no_change_of_another() -> None:
    store = Store()
    for name in ("first", "second"):
        found = read_session(
            {
                "metadata": {
                    "name": name,
                    "namespace": "default",
                    "uid": name,
                    "resourceVersion": "1",
                },
                "spec": {"poolRef": {"name": "x"}, "tokenSecretRef": {"name": name}},
                "status": {"tokenSecret": {"name": name, "key": "token"}},
            }
        )
        assert found is not None
        store.sessions.put(found)
    forgotten: list[str] = []
    sessions = SimpleNamespace(token_hash=lambda _uid: "known", forget_token=forgotten.append)
    outside = Outside(refused={"first"})
    await check_tokens(outside.context(store), cast("Any", sessions))
    assert forgotten == ["second"]
