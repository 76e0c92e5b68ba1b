"""Which pools and sessions a release leaves to another one."""

import pytest

from duplex_operator.claims import LET_GO_AFTER_S, Claims
from duplex_operator.objects import ObjectKey, SessionObject, read_pool, read_session, timestamp
from duplex_operator.store import Store

pytestmark = pytest.mark.unit

NOW_MS = 1_795_995_000_000
POOL = ObjectKey("default", "x")


def named(name: str, **more: str) -> dict[str, str]:
    return {"name": name, "namespace": "default", "uid": f"uid-{name}", "resourceVersion": "1"} | (
        more
    )


def store(**meta: str) -> Store:
    """With the pool."""
    found, made = read_pool({"metadata": named("x", **meta), "spec": _SPEC}), Store()
    assert found is not None
    made.pools.put(found)
    return made


def session(*, accepted: bool = False, **meta: str) -> SessionObject:
    status = {"tokenSecret": {"name": "talk-token", "key": "token"}} if accepted else {}
    spec = {"poolRef": {"name": "x"}}
    found = read_session({"metadata": named("talk", **meta), "spec": spec, "status": status})
    assert found is not None
    return found


def everywhere(_: str) -> bool:
    return True


_SPEC = {"checkpoint": {"path": "/model"}, "slots": 2}


def test_a_pool_is_left_alone_until_somebody_has_looked_whose_it_is() -> None:
    claims = Claims(store(), everywhere)
    assert claims.serves(POOL), "nobody is going to look"
    claims.awaited = True
    assert not claims.serves(POOL)
    assert claims.note(POOL, serves=True)
    assert not claims.note(POOL, serves=True)
    assert claims.serves(POOL)
    assert claims.note(POOL, serves=False)
    assert not claims.serves(POOL)
    claims.forget(POOL)
    assert claims.note(POOL, serves=True)
    gone = Claims(Store(), everywhere)
    gone.note(POOL, serves=False)
    assert gone.serves(POOL), "it was another's, and is there no more"


@pytest.mark.parametrize(
    "there", [Store(), store(deletionTimestamp=timestamp(NOW_MS))], ids=["none", "deleted"]
)
def test_the_sessions_of_a_pool_that_is_not_there_are_told_so(there: Store) -> None:
    claims = Claims(there, everywhere)
    claims.awaited = True
    assert claims.serves(POOL)
    assert claims.takes_care_of(session(), NOW_MS)


def test_a_deleted_session_never_waits_for_a_release_that_is_gone() -> None:
    claims = Claims(store(), everywhere)
    claims.note(POOL, serves=False)
    deleted = session(deletionTimestamp=timestamp(NOW_MS))
    late_ms = NOW_MS + round(LET_GO_AFTER_S * 1000)
    assert not claims.takes_care_of(deleted, late_ms - 1)
    assert claims.takes_care_of(deleted, late_ms)
    assert not claims.takes_care_of(session(), late_ms)


def test_who_sees_the_session_and_not_its_pool_only_says_so_before_somebody_has_taken_it() -> None:
    claims = Claims(Store(), lambda namespace: namespace != POOL.namespace)
    assert claims.takes_care_of(session(), NOW_MS)
    assert not claims.takes_care_of(session(accepted=True), NOW_MS)
    assert Claims(Store(), everywhere).takes_care_of(session(accepted=True), NOW_MS)
