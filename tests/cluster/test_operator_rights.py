"""An operator with exactly the chart's rights goes through a life in which it needs every one of
them, by the API server's own record of who asked for what."""

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml
from support.api_servers import ApiServer, running_api_server
from support.kube import restricted_namespace
from support.operators import Place, login, until
from support.stand_in_pods import StandInPods

from duplex_api.constants import API_GROUP
from duplex_operator.kube.api import KubernetesApi
from duplex_operator.kube.connection import ApiConnection
from duplex_operator.kube.resources import CONFIG_MAPS, PODS, POOLS, SECRETS, SESSIONS
from duplex_operator.leader import Leader
from duplex_operator.names import LABEL_VOICE
from duplex_operator.objects import ObjectKey
from duplex_operator.reign import Reign
from duplex_operator.settings import OperatorSettings
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

GOLDEN = Path(__file__).parents[1] / "unit" / "charts" / "golden" / "defaults.yaml"
NAMESPACE, ACCOUNT = "rights", "operator"
USER = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
POLICY = {
    "apiVersion": "audit.k8s.io/v1",
    "kind": "Policy",
    "rules": [{"level": "Metadata", "users": [USER]}, {"level": "None"}],
}
Json = dict[str, Any]


class Right(NamedTuple):
    group: str
    resource: str
    verb: str


BLOCKS_OWNERS = {
    Right(API_GROUP, f"{plural}/finalizers", "update")
    for plural in ("duplexpools", "duplexsessions")
}
"""Never called: some clusters ask for it when an owner reference says blockOwnerDeletion."""


def charts_roles() -> list[Json]:
    """The operator's, as the chart renders them, in our namespace."""
    with GOLDEN.open(encoding="utf-8") as text:
        objects = list(yaml.safe_load_all(text))
    roles = [
        each
        for each in objects
        if each["kind"] in ("Role", "ClusterRole") and "operator" in each["metadata"]["name"]
    ]
    assert [role["kind"] for role in roles] == ["ClusterRole", "Role"]
    for role in roles:
        role["metadata"] = {"name": role["metadata"]["name"].replace(":", "-")}
        if role["kind"] == "Role":
            role["metadata"]["namespace"] = NAMESPACE
    return roles


def bindings(roles: list[Json]) -> list[Json]:
    subject = {"kind": "ServiceAccount", "name": ACCOUNT, "namespace": NAMESPACE}
    return [
        {
            "apiVersion": "rbac.authorization.k8s.io/v1",
            "kind": f"{role['kind']}Binding",
            "metadata": role["metadata"],
            "roleRef": {
                "apiGroup": "rbac.authorization.k8s.io",
                "kind": role["kind"],
                "name": role["metadata"]["name"],
            },
            "subjects": [subject],
        }
        for role in roles
    ]


def granted(roles: list[Json]) -> set[Right]:
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def asked(audit: Path) -> dict[Right, set[int]]:
    """What the operator has asked for, and the answers' codes."""
    found: dict[Right, set[int]] = {}
    for line in audit.read_text(encoding="utf-8").splitlines():
        event = json.loads(line)
        what, code = event.get("objectRef"), event.get("responseStatus", {}).get("code", 0)
        if what is None:
            continue  # what the server serves at all: everybody may ask
        parts = (what.get("resource", ""), what.get("subresource", ""))
        right = Right(what.get("apiGroup", ""), "/".join(filter(None, parts)), event["verb"])
        found.setdefault(right, set()).add(code)
    return found


