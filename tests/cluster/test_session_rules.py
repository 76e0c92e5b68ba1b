"""What a real API server lets be changed in a DuplexSession: the CEL rules of the generated CRD."""

import pytest
from support.api_servers import ApiServer
from support.kube import Json, KubeError, until

from duplex_api.constants import API_GROUP, API_VERSION, SESSION_KIND, SESSION_PLURAL
from duplex_api.crd import session_crd
from duplex_api.session import IMMUTABLE_SESSION_FIELDS
from duplex_operator.names import SESSION_FINALIZER

pytestmark = pytest.mark.cluster

VALUES: dict[str, object] = {
    "poolRef": {"name": "pool"},
    "windowPreset": "long",
    "window": {"mode": "basic"},
    "prompt": "You are kind.",
    "initialText": "Hello.",
    "voice": {"name": "calm"},
    "camera": {"framesPerUnit": 1},
    "output": {"modalities": ["audio", "text"]},
    "sampling": {"greedy": True},
    "tokenSecretRef": {"name": "token"},
}
"""One lawful value of each field that must not change."""
OTHERS: dict[str, object] = {
    "poolRef": {"name": "other"},
    "windowPreset": "short",
    "window": {"mode": "off"},
    "prompt": "You are not.",
    "initialText": "Bye.",
    "voice": {"name": "loud"},
    "camera": {"framesPerUnit": 2},
    "output": {"audioFormat": "pcm"},
    "sampling": {"greedy": False},
    "tokenSecretRef": {"name": "mine"},
}
REQUIRED = "poolRef"


def manifest(name: str, spec: Json) -> Json:
    metadata = {"name": name}
    whole = {REQUIRED: VALUES[REQUIRED], **spec}
    return {"apiVersion": API_VERSION, "kind": SESSION_KIND, "metadata": metadata, "spec": whole}


def test_every_immutable_field_is_looked_at() -> None:
    camel = [field.split("_") for field in IMMUTABLE_SESSION_FIELDS]
    names = {first + "".join(map(str.title, rest)) for first, *rest in camel}
    assert names == set(VALUES) == set(OTHERS)


@pytest.mark.parametrize("field", VALUES)
def test_an_immutable_field_cannot_be_changed(
    api_server: ApiServer, api_namespace: str, field: str
) -> None:
    api_server.create(manifest("talk", {field: VALUES[field]}), api_namespace)
    with pytest.raises(KubeError, match="cannot be changed"):
        api_server.patch("dxs", "talk", {"spec": {field: OTHERS[field]}}, api_namespace)


@pytest.mark.parametrize("field", [field for field in VALUES if field != REQUIRED])
def test_an_immutable_field_cannot_be_removed_or_added(
    api_server: ApiServer, api_namespace: str, field: str
) -> None:
    """Else it could be changed in two steps."""
    api_server.create(manifest("with", {field: VALUES[field]}), api_namespace)
    api_server.create(manifest("without", {}), api_namespace)
    with pytest.raises(KubeError, match="cannot be changed"):
        api_server.patch("dxs", "with", {"spec": {field: None}}, api_namespace)
    with pytest.raises(KubeError, match="cannot be changed"):
        api_server.patch("dxs", "without", {"spec": {field: OTHERS[field]}}, api_namespace)


@pytest.mark.parametrize("one", ["audio", "text"])
def test_replies_come_with_sound_and_transcript(
    api_server: ApiServer, api_namespace: str, one: str
) -> None:
    with pytest.raises(KubeError, match="name both audio and text"):
        api_server.create(manifest("talk", {"output": {"modalities": [one]}}), api_namespace)
    both: Json = {"output": {"modalities": ["text", "audio"]}}
    api_server.create(manifest("talk", both), api_namespace)


def test_a_session_that_was_let_in_before_the_rule_goes_on(
    api_server: ApiServer, api_namespace: str
) -> None:
    """The operator still writes its status and lets it go."""
    half: Json = {"output": {"modalities": ["text"]}}
    kind = f"{SESSION_PLURAL}.{API_GROUP}"
    before = session_crd()
    (version,) = before["spec"]["versions"]
    spec = version["schema"]["openAPIV3Schema"]["properties"]["spec"]
    del spec["properties"]["output"]["x-kubernetes-validations"]

    def let_in() -> bool:
        try:
            api_server.create(manifest("talk", half), api_namespace)
        except KubeError:
            return False
        return True

    try:
        api_server.patch("crd", kind, {"spec": {"versions": before["spec"]["versions"]}})
        until(let_in, "the rule gone")
    finally:
        api_server.install_crds()

    def refused() -> bool:
        try:
            api_server.create(manifest("new", half), api_namespace)
        except KubeError as error:
            return "name both audio and text" in str(error)
        api_server.kubectl("delete", "dxs", "new", namespace=api_namespace)
        return False

    until(refused, "the rule there")
    told: Json = {"status": {"phase": "Ready", "units": 3}}
    api_server.patch("dxs", "talk", told, api_namespace, subresource="status")
    held: Json = {"metadata": {"finalizers": [SESSION_FINALIZER]}}
    api_server.patch("dxs", "talk", held, api_namespace)
    api_server.patch("dxs", "talk", {"spec": {"desiredState": "Closed"}}, api_namespace)
    assert api_server.get("dxs", "talk", api_namespace)["status"]["units"] == 3
    api_server.patch("dxs", "talk", {"metadata": {"finalizers": None}}, api_namespace)


def test_what_may_change_can(api_server: ApiServer, api_namespace: str) -> None:
    api_server.create(manifest("talk", {"priority": 1}), api_namespace)
    api_server.patch("dxs", "talk", {"spec": {"priority": 5}}, api_namespace)
    api_server.patch("dxs", "talk", {"spec": {"desiredState": "Parked"}}, api_namespace)
    spec = api_server.get("dxs", "talk", api_namespace)["spec"]
    assert (spec["priority"], spec["desiredState"]) == (5, "Parked")


def test_closed_is_final(api_server: ApiServer, api_namespace: str) -> None:
    api_server.create(manifest("talk", {"desiredState": "Closed"}), api_namespace)
    with pytest.raises(KubeError, match="desiredState"):
        api_server.patch("dxs", "talk", {"spec": {"desiredState": "Running"}}, api_namespace)
