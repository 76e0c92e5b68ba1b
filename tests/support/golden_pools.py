"""Pools whose pods are kept as golden files: one question each."""

from typing import Any

from duplex_api.pool import PoolSpec
from duplex_api.resolve_pool import resolve_pool
from duplex_operator.resources.pods import PodBlueprint, PoolIdentity, pod_blueprint

IDENTITY = PoolIdentity("talk", "demo", "11111111-2222-3333-4444-555555555555")
RELEASE_IMAGE = "duplex/sidecar:0.1.0"

LEAST: dict[str, Any] = {"checkpoint": {"path": "/models/tiny"}, "slots": 4}

POOLS: dict[str, dict[str, Any]] = {
    "least": LEAST,
    "gpu": {
        "checkpoint": {"pvc": {"claimName": "minicpm-o-4-5"}},
        "slots": 8,
        "rebuildsAtOnce": 1,
        "gpu": {"resourceName": "nvidia.com/gpu", "count": 2},
        "sharedMemory": "16Gi",
        "startupTimeout": "15m",
        "drain": {"grace": "1m30s"},
        "voices": {"claimName": "voices"},
        "telemetry": {"otlpEndpoint": "http://collector:4318"},
        "image": "example/duplex:1",
    },
    "image_and_claims": {
        "checkpoint": {"imageVolume": {"reference": "example/model:1", "path": "/weights/"}},
        "slots": 2,
        "gpu": {
            "resourceClaims": [{"name": "gpu", "resourceClaimTemplateName": "one-gpu"}],
        },
    },
    "template": {
        **LEAST,
        "template": {
            "metadata": {
                "labels": {"team": "voice"},
                "annotations": {"example.com/note": "kept"},
            },
            "spec": {
                "nodeSelector": {"gpu": "h200"},
                "tolerations": [{"key": "gpu", "operator": "Exists"}],
                "securityContext": {"runAsUser": 1000, "fsGroup": 1000},
                "volumes": [{"name": "notes", "emptyDir": {}}],
                "initContainers": [{"name": "prepare", "image": "example/prepare:1"}],
                "containers": [
                    {
                        "name": "duplex-sidecar",
                        "env": [
                            {"name": "DUPLEX_DEVICE", "value": "cuda"},
                            {"name": "PATH", "value": "/opt/env/bin"},
                        ],
                        "imagePullPolicy": "Never",
                        "resources": {
                            "requests": {"cpu": "500m"},
                            "limits": {"memory": "6Gi"},
                        },
                        "volumeMounts": [{"name": "notes", "mountPath": "/notes"}],
                    },
                    {
                        "name": "caller",
                        "image": "example/caller:1",
                        "securityContext": {"capabilities": {"add": ["NET_BIND_SERVICE"]}},
                    },
                ],
            },
        },
    },
}


def blueprint(
    spec: dict[str, Any], identity: PoolIdentity = IDENTITY, durability: str = ""
) -> PodBlueprint:
    resolved = resolve_pool(PoolSpec.model_validate(spec))
    return pod_blueprint(identity, resolved, RELEASE_IMAGE, durability)


def pod_of(spec: dict[str, Any]) -> dict[str, Any]:
    return blueprint(spec).named("demo-abc234")


def with_template(**spec: Any) -> dict[str, Any]:
    return {**LEAST, "template": {"spec": spec}}


def sidecar_says(**fields: Any) -> dict[str, Any]:
    return with_template(containers=[{"name": "duplex-sidecar", **fields}])


def beside(**fields: Any) -> dict[str, Any]:
    return with_template(containers=[{"name": "caller", "image": "example/caller:1", **fields}])
