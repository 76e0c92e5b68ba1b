"""What goes wrong around a running operator: the API server is away, objects go or change at the
wrong moment, somebody writes what was never meant to be written."""

import asyncio
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from redis.asyncio import Redis
from support.api_servers import ApiServer, running_api_server
from support.operator_processes import Process, operator
from support.operators import Place, RunningOperator, login, operating, placed, until
from support.stand_in_pods import StandInPods

from duplex_api.routes import RouteRecord, route_key
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.errors import ApiError, MissingError, RefusedError
from duplex_operator.kube.resources import EVENTS, PODS, POOLS, SECRETS, SESSIONS
from duplex_operator.objects import ObjectKey
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

AWAY_S = 30.0
BACK_S = 60.0
"""Leases of leadership, watches and lists start over within this."""
COLLECTED_S = 120.0
"""Kubernetes' garbage collector looks for new kinds every 30 s."""
ENDING = ("POST sessions/*/park", "DELETE sessions/*", "POST drain", "POST erase/*")


@pytest.fixture(scope="module")
def frail() -> Iterator[ApiServer]:
    """One of these tests' own: nobody else shall miss it."""
    with running_api_server() as server:
        server.install_crds()
        yield server


@pytest.fixture
async def place(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> AsyncIterator[Place]:
    async with placed(api_server.kubeconfig, valkey.url, api_namespace) as place:
        yield place


@asynccontextmanager
async def with_kubelet(
    server: ApiServer, namespace: str, redis_url: str, slots: int
) -> AsyncIterator[Place]:
    """A place whose pods are made by the operator and run by a stand-in of a kubelet."""
    kubelet = StandInPods(server.kubeconfig, redis_url, namespace, slots)
    user = KubernetesApi(ApiConnection(login(server.kubeconfig)))
    place = Place(user, server.kubeconfig, redis_url, namespace, pods=kubelet.pods)
    work = asyncio.create_task(kubelet.run())
    try:
        yield place
        assert not work.done()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await kubelet.close()
        await user.connection.close()


async def leading(process: Process) -> None:
    async def leads() -> bool:
        return await asyncio.to_thread(process.leads)

    await until(leads, "an operator that leads")


def runs(place: Place, uid: str) -> bool:
    return bool(place.owner_of(uid))


def asked(place: Place, verb: str, uid: str = "") -> int:
    return sum(pod.calls.count(verb, uid) for pod in place.pods.values())


@pytest.mark.parametrize("how", ["hangs", "is-killed"])
@pytest.mark.long
async def test_the_api_server_is_away_for_half_a_minute(
    frail: ApiServer, valkey: EmbeddedValkey, how: str
) -> None:
    """Sessions go on, nobody is asked to stop one, and then the status tells what has happened."""
    with frail.namespace() as namespace, operator(frail, namespace, valkey.url) as process:
        await leading(process)
        async with with_kubelet(frail, namespace, valkey.url, slots=4) as place:
            await place.make_pool(slots=4, replicas=2)
            uids = {name: await place.make_session(name) for name in ("talks", "comes", "ends")}
            before = {name: await place.phase(name, "Ready") for name in uids}
            sidecars = {name: place.pods[place.owner_of(uid)[0]] for name, uid in uids.items()}
            sidecars["talks"].attach(uids["talks"])
            await place.phase("talks", "Active")
            if how == "hangs":
                frail.pause()
            else:
                frail.kill()
            sidecars["comes"].attach(uids["comes"])
            await sidecars["ends"].end(uids["ends"], "max_duration")
            await asyncio.sleep(AWAY_S)
            assert runs(place, uids["talks"])
            assert runs(place, uids["comes"])
            assert [verb for verb in ENDING if asked(place, verb)] == []
            if how == "hangs":
                frail.resume()
            else:
                await asyncio.to_thread(frail.restart)
            assert (await place.phase("ends", "Ended", timeout_s=BACK_S))["reason"] == "MaxDuration"
            for name in ("talks", "comes"):
                status = await place.phase(name, "Active", timeout_s=BACK_S)
                assert status["placement"] == before[name]["placement"]
                assert asked(place, "PUT sessions/*", uids[name]) == 1
            await place.make_session("late")
            await place.phase("late", "Ready", timeout_s=BACK_S)
            assert process.process.poll() is None


async def test_a_pool_goes_under_live_sessions_and_comes_again(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> None:
    with operator(api_server, api_namespace, valkey.url) as process:
        await leading(process)
        async with with_kubelet(api_server, api_namespace, valkey.url, slots=2) as place:
            await place.make_pool(replicas=1)
            uid = await place.make_session("talk")
            first = await place.phase("talk", "Ready")
            (pod,) = place.pods.values()
            pod.attach(uid)
            await place.phase("talk", "Active")
            pool = await place.user.get(POOLS, place.pool_key)
            await place.user.delete(POOLS, place.pool_key, uid=pool["metadata"]["uid"])
            status = await place.phase("talk", "Pending", timeout_s=COLLECTED_S)
            assert status["reason"] == "PoolNotFound"
            assert "placement" not in status
            assert status["lastPlacement"] == first["placement"]

            async def collected() -> bool:
                """Its Secret, too: one of another pool by this name would be left alone."""
                secret = ObjectKey(place.namespace, f"{place.pool}-admin")
                try:
                    await place.user.get(SECRETS, secret)
                except MissingError:
                    return not place.pods
                return False

            await until(collected, "the end of what was its own", COLLECTED_S)
            await place.make_pool(replicas=1)
            status = await place.phase("talk", "Ready")
            assert status["placement"]["fence"] > first["placement"]["fence"]
            assert len(place.owner_of(uid)) == 1


@pytest.mark.parametrize("wish", ["Parked", "Closed"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
async def test_a_session_is_taken_back_while_it_is_placed(
    place: Place, monkeypatch: pytest.MonkeyPatch, wish: str, after: bool
) -> None:
    """Right before its placement is written, and right after. No slot is left behind."""
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    running = RunningOperator(place, KubernetesApi(ApiConnection(login(place.kubeconfig))))
    real, edits = running.api.patch, list[str]()

    async def patch(resource: Any, key: ObjectKey, body: Any, **named: Any) -> Any:
        placing = resource is SESSIONS and "placement" in body.get("status", {}) and not edits
        if placing:
            edits.append(key.name)
        if placing and not after:
            await place.change_session(key.name, desiredState=wish)
        answer = await real(resource, key, body, **named)
        if placing and after:
            await place.change_session(key.name, desiredState=wish)
        return answer

    monkeypatch.setattr(running.api, "patch", patch)
    await running.start()
    try:
        uid = await place.make_session("talk")
        status = await place.phase("talk", "Parked" if wish == "Parked" else "Ended")
        assert edits == ["talk"]
        assert status["reason"] == ("Requested" if wish == "Parked" else "Closed")
        assert "placement" not in status
        assert uid not in pod.sessions
        others = [await place.make_session(name) for name in ("one", "two")]
        for name in ("one", "two"):
            await place.phase(name, "Ready")
        assert set(pod.sessions) == set(others)
        assert running.failure() is None
    finally:
        await running.stop()


HOSTILE = {
    "escapes": "\x1b[31mred\x1b[0m\x07\x08",
    "lines": "one\r\n---\nkind: Secret\n...\n",
    "yaml": "!!python/object/apply:os.system ['id'] &a *a # : {",
    "templates": "{{ .Values }} {% x %} ${jndi:ldap://x} %s %(x)s {0} `id` $(id)",
    "ledger": "duplex:{x}:route\r\nFLUSHALL\r\n*1\r\n",
    "json": '"}],"phase":"Ended","x":[{"',
    "unicode": "\u202eevil\u2066\u2028\u2029\ufeff\x7f\x85\u0000\ufffe\U0001f9e8",
    "long": "\u20ac" * 32_768,
}


async def test_hostile_strings_stay_strings(
    place: Place, valkey: EmbeddedValkey, caplog: pytest.LogCaptureFixture
) -> None:
    """What a user writes comes to the sidecar as it was written, and into no log and no Event."""
    caplog.set_level(logging.DEBUG, "duplex_operator")
    await place.make_pool(slots=len(HOSTILE))
    pod = await place.make_pod("pod-a", slots=len(HOSTILE))
    async with operating(place), Redis.from_url(valkey.url, decode_responses=True) as redis:
        uids = {
            name: await place.make_session(name, prompt=prompt) for name, prompt in HOSTILE.items()
        }
        for name, prompt in HOSTILE.items():
            key = ObjectKey(place.namespace, name)
            note = {"metadata": {"annotations": {"example.org/note": prompt[:256]}}}
            await place.user.patch(SESSIONS, key, note, version=None)
            await place.phase(name, "Ready")
            assert pod.sessions[uids[name]].manifest["spec"]["prompt"] == prompt
            record = RouteRecord.from_hash(await redis.hgetall(route_key(uids[name])))
            assert record is not None
            assert record.session == f"{place.namespace}/{name}"
        # A sidecar that lies, too.
        await pod.end(uids["escapes"], "\x1b[2J\n{{}}" + "yé" * 2_000)
        status = await place.phase("escapes", "Ended")
        assert status["reason"].isalnum()

        async def ending_told() -> bool:
            events = await place.events("escapes")
            return any(event["reason"] == status["reason"] for event in events)

        await until(ending_told, "the Event of its end")
        told = str(
            [event["note"] for event in (await place.user.list(EVENTS, place.namespace)).items]
        )
        for text in (caplog.text, told):
            assert not [word for word in ("FLUSHALL", "jndi", "\u20ac\u20ac") if word in text]
        assert "\x1b" not in told


REFUSED_FIELDS: tuple[dict[str, Any], ...] = (
    {"poolRef": {"name": "../../other"}},
    {"poolRef": {"name": "pool", "namespace": "a/b"}},
    {"tokenSecretRef": {"name": "a/../b"}},
    {"tokenSecretRef": {"name": "mine", "key": "../token"}},
    {"voice": {"name": "../../etc/passwd"}},
    {"prompt": "x" * 32_769},
    {"windowPreset": "a\nb"},
    {"desiredState": "Running\n"},
)


@pytest.mark.parametrize("field", REFUSED_FIELDS, ids=lambda field: next(iter(field)))
async def test_what_names_something_is_no_free_text(place: Place, field: dict[str, Any]) -> None:
    with pytest.raises(RefusedError) as refused:
        await place.make_session("talk", **field)
    assert refused.value.status == 422


NEIGHBOUR = "neighbour"


@asynccontextmanager
async def as_neighbour(
    server: ApiServer, namespace: str, folder: Path
) -> AsyncIterator[KubernetesApi]:
    """Somebody who may do everything in this namespace, and nothing anywhere else."""
    grant = ("create", "rolebinding", NEIGHBOUR, "--clusterrole=cluster-admin")
    account = f"--serviceaccount={namespace}:{NEIGHBOUR}"
    server.kubectl("create", "serviceaccount", NEIGHBOUR, namespace=namespace)
    server.kubectl(*grant, account, namespace=namespace)
    config = yaml.safe_load(server.kubeconfig.read_text())
    config["users"][0]["user"] = {"token": server.token_for(NEIGHBOUR, namespace)}
    kubeconfig = folder / "neighbour"
    kubeconfig.write_text(yaml.safe_dump(config))
    api = KubernetesApi(ApiConnection(login(kubeconfig)))

    async def granted() -> bool:
        """The API server learns of a binding a moment after it has taken it."""
        try:
            await api.list(SESSIONS, namespace)
        except RefusedError:
            return False
        return True

    try:
        await until(granted, "the rights of the neighbour")
        yield api
    finally:
        await api.connection.close()


async def test_a_neighbour_reaches_nothing_here(
    place: Place, api_server: ApiServer, valkey: EmbeddedValkey, tmp_path: Path
) -> None:
    """All rights in a namespace, against the session, the Secret and the pool of another one."""
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    with api_server.namespace("guest") as guest:
        async with (
            as_neighbour(api_server, guest, tmp_path) as user,
            operating(place, watch_namespaces=(place.namespace, guest)),
            Redis.from_url(valkey.url, decode_responses=True) as redis,
        ):
            uid = await place.make_session("private")
            mine = await place.phase("private", "Ready")
            for resource, name in (
                (SESSIONS, "private"),
                (SECRETS, "private-token"),
                (POOLS, place.pool),
                (PODS, "pod-a"),
            ):
                key = ObjectKey(place.namespace, name)
                tries = (
                    user.get(resource, key),
                    user.list(resource, place.namespace),
                    user.patch(resource, key, {"metadata": {"labels": {"a": "b"}}}, version=None),
                    user.delete(resource, key, uid="x"),
                )
                for trying in tries:
                    with pytest.raises(ApiError) as refused:
                        await trying
                    assert refused.value.status == 403, (resource.plural, refused.value)
            # What they make in their own namespace leads no further: the pool takes none of theirs,
            thief = Place(user, place.kubeconfig, place.redis_url, guest)
            there = {"name": place.pool, "namespace": place.namespace}
            own = await thief.make_session("thief", poolRef=there)
            assert (await thief.phase("thief", "Pending"))["reason"] == "NamespaceNotAllowed"
            # a status that they forge opens none, and moves nobody else's,
            key = ObjectKey(guest, "thief")
            for phase in ("Queued", "Active"):
                forged = {"placement": mine["placement"], "ledgerId": uid, "phase": phase}
                status = {"status": forged}
                await user.patch(SESSIONS, key, status, version=None, subresource="status")

                async def corrected() -> bool:
                    status = await thief.status("thief")
                    said = status.get("phase"), status.get("reason"), status.get("ledgerId")
                    return (
                        said == ("Pending", "NamespaceNotAllowed", own)
                        and "placement" not in status
                    )

                await until(corrected, "its own ledger, no slot, and why")
            assert asked(place, "PUT sessions/*", own) == 0
            # and where the pool takes theirs, a Secret is looked for in their own namespace alone.
            allowed = {"spec": {"allowedNamespaces": {"from": "Listed", "names": [guest]}}}
            await place.user.patch(POOLS, place.pool_key, allowed, version=None)
            reference = {"name": "private-token", "key": "token"}
            await thief.make_session("reader", poolRef=there, tokenSecretRef=reference)

            async def unusable() -> bool:
                return (await thief.status("reader")).get("reason") == "TokenUnusable"

            await until(unusable, "no such Secret there")
            for name in ("thief", "reader"):
                await thief.delete_session(name)
                await thief.gone(name)
            record = RouteRecord.from_hash(await redis.hgetall(route_key(uid)))
            assert record is not None
            assert record.token_sha256 == pod.sessions[uid].token_sha256
            assert (await place.status("private"))["placement"] == mine["placement"]
            assert pod.calls.count("DELETE sessions/*", uid) == 0
            assert pod.calls.count("POST erase/*", uid) == 0
