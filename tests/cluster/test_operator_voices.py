"""Voices of Secrets and ConfigMaps: a real API server, stand-in sidecars."""

import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest
from support.api_servers import ApiServer
from support.operators import Place, operating, placed, until

from duplex_api.given_voices import given_voice_name
from duplex_operator.kube.resources import CONFIG_MAPS, SECRETS, Resource
from duplex_operator.names import LABEL_VOICE
from duplex_operator.objects import ObjectKey
from duplex_sidecar.ledger.embedded import EmbeddedValkey

pytestmark = pytest.mark.cluster

VOICE = b"what a voice file holds"
LABELLED = {LABEL_VOICE: "true"}


@pytest.fixture
async def place(
    api_server: ApiServer, api_namespace: str, valkey: EmbeddedValkey
) -> AsyncIterator[Place]:
    async with placed(api_server.kubeconfig, valkey.url, api_namespace) as place:
        yield place


async def make(place: Place, resource: Resource, name: str, labels: dict[str, str]) -> None:
    kind, field = {SECRETS: ("Secret", "data"), CONFIG_MAPS: ("ConfigMap", "binaryData")}[resource]
    body: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": kind,
        "metadata": {"name": name, "labels": labels},
        field: {"calm.safetensors": base64.b64encode(VOICE).decode()},
    }
    await place.user.create(resource, place.namespace, body)


async def refused(place: Place, name: str, sentence: str) -> None:
    """It takes no slot, and says why."""

    async def told() -> bool:
        status = await place.status(name)
        return status.get("reason") == "VoiceUnusable" and sentence in status["message"]

    await until(told, f"a status of {name} that says {sentence!r}")
    status = await place.status(name)
    assert status["phase"] == "Pending"
    assert "placement" not in status


@pytest.mark.parametrize(
    ("resource", "source"), [(SECRETS, "secretRef"), (CONFIG_MAPS, "configMapRef")]
)
async def test_the_file_goes_with_the_session_wherever_it_goes(
    place: Place, resource: Resource, source: str
) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    await make(place, resource, "mine", LABELLED)
    async with operating(place):
        uid = await place.make_session("talk", voice={source: {"name": "mine"}})
        await place.phase("talk", "Ready")
        assert pod.sessions[uid].voice_file == VOICE
        assert pod.sessions[uid].manifest["spec"]["voice"] == {"name": given_voice_name(VOICE)}
        other = await place.make_pod("pod-b")
        await place.kill_pod("pod-a")

        async def moved() -> bool:
            return uid in other.sessions

        await until(moved, "the other pod")
        assert other.sessions[uid].voice_file == VOICE


async def test_the_file_goes_along_when_the_session_is_handed_over(place: Place) -> None:
    await place.make_pool()
    pod, other = [await place.make_pod(name) for name in ("pod-a", "pod-b")]
    await make(place, SECRETS, "mine", LABELLED)
    await place.mark_pods(draining="pod-b", staying="pod-a")
    async with operating(place):
        uid = await place.make_session("talk", voice={"secretRef": {"name": "mine"}})
        await place.phase("talk", "Ready")
        pod.attach(uid)
        await place.phase("talk", "Active")
        await place.mark_pods(draining="pod-a", staying="pod-b")

        async def moved() -> bool:
            return uid in other.sessions

        await until(moved, "the other pod")
        assert other.sessions[uid].voice_file == VOICE
        assert other.sessions[uid].manifest["spec"]["voice"] == {"name": given_voice_name(VOICE)}
        assert other.calls.count("POST sessions/*/prepare", uid) == 1
        assert pod.calls.count("POST sessions/*/hand-over", uid) == 1
        assert pod.calls.count("POST sessions/*/park", uid) == 0


async def test_what_is_not_labelled_is_nobodys_voice(place: Place) -> None:
    """A session's creator may not be somebody who may read Secrets."""
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    await make(place, SECRETS, "private", {})
    async with operating(place):
        uid = await place.make_session("thief", voice={"secretRef": {"name": "private"}})
        await refused(place, "thief", "does not carry the label")
        assert uid not in pod.sessions
        change = {"metadata": {"labels": LABELLED}}
        key = ObjectKey(place.namespace, "private")
        await place.user.patch(SECRETS, key, change, version=None)
        await place.phase("thief", "Ready")
        assert pod.sessions[uid].voice_file == VOICE


async def test_a_voice_that_is_not_there_yet(place: Place) -> None:
    await place.make_pool()
    pod = await place.make_pod("pod-a")
    async with operating(place):
        uid = await place.make_session("early", voice={"configMapRef": {"name": "later"}})
        await refused(place, "early", "there is no ConfigMap later")
        await make(place, CONFIG_MAPS, "later", LABELLED)
        await place.phase("early", "Ready")
        assert pod.sessions[uid].voice_file == VOICE


@pytest.mark.long
async def test_a_voice_that_has_gone_before_a_move(place: Place) -> None:
    await place.make_pool()
    await place.make_pod("pod-a")
    await make(place, SECRETS, "mine", LABELLED)
    async with operating(place):
        uid = await place.make_session("talk", voice={"secretRef": {"name": "mine"}})
        await place.phase("talk", "Ready")
        key = ObjectKey(place.namespace, "mine")
        secret = await place.user.get(SECRETS, key)
        await place.user.delete(SECRETS, key, uid=secret["metadata"]["uid"])
        other = await place.make_pod("pod-b")
        await place.kill_pod("pod-a")

        async def told() -> bool:
            return "there is no Secret mine" in (await place.status("talk")).get("message", "")

        await until(told, "what is missing")
        await make(place, SECRETS, "mine", LABELLED)

        async def moved() -> bool:
            return uid in other.sessions

        await until(moved, "the other pod")
        assert other.sessions[uid].voice_file == VOICE
