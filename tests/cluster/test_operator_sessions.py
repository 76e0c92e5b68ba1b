"""Sessions under a running operator: a real API server, a real ledger server, stand-in sidecars."""

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from redis.asyncio import Redis
from support.api_servers import ApiServer
from support.operators import (
    ADMIN_TOKEN,
    WAIT_S,
    Place,
    Reaper,
    RunningOperator,
    login,
    operating,
    placed,
    until,
)
from support.stand_in_sidecar import StandInSidecar, sha256

from duplex_api.routes import RouteRecord, call_key, route_key
from duplex_api.session import SessionPhase
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import POOLS, SECRETS, SESSIONS
from duplex_operator.names import ADMIN_PORT
from duplex_operator.objects import Kind, ObjectKey
from duplex_operator.sweep import check_tokens, sweep_once
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

MOST_STEPS = 16


@pytest.fixture
async def redis(valkey: EmbeddedValkey) -> AsyncIterator[Redis]:
    client = Redis.from_url(valkey.url, protocol=2, decode_responses=True)
    yield client
    await client.aclose()


@pytest.fixture
async def place(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> AsyncIterator[Place]:
    async with placed(api_server.kubeconfig, valkey.url, api_namespace) as place:
        yield place


async def route_of(redis: Redis, uid: str) -> RouteRecord | None:
    fields = await cast("Any", redis.hgetall(route_key(uid)))
    return RouteRecord.from_hash(fields)


async def routed(redis: Redis, uid: str, phase: SessionPhase) -> RouteRecord:
    """The record, as soon as it says so: it is written after the status."""

    async def look() -> RouteRecord | None:
        record = await route_of(redis, uid)
        return record if record is not None and record.phase == phase else None

    return cast("RouteRecord", await until(look, f"the route record: {phase}"))


async def ledger_phase(redis: Redis, uid: str) -> str | None:
    return await cast("Any", redis.hget(f"duplex:{{{uid}}}:meta", "phase"))


async def token_of(place: Place, status: dict[str, Any]) -> str:
    found = status["tokenSecret"]
    secret = await place.user.get(SECRETS, ObjectKey(place.namespace, found["name"]))
    return base64.b64decode(secret["data"][found["key"]]).decode()


def condition(status: dict[str, Any], name: str) -> tuple[str, str]:
    found = next(one for one in status["conditions"] if one["type"] == name)
    return found["status"], found["reason"]


async def test_a_session_is_ready_after_five_requests(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place) as operator:
        # Before the pod is known a session waits, and a longer wait is written down.
        await operator.hears(pod)
        uid = await place.make_session("talk", prompt="Be brief.", priority=3)
        status = await place.phase("talk", "Ready")
        assert pod.calls.count("PUT sessions/*") == 1
        assert status["placement"] == {"pod": "pod-a", "podUID": pod.pod_uid, "fence": 1}
        assert status["ledgerId"] == uid
        assert status["endpoint"] == "wss://duplex.example/v1/realtime"
        assert status["window"]["contextMaxUnits"] == 24
        for name in ("Ready", "Accepted", "Placed", "LedgerDurable", "KeepingPace"):
            assert condition(status, name)[0] == "True", name
        assert condition(status, "Connected") == ("False", "NoClient")

        async def told() -> list[str]:
            return [event["reason"] for event in await place.events("talk")]

        await until(told, "an event")
        assert await told() == ["Ready"]
        writes = {
            what: count
            for what, count in operator.api.connection.requests.items()
            if not what.startswith(("list ", "watch "))
        }
        # The first session of a pod has the pod marked occupied, for all that come after it.
        assert writes.pop("patch pods") == 1
        assert sum(writes.values()) == 5
        assert writes == {
            "patch duplexsessions": 1,
            "create secrets": 1,
            "patch-status duplexsessions": 2,
            "create events": 1,
        }
        record = await routed(redis, uid, SessionPhase.READY)
    secret = await place.user.get(SECRETS, ObjectKey(place.namespace, "talk-token"))
    assert [owner["uid"] for owner in secret["metadata"]["ownerReferences"]] == [uid]
    token = await token_of(place, status)
    assert record.token_sha256 == sha256(token) == pod.sessions[uid].token_sha256
    assert record.session == f"{place.namespace}/talk"
    manifest = pod.sessions[uid].manifest
    assert manifest["spec"]["prompt"] == "Be brief."
    assert manifest["spec"]["window"] == status["window"]
    assert "priority" not in manifest["spec"]


async def test_counters_follow_but_not_at_once(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place, counters_period_s=3.0):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        pod.attach(uid)
        status = await place.phase("talk", "Active")
        assert condition(status, "Connected") == ("True", "ClientAttached")
        version = (await place.session("talk") or {})["metadata"]["resourceVersion"]
        for _ in range(5):
            pod.talk(uid, 1)

        async def counted() -> bool:
            return (await place.status("talk"))["units"] == 5

        await until(counted, "five units told")
        after = (await place.session("talk") or {})["metadata"]["resourceVersion"]
        assert after != version


async def test_two_sessions_want_the_last_slot(place: Place, redis: Redis) -> None:
    await place.make_pool(slots=1)
    pod = await place.make_pod("pod-a", slots=1)
    async with operating(place, counters_period_s=0.5):
        uids = await asyncio.gather(place.make_session("one"), place.make_session("two"))

        async def settled() -> dict[str, dict[str, Any]]:
            statuses = {name: await place.status(name) for name in ("one", "two")}
            phases = {status.get("phase") for status in statuses.values()}
            # Before the pod is known both wait, for another reason.
            full = any(status.get("reason") == "NoFreeSlots" for status in statuses.values())
            return statuses if full and phases == {"Ready", "Queued"} else {}

        statuses = await until(settled, "one ready, one queued")
        waiting = next(name for name in statuses if statuses[name]["phase"] == "Queued")
        serving = next(name for name in statuses if name != waiting)
        status = statuses[waiting]
        assert status["queuePosition"] == 1
        assert condition(status, "Placed") == ("False", "NoFreeSlots")
        pool = f"{place.namespace}/pool"
        assert status["message"] == f"1 pod of pool {pool} is full (1 of 1 slots)"
        uid = uids[("one", "two").index(waiting)]

        async def told() -> bool:
            record = await route_of(redis, uid)
            seen = record and (record.phase, record.queue_position)
            return seen == (SessionPhase.QUEUED, 1)

        await until(told, "the route record of the one that waits")
        assert pod.calls.count("PUT sessions/*") == 1
        await place.delete_session(serving)
        status = await place.phase(waiting, "Ready")
        assert "queuePosition" not in status
        await place.gone(serving)


async def test_a_dead_pods_sessions_are_placed_elsewhere(place: Place) -> None:
    await place.make_pool()
    await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        first = await place.phase("talk", "Ready")
        other = await place.make_pod("pod-b")
        await place.kill_pod("pod-a")

        async def moved() -> bool:
            return place.owner_of(uid) == ["pod-b"]

        await until(moved, "moved")
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 2
        assert status["lastPlacement"] == first["placement"]
        # Its lease had not run out: the pod's death was proven to the new owner.
        assert first["placement"]["podUID"] in other.broken


async def test_of_a_pod_that_lives_only_the_ended_sidecar_is_told_dead(place: Place) -> None:
    """Killed for its memory, say: the pod stays, and its container is soon started again."""
    await place.make_pool()
    await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        first = await place.phase("talk", "Ready")
        other = await place.make_pod("pod-b")
        ended = await place.kill_sidecar("pod-a", "OOMKilled")

        async def moved() -> bool:
            return place.owner_of(uid) == ["pod-b"]

        await until(moved, "moved", timeout_s=6)
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 2
        assert status["lastPlacement"] == first["placement"]
        assert other.broken == {ended.replica}


async def test_a_hung_pod_is_left_when_its_lease_has_run_out(place: Place) -> None:
    await place.make_pool()
    hung = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        other = await place.make_pod("pod-b")
        hung.hang()

        async def moved() -> bool:
            return uid in other.sessions

        await until(moved, "moved")
        status = await place.phase("talk", "Ready")
        assert status["placement"]["pod"] == "pod-b"
        assert not other.broken


async def test_a_pod_that_was_only_held_up_hands_its_session_over(place: Place) -> None:
    """It is back when its session has another slot already, and renews the lease: nobody takes it
    away, and it changes pods once."""
    await place.make_pool()
    held_up = await place.make_pod("pod-a")
    async with operating(place) as running:
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        held_up.attach(uid)
        held_up.talk(uid, 5)
        await place.phase("talk", "Active")
        other = await place.make_pod("pod-b")
        # However slow this machine is: the other one gets to the lease behind its renewal.
        other.refuse["PUT sessions/*"] = (503, "not_ready")
        await running.hears(other)
        held_up.hang()

        async def placed_there() -> bool:
            return (await place.status("talk"))["placement"]["pod"] == "pod-b"

        await until(placed_there, "placed on the other pod")
        assert uid in held_up.sessions
        await held_up.resume()

        async def handed_over() -> bool:
            return place.owner_of(uid) == ["pod-b"]

        await until(handed_over, "handed over")
        status = await place.phase("talk", "Ready", "Active")
        assert (status["placement"]["pod"], status["placement"]["fence"]) == ("pod-b", 2)
        assert held_up.calls.count("POST sessions/*/hand-over", uid) == 1
        assert held_up.calls.count("POST sessions/*/park", uid) == 0
        assert other.calls.count("POST sessions/*/prepare", uid) == 1


async def test_a_replica_that_starts_again_gets_a_larger_fence(
    place: Place, valkey: EmbeddedValkey
) -> None:
    await place.make_pool()
    first = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        await first.die()
        again = StandInSidecar(valkey.url, first.pod_uid, ADMIN_TOKEN, first.host, boot=2)
        place.pods["pod-a"] = again
        await again.start(ADMIN_PORT)

        async def back() -> bool:
            return uid in again.sessions and again.sessions[uid].fence == 2

        await until(back, "back on the same pod")
        await place.phase("talk", "Ready")


async def test_a_deleted_session_is_ended_erased_and_gone(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        await redis.set(call_key(uid), "a gateway's")
        await place.delete_session("talk")
        await place.gone("talk")
        assert uid not in pod.sessions
        assert await ledger_phase(redis, uid) == "erased"
        assert await route_of(redis, uid) is None
        assert not await redis.exists(call_key(uid))

        async def told() -> int:
            """Told behind the finalizer: a conflict there would tell it twice."""
            return [event["reason"] for event in await place.events("talk")].count("Erased")

        await until(told, "the Event of the erasure")
        assert await told() == 1


async def test_a_session_that_was_not_ended_is_not_taken_for_ended(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        pod.keeps.add(uid)
        await place.change_session("talk", desiredState="Closed")

        async def asked_again() -> bool:
            return pod.calls.count("DELETE sessions/*") >= 2

        await until(asked_again, "it is asked again")
        assert (await place.status("talk"))["phase"] == "Ready"
        pod.keeps.clear()
        await place.phase("talk", "Ended")
        assert uid not in pod.sessions


async def test_only_a_pod_that_is_ready_is_asked_to_erase(place: Place) -> None:
    """One that starts may still be without the ledger."""
    await place.make_pool()
    pods = [await place.make_pod(name) for name in ("pod-a", "pod-b", "pod-c", "pod-d")]
    for starting in pods[1:]:
        starting.ready = False
    async with operating(place):
        await place.make_session("talk")
        await place.phase("talk", "Ready")
        await place.delete_session("talk")
        await place.gone("talk")
    assert [pod.calls.count("POST erase/*") for pod in pods] == [1, 0, 0, 0]


async def test_an_unreachable_ledger_never_holds_a_deletion(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    # Counted from a time in whole seconds, of which one may be over at once. It has to be ended
    # within the bound: only its erasure is not possible.
    async with operating(place, erase_bound_s=6.0) as operator:
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        pod.refuse["POST erase/*"] = (503, "ledger_unavailable")
        await place.delete_session("talk")
        await place.gone("talk")

        async def told() -> bool:
            """Told behind the finalizer, as above."""
            newest = (await place.events("talk"))[-1]
            return (newest["reason"], newest["type"]) == ("ErasurePending", "Warning")

        await until(told, "the Event of a pending erasure")
        assert await ledger_phase(redis, uid) == "ended"

        async def forgotten() -> bool:
            """Told by a watch, as the Event is by nobody."""
            return operator.reign.context.store.session_by_uid(uid) is None

        await until(forgotten, "the end of the session, in the operator's own view")
        pod.refuse.clear()
        assert await sweep_once(operator.reign.context) == 1
        assert await ledger_phase(redis, uid) == "erased"
        assert await sweep_once(operator.reign.context) == 0


async def test_a_refused_erasure_is_told_once_and_not_asked_for_all_the_time(place: Place) -> None:
    """A key of its ledger is none of ours, say: the next call will be refused, too."""
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place, erase_bound_s=8.0):
        await place.make_session("talk")
        await place.phase("talk", "Ready")
        pod.refuse["POST erase/*"] = (500, "ledger_corrupt")
        await place.delete_session("talk")
        await place.gone("talk")

        async def told() -> bool:
            newest = (await place.events("talk"))[-1]
            return (newest["action"], "rarely" in newest["note"]) == ("Reconcile", True)

        await until(told, "the Event of its end")
        reasons = [event["reason"] for event in await place.events("talk")]
        assert reasons.count("ErasureRefused") == 2, "refused for the first time, and at the end"
        assert 1 <= pod.calls.count("POST erase/*") <= 4


async def test_a_restarted_operator_leaves_live_sessions_alone(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    uids = []
    async with operating(place):
        uids = [await place.make_session("one"), await place.make_session("two")]
        await place.phase("one", "Ready")
        await place.phase("two", "Ready")
    pod.attach(uids[0])
    async with operating(place) as operator:
        await place.phase("one", "Active")
        await operator.reign.context.dirty.drained()
        assert (await place.status("two"))["phase"] == "Ready"
        assert pod.calls.count("PUT sessions/*") == 2
        assert operator.api.connection.requests["patch-status duplexsessions"] == 1
        assert operator.api.connection.requests["get secrets"] == 0


async def test_what_happened_without_an_operator_is_made_good(place: Place) -> None:
    await place.make_pool()
    first = await place.make_pod("pod-a")
    async with operating(place):
        uids = {name: await place.make_session(name) for name in ("ended", "parked")}
        for name in uids:
            await place.phase(name, "Ready")
    await first.end(uids["ended"], "max_duration")
    await first.park(uids["parked"], "client_away")
    async with operating(place):
        status = await place.phase("ended", "Ended")
        assert status["reason"] == "MaxDuration"
        status = await place.phase("parked", "Parked")
        assert status["reason"] == "ClientAway"
        assert "placement" not in status


async def test_a_parked_session_comes_back_for_its_client(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        await pod.park(uid, "client_away")
        status = await place.phase("talk", "Parked")
        assert status["lastPlacement"]["fence"] == 1

        await routed(redis, uid, SessionPhase.PARKED)
        await place.wake_session(redis, "talk", uid)
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 2


async def test_the_owner_parks_runs_and_closes(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        await place.change_session("talk", desiredState="Parked")
        status = await place.phase("talk", "Parked")
        assert status["reason"] == "Requested"
        await place.change_session("talk", desiredState="Running")
        await place.phase("talk", "Ready")
        assert uid in pod.sessions
        await place.change_session("talk", desiredState="Closed")
        status = await place.phase("talk", "Ended")
        assert (status["reason"], condition(status, "Ended")[0]) == ("Closed", "True")
        assert uid not in pod.sessions


async def test_a_draining_pods_client_goes_on_elsewhere(place: Place) -> None:
    await place.make_pool()
    first = await place.make_pod("pod-a")
    async with operating(place) as operator:
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        first.attach(uid)
        await place.phase("talk", "Active")
        second = await place.make_pod("pod-b")
        await operator.hears(second)
        await operator.reign.context.fleet.drain(first.pod_uid, 5)

        async def moved() -> bool:
            return uid in second.sessions

        await until(moved, "moved")
        status = await place.phase("talk", "Ready")
        assert status["placement"] == {"pod": "pod-b", "podUID": second.pod_uid, "fence": 2}


async def test_a_pod_without_room_sends_the_session_on(place: Place) -> None:
    await place.make_pool()
    full = await place.make_pod("pod-a")
    full.refuse["PUT sessions/*"] = (429, "no_slot")
    async with operating(place):
        uid = await place.make_session("talk")

        async def asked() -> bool:
            return full.calls.count("PUT sessions/*") > 0

        await until(asked, "asked")
        other = await place.make_pod("pod-b")
        await place.phase("talk", "Ready")
        assert uid in other.sessions


async def test_a_stale_fence_is_stepped_over(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    uid = await place.make_session("talk")
    meta = f"duplex:{{{uid}}}:meta"
    await cast("Any", redis.hset(meta, mapping={"fence": "41", "phase": "open", "until": "0"}))
    async with operating(place):
        status = await place.phase("talk", "Ready")
        assert status["placement"]["fence"] == 42 == pod.sessions[uid].fence


async def test_a_session_of_a_namespace_that_is_not_allowed_waits(place: Place) -> None:
    await place.make_pod("pod-a")
    async with operating(place):
        await place.make_session("talk")
        status = await place.phase("talk", "Pending")
        assert condition(status, "Accepted") == ("False", "PoolNotFound")
        await place.make_pool()
        await place.phase("talk", "Ready")


async def test_a_session_of_another_releases_pool_is_left_alone(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place) as running:
        context = running.reign.context
        await running.hears(pod)
        context.claims.note(place.pool_key, serves=False)
        await place.make_session("talk")

        async def seen() -> bool:
            found = context.store.sessions.get(ObjectKey(place.namespace, "talk"))
            return found is not None and not len(context.dirty)

        await until(seen, "the session, in the operator's own view")
        await context.dirty.drained()
        untouched = await place.session("talk")
        assert untouched is not None
        assert "status" not in untouched
        assert "finalizers" not in untouched["metadata"]
        context.claims.note(place.pool_key, serves=True)
        context.dirty.mark(Kind.SESSION, ObjectKey(place.namespace, "talk"))
        await place.phase("talk", "Ready")


async def test_the_users_own_token(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    reference = {"name": "mine", "key": "secret"}
    async with operating(place) as operator:
        uid = await place.make_session("talk", tokenSecretRef=reference)
        status = await place.phase("talk", "Pending")
        assert condition(status, "Accepted") == ("False", "TokenUnusable")
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "mine"},
            "stringData": {"secret": "a-token-of-the-user"},
        }
        await place.user.create(SECRETS, place.namespace, secret)
        status = await place.phase("talk", "Ready")
        assert status["tokenSecret"] == reference
        old, new = sha256("a-token-of-the-user"), sha256("another-token-of-the-user")
        assert pod.sessions[uid].token_sha256 == old
        change = {"stringData": {"secret": "another-token-of-the-user"}}
        await place.user.patch(SECRETS, ObjectKey(place.namespace, "mine"), change, version=None)
        await check_tokens(operator.reign.context, operator.reign.sessions)

        async def let_in() -> tuple[str, str | None]:
            record = await route_of(redis, uid)
            assert record is not None
            return record.token_sha256, record.token_sha256_next

        async def both() -> bool:
            return await let_in() == (old, new)

        await until(both, "both let in by the gateway")

        async def told() -> bool:
            return pod.sessions[uid].token_sha256 == new

        await until(told, "the new token told to the sidecar")
        assert await both()
        await pod.hear_under(uid, new)

        async def confirmed() -> bool:
            return await let_in() == (new, None)

        await until(confirmed, "the old one let in no more", timeout_s=10)


async def test_an_ended_session_goes_after_its_ttl(place: Place, redis: Redis) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("talk", lifecycle={"ttlAfterFinished": "8s"})
        await place.phase("talk", "Ready")
        await pod.end(uid, "idle_timeout")
        status = await place.phase("talk", "Ended")
        assert status["reason"] == "IdleTimeout"
        await place.gone("talk")
        assert await ledger_phase(redis, uid) == "erased"


async def test_a_deleted_pool_disturbs_nobody(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place) as operator:
        uid = await place.make_session("talk")
        await place.phase("talk", "Ready")
        pool = await place.user.get(POOLS, place.pool_key)
        await place.user.delete(POOLS, place.pool_key, uid=pool["metadata"]["uid"])
        pod.attach(uid)
        await place.phase("talk", "Active")

        async def forgotten() -> bool:
            return operator.reign.context.store.pools.get(place.pool_key) is None

        await until(forgotten, "the end of the pool, in the operator's own view")
        await place.make_session("late")
        status = await place.phase("late", "Pending")
        assert condition(status, "Accepted") == ("False", "PoolNotFound")
        assert operator.failure() is None
        assert uid in pod.sessions


async def test_an_edit_in_the_middle_of_placing(
    place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    operator = RunningOperator(place, KubernetesApi(ApiConnection(login(place.kubeconfig))))
    real, conflicts = operator.api.patch, 0

    async def patch(resource: Any, key: ObjectKey, body: Any, **named: Any) -> Any:
        nonlocal conflicts
        if named.get("subresource") == "status" and conflicts == 0:
            conflicts += 1
            labels = {"metadata": {"labels": {"edited": "yes"}}}
            await place.user.patch(SESSIONS, key, labels, version=None)
        return await real(resource, key, body, **named)

    monkeypatch.setattr(operator.api, "patch", patch)
    await operator.start()
    try:
        uid = await place.make_session("talk")
        status = await place.phase("talk", "Ready")
        assert conflicts == 1
        assert status["placement"]["fence"] == 1
        assert pod.calls.count("PUT sessions/*") == 1
        assert place.owner_of(uid) == ["pod-a"]
    finally:
        await operator.stop()


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_operator_killed_at_any_step_of_placing(
    place: Place, redis: Redis, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """Steps outward, one later each time, until a life of the operator is long enough."""
    await place.make_pool(slots=MOST_STEPS)
    pod = await place.make_pod("pod-a", slots=MOST_STEPS)
    step, killed_at = 0, list[str]()
    while True:
        step += 1
        name = f"talk-{step}"
        first = RunningOperator(place, KubernetesApi(ApiConnection(login(place.kubeconfig))))
        reaper = Reaper(step, after=after)
        reaper.watch(first, monkeypatch.setattr)
        await first.start()
        await first.watching()
        await first.hears(pod)
        uid = await place.make_session(name)

        async def over(name: str = name, uid: str = uid, reaper: Reaper = reaper) -> bool:
            return reaper.dead.is_set() or (
                len(await place.events(name)) > 0
                and (record := await route_of(redis, uid)) is not None
                and record.phase == SessionPhase.READY
            )

        await until(over, "killed, or ready")
        await first.stop()
        if not reaper.dead.is_set():
            break
        killed_at.append(reaper.steps[-1])
        async with operating(place):
            status = await place.phase(name, "Ready")
            record = await routed(redis, uid, SessionPhase.READY)
        assert place.owner_of(uid) == ["pod-a"]
        assert pod.sessions[uid].fence == status["placement"]["fence"]
        token = sha256(await token_of(place, status))
        assert record.token_sha256 == token == pod.sessions[uid].token_sha256
    # The finalizer, the token, its route record, the placement, the sidecar, Ready, the Event.
    assert {"patch", "create", "route-write", "sidecar-put_session"} == set(killed_at)
    assert killed_at.count("patch") == 3
    assert killed_at.count("create") == 2
    assert len(pod.sessions) == step


MOVING = ("patch", "sidecar-prepare", "sidecar-hand_over", "patch", "create")
"""The steps outward of handing one over: the placement, the two calls, Ready, its Event."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_operator_killed_at_any_step_of_handing_over(
    place: Place, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    await place.make_pool()
    first, second = [await place.make_pod(name, slots=8) for name in ("pod-a", "pod-b")]
    for step, _ in enumerate(MOVING, start=1):
        name = f"talk-{step}"
        await place.mark_pods(draining="pod-b", staying="pod-a")
        async with operating(place):
            uid = await place.make_session(name)
            await place.phase(name, "Ready")
            first.attach(uid)
            await place.phase(name, "Active")
        killed = RunningOperator(place, KubernetesApi(ApiConnection(login(place.kubeconfig))))
        reaper = Reaper(step, after=after, passing={"route-write"})
        reaper.watch(killed, monkeypatch.setattr)
        await killed.start()
        await killed.watching()
        await killed.hears(first, second)
        await place.mark_pods(draining="pod-a", staying="pod-b")
        await asyncio.wait_for(reaper.dead.wait(), WAIT_S)
        await killed.stop()
        assert reaper.steps == list(MOVING[:step])
        async with operating(place):
            status = await place.phase(name, "Ready")
        assert place.owner_of(uid) == ["pod-b"]
        placement = status["placement"]
        assert (placement["pod"], placement["fence"]) == ("pod-b", second.sessions[uid].fence)
        assert first.calls.count("POST sessions/*/park", uid) == 0, "it never had to wait"


LEAVING = ("sidecar-end", "sidecar-erase", "route-drop", "patch", "create")
"""The steps outward of deleting one."""


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_an_operator_killed_at_any_step_of_deleting(
    place: Place, redis: Redis, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    for step, _ in enumerate(LEAVING, start=1):
        async with operating(place):
            uid = await place.make_session(f"talk-{step}")
            await place.phase(f"talk-{step}", "Ready")
        killed = RunningOperator(place, KubernetesApi(ApiConnection(login(place.kubeconfig))))
        reaper = Reaper(step, after=after, passing={"route-write"})
        reaper.watch(killed, monkeypatch.setattr)
        await killed.start()
        await killed.watching()
        await killed.hears(pod)
        await place.delete_session(f"talk-{step}")
        await asyncio.wait_for(reaper.dead.wait(), WAIT_S)
        await killed.stop()
        assert reaper.steps == list(LEAVING[:step])
        async with operating(place):
            await place.gone(f"talk-{step}")
        assert await ledger_phase(redis, uid) == "erased"
        assert await route_of(redis, uid) is None
        assert not pod.sessions
