"""The pod of a pool: pure, from the pool's spec and the release's image.

A bare pod, owned by the pool. It is made for a restricted namespace: no root, no ServiceAccount
token, a read-only root. Everything that the sidecar needs to know is in its environment; what is
secret comes from the pool's admin Secret, which no other container sees.
"""

import base64
import hashlib
import json
from dataclasses import dataclass
from typing import Any

from duplex_api.constants import API_VERSION, POOL_KIND
from duplex_api.resolve_pool import ResolvedPool
from duplex_operator.names import (
    ADMIN_PORT,
    ANNOTATION_ATTEMPT,
    ANNOTATION_CHECKPOINT_HASH,
    ANNOTATION_TEMPLATE_HASH,
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_OCCUPIED,
    LABEL_POOL,
    PRODUCT,
    SIDECAR_CONTAINER,
    admin_secret_name,
)
from duplex_operator.resources.pod_environment import (
    REALTIME_PORT,
    merged_environment,
    protected_names,
    variable,
)
from duplex_operator.resources.pod_template import (
    Manifest,
    Protected,
    TemplateParts,
    read_template,
)
from duplex_operator.resources.pod_volumes import mounts, volumes

USER_ID = 65532
"""Of the sidecar's process; any user can run the image, this one owns nothing in it."""
DRAIN_MARGIN_S = 30
"""After the drain's grace: parking what is left, and ending the stages."""
PROBE_PERIOD_S = 5

_RESTRICTED: Manifest = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
_HASH_CHARACTERS = 16
_NAME_CHARACTERS = 6


@dataclass(frozen=True, slots=True)
class PoolIdentity:
    """uid: of the pool object."""

    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodBlueprint:
    """A pod without its name. template_hash, checkpoint_hash: of all that makes a running pod
    different from a new one, and of the checkpoint alone."""

    manifest: Manifest
    template_hash: str
    checkpoint_hash: str

    def named(self, name: str, attempt: int = 0) -> Manifest:
        """The manifest as it is sent. attempt: see ANNOTATION_ATTEMPT."""
        metadata = self.manifest["metadata"]
        annotations = metadata["annotations"] | (
            {ANNOTATION_ATTEMPT: str(attempt)} if attempt else {}
        )
        return self.manifest | {"metadata": metadata | {"name": name, "annotations": annotations}}


def pod_blueprint(
    pool: PoolIdentity, spec: ResolvedPool, release_image: str, durability: str = ""
) -> PodBlueprint:
    """durability: the installation's word on its ledger; empty: none.

    Raises TemplateError when the pool's template says what it may not.
    """
    parts = read_template(spec.template, _protected(pool, spec))
    checkpoint_hash = _digest(spec.checkpoint.model_dump(mode="json", exclude_none=True))
    given = _listed(parts.sidecar, "env")
    environment = merged_environment(pool.name, spec, given, durability)
    pod_spec = _pod_spec(pool, spec, parts, _sidecar(spec, parts, release_image, environment))
    labels = dict(parts.labels) | _own_labels(pool)
    template_hash = _digest([pod_spec, labels, dict(parts.annotations)])
    # After the hash: both can change without a new pod, the operator names the grace at each drain.
    sidecar = pod_spec["containers"][0]
    sidecar["env"].append(variable("DUPLEX_DRAIN_GRACE_S", str(spec.drain_grace_ms / 1000)))
    pod_spec["terminationGracePeriodSeconds"] = drain_bound_s(spec)
    manifest: Manifest = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "namespace": pool.namespace,
            "labels": labels | {LABEL_OCCUPIED: "false"},
            "annotations": {
                **parts.annotations,
                ANNOTATION_TEMPLATE_HASH: template_hash,
                ANNOTATION_CHECKPOINT_HASH: checkpoint_hash,
            },
            "ownerReferences": [owner_reference(pool)],
        },
        "spec": pod_spec,
    }
    return PodBlueprint(manifest, template_hash, checkpoint_hash)