@pytest.fixture
def valkey(tmp_path: Path) -> Iterator[EmbeddedValkey]:
    server = EmbeddedValkey(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


class Rights:
    """The API server that writes everything down, and the account."""

    def __init__(self, server: ApiServer, folder: Path) -> None:
        self.server = server
        self.audit = folder / "audit.log"
        self.roles = charts_roles()
        self.kubeconfig = folder / "kubeconfig"
        account = {"name": ACCOUNT, "namespace": NAMESPACE}
        server.apply(
            [
                restricted_namespace(NAMESPACE),
                {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": account},
                *self.roles,
                *bindings(self.roles),
            ]
        )
        # Of the one role and of the other: what is asked for too early counts as refused.
        for verb, resource in (("list", "nodes"), ("get", "leases/duplex-operator")):
            server.await_right(USER, verb, resource, NAMESPACE)
        config = yaml.safe_load(server.kubeconfig.read_text())
        config["users"][0]["user"] = {"token": server.token_for(ACCOUNT, NAMESPACE)}
        self.kubeconfig.write_text(yaml.safe_dump(config))

    @asynccontextmanager
    async def leading(self, redis_url: str, identity: str) -> AsyncIterator[KubernetesApi]:
        """An operator that leads. Its way out to Kubernetes, for what shall go wrong there."""
        settings = OperatorSettings(
            redis_url=redis_url,
            namespace=NAMESPACE,
            identity=identity,
            sidecar_image="duplex/sidecar:1",
            secrets_period_s=1.0,
        )
        connection = ApiConnection(login(self.kubeconfig))
        lease = ObjectKey(NAMESPACE, settings.lease_name)
        leader = Leader(KubernetesApi(connection), lease, identity)
        api = KubernetesApi(connection, may_write=lambda: leader.leads)
        reign = Reign(settings, api)
        work = asyncio.create_task(leader.run(reign.run))
        try:
            yield api
            assert not work.done()
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await connection.close()


@pytest.fixture
def rights(tmp_path: Path) -> Iterator[Rights]:
    policy = tmp_path / "policy.yaml"
    policy.write_text(yaml.safe_dump(POLICY))
    flags = (f"--audit-policy-file={policy}", f"--audit-log-path={tmp_path / 'audit.log'}")
    with running_api_server(*flags, "--audit-log-mode=blocking") as server:
        server.install_crds()
        yield Rights(server, tmp_path)


def lose_an_answer(api: KubernetesApi, user: KubernetesApi, patch: Any) -> None:
    """The first pod's creation is sent twice, as after a lost answer, and the first session is
    edited by somebody else while its placement is written."""
    create, change, done = api.create, api.patch, set[str]()

    async def creating(resource: Any, namespace: str, body: Any) -> Any:
        if resource is PODS and "pod" not in done:
            done.add("pod")
            await create(resource, namespace, body)
        return await create(resource, namespace, body)

    async def changing(resource: Any, key: ObjectKey, body: Any, **named: Any) -> Any:
        if resource is SESSIONS and named.get("subresource") and "session" not in done:
            done.add("session")
            labels = {"metadata": {"labels": {"edited": "yes"}}}
            await user.patch(SESSIONS, key, labels, version=None)
        return await change(resource, key, body, **named)

    patch(api, "create", creating)
    patch(api, "patch", changing)


async def test_every_right_is_needed_and_none_is_missing(
    rights: Rights, valkey: EmbeddedValkey, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubelet = StandInPods(rights.server.kubeconfig, valkey.url, NAMESPACE, 4)
    user = KubernetesApi(ApiConnection(login(rights.server.kubeconfig)))
    place = Place(user, rights.server.kubeconfig, valkey.url, NAMESPACE, pods=kubelet.pods)
    work = asyncio.create_task(kubelet.run())
    try:
        async with rights.leading(valkey.url, "first") as api:
            lose_an_answer(api, user, monkeypatch.setattr)
            await live(place, api)
        # Another ledger: the pool's Secret is written again, and its budget made anew.
        async with rights.leading(valkey.url.removesuffix("/0") + "/1", "second") as api:

            async def moved() -> bool:
                written = ("patch secrets", "patch poddisruptionbudgets")
                return all(api.connection.requests[what] for what in written)

            await until(moved, "the Secret and the budget")
        assert not work.done()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await kubelet.close()
        await user.connection.close()
    used = asked(rights.audit)
    assert {right for right, codes in used.items() if 403 in codes} == set()
    assert granted(rights.roles) - set(used) == BLOCKS_OWNERS
    assert set(used) <= granted(rights.roles)


async def live(place: Place, api: KubernetesApi) -> None:
    """Pods come and go, and sessions with a token of the operator's, of the user's, with a voice of
    their own, and with a short time to live."""
    await place.make_pool(slots=4, replicas=2)
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "mine"},
        "stringData": {"token": "a-token-of-the-user"},
    }
    await place.user.create(SECRETS, place.namespace, secret)
    voice = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "calm", "labels": {LABEL_VOICE: "true"}},
        "binaryData": {"calm.safetensors": base64.b64encode(b"a voice file").decode()},
    }
    await place.user.create(CONFIG_MAPS, place.namespace, voice)
    await place.make_session("talk", voice={"configMapRef": {"name": "calm"}})
    await place.make_session("named", tokenSecretRef={"name": "mine"})
    uid = await place.make_session("brief", lifecycle={"ttlAfterFinished": "1s"})
    for name in ("talk", "named", "brief"):
        await place.phase(name, "Ready")
    await place.pods[place.owner_of(uid)[0]].end(uid, "max_duration")
    await place.gone("brief")
    await place.delete_session("talk")
    await place.gone("talk")
    await place.user.patch(POOLS, place.pool_key, {"spec": {"replicas": 1}}, version=None)

    async def smaller() -> bool:
        return len((await place.user.list(PODS, place.namespace)).items) == 1

    await until(smaller, "one pod")

    async def looked_at() -> bool:
        return api.connection.requests["list secrets"] > 0

    await until(looked_at, "a look at the tokens")