def owner_reference(pool: PoolIdentity) -> Manifest:
    """Makes the pool the controller: it is deleted with the pool, and a budget finds its scale."""
    return {
        "apiVersion": API_VERSION,
        "kind": POOL_KIND,
        "name": pool.name,
        "uid": pool.uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def pool_selector(pool_name: str) -> str:
    """The pool's pods, as a label selector in text."""
    return f"{LABEL_COMPONENT}={COMPONENT_SIDECAR},{LABEL_POOL}={pool_name}"


def drain_bound_s(spec: ResolvedPool) -> int:
    """Seconds after which a leaving pod has parked everything."""
    return -(-spec.drain_grace_ms // 1000) + DRAIN_MARGIN_S


def pod_name(pool: PoolIdentity, template_hash: str, number: int) -> str:
    """The name of pod `number` of a template. Fixed, so that a decision on an old view makes no pod
    twice (the API server answers that it exists); of no pod of another pool object of this name."""
    digest = hashlib.sha256(f"{pool.uid}/{template_hash}/{number}".encode()).digest()
    return f"{pool.name}-{base64.b32encode(digest).decode().lower()[:_NAME_CHARACTERS]}"


def _own_labels(pool: PoolIdentity) -> dict[str, str]:
    return {
        LABEL_NAME: PRODUCT,
        LABEL_COMPONENT: COMPONENT_SIDECAR,
        LABEL_MANAGED_BY: FIELD_MANAGER,
        LABEL_POOL: pool.name,
    }


def _pod_spec(
    pool: PoolIdentity, spec: ResolvedPool, parts: TemplateParts, sidecar: Manifest
) -> Manifest:
    claims = spec.gpu.resource_claims if spec.gpu else None
    security: Manifest = {
        "runAsNonRoot": True,
        "runAsUser": USER_ID,
        "runAsGroup": USER_ID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    pod_spec: Manifest = {
        **parts.pod,
        "restartPolicy": "Always",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "securityContext": security | dict(parts.security),
        "containers": [
            sidecar,
            *(_own_container(container) for container in parts.containers),
        ],
        "volumes": [*volumes(pool.name, spec), *parts.volumes],
    }
    if parts.init_containers:
        pod_spec["initContainers"] = [_own_container(found) for found in parts.init_containers]
    if claims:
        pod_spec["resourceClaims"] = [
            {
                "name": claim.name,
                "resourceClaimTemplateName": claim.resource_claim_template_name,
            }
            for claim in claims
        ]
    return pod_spec


def _sidecar(
    spec: ResolvedPool, parts: TemplateParts, release_image: str, environment: list[Manifest]
) -> Manifest:
    container: Manifest = {
        "name": SIDECAR_CONTAINER,
        "image": spec.image or release_image,
        "command": ["duplex", "serve", "--from-environment"],
        # First what may stand in the template: a variable can use those before it.
        "env": environment,
        "ports": [
            {"name": "realtime", "containerPort": REALTIME_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        # One that started while the ledger is away would be started again and again.
        "startupProbe": _probe("/readyz?ledger=any", failures=-(-spec.startup_timeout_ms // 5000)),
        "readinessProbe": _probe("/readyz", failures=2),
        "livenessProbe": _probe("/livez", failures=6),
        "resources": _resources(spec, parts),
        "securityContext": _RESTRICTED | {"readOnlyRootFilesystem": True},
        "volumeMounts": [*mounts(spec), *_listed(parts.sidecar, "volumeMounts")],
    }
    if "imagePullPolicy" in parts.sidecar:
        container["imagePullPolicy"] = parts.sidecar["imagePullPolicy"]
    return container


def _own_container(container: Manifest) -> Manifest:
    """A container of the user's beside the sidecar: restricted where it says nothing, and told
    where the realtime door is. It gets no volume and no token of ours."""
    environment = _listed(container, "env")
    if all(variable.get("name") != "DUPLEX_REALTIME_URL" for variable in environment):
        url = f"ws://127.0.0.1:{REALTIME_PORT}/v1/realtime"
        environment = [variable("DUPLEX_REALTIME_URL", url), *environment]
    security: Manifest = dict(container.get("securityContext") or {})
    security["allowPrivilegeEscalation"] = False
    security["capabilities"] = dict(security.get("capabilities") or {}) | {"drop": ["ALL"]}
    return container | {"env": environment, "securityContext": security}


def _protected(pool: PoolIdentity, spec: ResolvedPool) -> Protected:
    return Protected(
        secret=admin_secret_name(pool.name),
        environment=protected_names(pool.name, spec),
        mount_paths=(*(str(mount["mountPath"]) for mount in mounts(spec)), "/etc/duplex"),
    )


def _resources(spec: ResolvedPool, parts: TemplateParts) -> Manifest:
    """The template's, over what the model needs at least; the devices are the pool's to name."""
    given: Manifest = parts.sidecar.get("resources") or {}
    least = _LEAST_WITH_GPU if spec.gpu else _LEAST_ON_CPU
    limits: Manifest = dict(given.get("limits") or {})
    # A limit alone is a request too: a default above it would be refused.
    requests: Manifest = {name: value for name, value in least.items() if name not in limits}
    requests |= given.get("requests") or {}
    resources: Manifest = {"requests": requests}
    if spec.gpu and spec.gpu.resource_name is not None:
        limits[spec.gpu.resource_name] = str(spec.gpu.count or 1)
    if limits:
        resources["limits"] = limits
    claims = spec.gpu.resource_claims if spec.gpu else None
    if claims:
        resources["claims"] = [{"name": claim.name} for claim in claims]
    return resources


_LEAST_WITH_GPU: Manifest = {"cpu": "4", "memory": "24Gi"}
_LEAST_ON_CPU: Manifest = {"cpu": "1", "memory": "4Gi"}


def _probe(path: str, failures: int) -> Manifest:
    return {
        "httpGet": {"path": path, "port": REALTIME_PORT},
        "periodSeconds": PROBE_PERIOD_S,
        "timeoutSeconds": 3,
        "failureThreshold": max(1, failures),
    }


def _listed(holder: Any, field: str) -> list[Manifest]:
    return list(holder.get(field) or ())


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_CHARACTERS]
