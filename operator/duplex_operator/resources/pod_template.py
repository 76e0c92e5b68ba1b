"""What a pool's pod template may say, and what of it goes into a pod.

A template is the user's: whoever may make a pool may have pods, no more. So nothing in it may reach
what belongs to the product (the admin token, the sidecar's command, its volumes), nor what a
restricted namespace forbids. Only what is listed here is taken; everything else is refused with its
path, so that nothing is dropped in silence.
"""

import posixpath
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from duplex_api.constants import API_GROUP
from duplex_api.pool import PodTemplate
from duplex_api.problems import Problem
from duplex_operator.names import SIDECAR_CONTAINER

Manifest = dict[str, Any]
"""A part of a Kubernetes object as it is sent."""

RESERVED_PREFIX = "duplex-"
"""Of names of containers and volumes."""
TEMPLATE = "spec.template"

_RESERVED_KEYS = (f"{API_GROUP}/", "app.kubernetes.io/")
_METADATA_FIELDS = ("labels", "annotations")
_SPEC_FIELDS = (
    "affinity",
    "containers",
    "dnsConfig",
    "dnsPolicy",
    "hostAliases",
    "imagePullSecrets",
    "initContainers",
    "nodeSelector",
    "preemptionPolicy",
    "priorityClassName",
    "runtimeClassName",
    "schedulerName",
    "securityContext",
    "tolerations",
    "topologySpreadConstraints",
    "volumes",
)
_SIDECAR_FIELDS = ("env", "imagePullPolicy", "name", "resources", "volumeMounts")
_VOLUME_KINDS = (
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "image",
    "persistentVolumeClaim",
    "projected",
    "secret",
)
"""Those that a restricted namespace takes."""
_PROJECTED_KINDS = ("configMap", "downwardAPI", "secret", "clusterTrustBundle")
_ADDABLE_CAPABILITIES = ("NET_BIND_SERVICE",)
_SECCOMP_TYPES = ("RuntimeDefault", "Localhost")
_MAX_ITEMS = 32
"""Of containers, init containers and volumes each."""


class TemplateError(ValueError):
    """The template cannot be merged. `problems` is never empty."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(str(problem) for problem in problems))
        self.problems = problems


@dataclass(frozen=True, slots=True)
class TemplateParts:
    """A template that was found good. sidecar: what it says of our container; containers, init
    containers and volumes: the user's own. pod: the other fields of the pod's spec."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    pod: Mapping[str, Any]
    security: Mapping[str, Any]
    sidecar: Mapping[str, Any]
    containers: tuple[Manifest, ...]
    init_containers: tuple[Manifest, ...]
    volumes: tuple[Manifest, ...]


@dataclass(frozen=True, slots=True)
class Protected:
    """What the template may not touch. secret: the pool's admin Secret. environment: variables of
    the sidecar that the operator sets. mount_paths: where the sidecar's own volumes are."""

    secret: str
    environment: frozenset[str]
    mount_paths: tuple[str, ...]


def read_template(template: PodTemplate | None, protected: Protected) -> TemplateParts:
    """Raises TemplateError with everything that is wrong."""
    metadata: Manifest = dict((template and template.metadata) or {})
    spec: Manifest = dict((template and template.spec) or {})
    problems = (*_metadata_problems(metadata), *_Reader(protected).spec_problems(spec))
    if problems:
        raise TemplateError(problems)
    containers = _objects(spec, "containers")
    pod = {
        name: value
        for name, value in spec.items()
        if name not in ("containers", "initContainers", "securityContext", "volumes")
    }
    return TemplateParts(
        labels=metadata.get("labels") or {},
        annotations=metadata.get("annotations") or {},
        pod=pod,
        security=spec.get("securityContext") or {},
        sidecar=next((c for c in containers if c["name"] == SIDECAR_CONTAINER), {}),
        containers=tuple(c for c in containers if c["name"] != SIDECAR_CONTAINER),
        init_containers=_objects(spec, "initContainers"),
        volumes=_objects(spec, "volumes"),
    )


def _metadata_problems(metadata: Manifest) -> Iterator[Problem]:
    path = f"{TEMPLATE}.metadata"
    yield from _unknown(path, metadata, _METADATA_FIELDS)
    for field in _METADATA_FIELDS:
        entries = metadata.get(field)
        if entries is None:
            continue
        if not isinstance(entries, dict):
            yield Problem(f"{path}.{field}", "is no object", "texts by name")
            continue
        for key, value in cast(Manifest, entries).items():
            if key.startswith(_RESERVED_KEYS):
                yield Problem(f"{path}.{field}[{key}]", "belongs to the operator", "other names")
            elif not isinstance(value, str):
                yield Problem(f"{path}.{field}[{key}]", "is no text", "a text")


class _Reader:
    """Looks through a template's spec. One method for each kind of thing; each yields problems."""

    def __init__(self, protected: Protected) -> None:
        self._protected = protected

    def spec_problems(self, spec: Manifest) -> Iterator[Problem]:
        path = f"{TEMPLATE}.spec"
        yield from _unknown(path, spec, _SPEC_FIELDS)
        shapes = tuple(_shape_problems(path, spec))
        yield from shapes
        if shapes:
            return  # what follows looks inside
        security = _object(spec, "securityContext")
        yield from _security_problems(f"{path}.securityContext", security)
        for index, volume in enumerate(_objects(spec, "volumes")):
            yield from self._volume_problems(f"{path}.volumes[{index}]", volume)
        for index, container in enumerate(_objects(spec, "containers")):
            where = f"{path}.containers[{index}]"
            if container["name"] == SIDECAR_CONTAINER:
                yield from self._sidecar_problems(where, container)
            else:
                yield from self._container_problems(where, container)
        for index, container in enumerate(_objects(spec, "initContainers")):
            yield from self._container_problems(f"{path}.initContainers[{index}]", container)

    def _volume_problems(self, path: str, volume: Manifest) -> Iterator[Problem]:
        yield from _reserved_name(path, volume)
        kinds = [name for name in volume if name != "name"]
        yield from _unknown(path, volume, ("name", *_VOLUME_KINDS))
        if not kinds:
            yield Problem(path, "says no source", ", ".join(_VOLUME_KINDS))
        yield from self._secret_problems(f"{path}.secret.secretName", volume, "secret")
        for index, source in enumerate(_objects(_object(volume, "projected"), "sources")):
            where = f"{path}.projected.sources[{index}]"
            yield from _unknown(where, source, _PROJECTED_KINDS)
            yield from self._secret_problems(f"{where}.secret", source, "secret")

    def _sidecar_problems(self, path: str, container: Manifest) -> Iterator[Problem]:
        yield from _unknown(path, container, _SIDECAR_FIELDS)
        resources = _object(container, "resources")
        yield from _unknown(f"{path}.resources", resources, ("limits", "requests"))
        for index, variable in enumerate(_objects(container, "env")):
            # A list would have no hash.
            if str(variable.get("name")) in self._protected.environment:
                yield Problem(f"{path}.env[{index}]", "is set by the operator", "other variables")
        yield from self._environment_problems(path, container)
        for index, mount in enumerate(_objects(container, "volumeMounts")):
            where = f"{path}.volumeMounts[{index}]"
            yield from _reserved_name(where, mount)
            mounted = str(mount.get("mountPath") or "")
            if any(_overlap(mounted, own) for own in self._protected.mount_paths):
                yield Problem(f"{where}.mountPath", "hides a folder of the sidecar", "another path")

    def _container_problems(self, path: str, container: Manifest) -> Iterator[Problem]:
        yield from _reserved_name(path, container)
        yield from self._environment_problems(path, container)
        for index, mount in enumerate(_objects(container, "volumeMounts")):
            yield from _reserved_name(f"{path}.volumeMounts[{index}]", mount)
        for index, port in enumerate(_objects(container, "ports")):
            if port.get("hostPort"):
                yield Problem(f"{path}.ports[{index}].hostPort", "is a port of the node", "")
        security = _object(container, "securityContext")
        yield from _security_problems(f"{path}.securityContext", security)

    def _environment_problems(self, path: str, container: Manifest) -> Iterator[Problem]:
        for index, variable in enumerate(_objects(container, "env")):
            if not isinstance(variable.get("name"), str):
                yield Problem(f"{path}.env[{index}].name", "is required", "a text")
            where = f"{path}.env[{index}].valueFrom.secretKeyRef"
            source = _object(variable, "valueFrom")
            yield from self._secret_problems(where, source, "secretKeyRef")
        for index, source in enumerate(_objects(container, "envFrom")):
            yield from self._secret_problems(f"{path}.envFrom[{index}]", source, "secretRef")

    def _secret_problems(self, path: str, holder: Manifest, field: str) -> Iterator[Problem]:
        named = _object(holder, field)
        if self._protected.secret in (named.get("name"), named.get("secretName")):
            yield Problem(path, "is the pool's admin Secret", "another Secret")


def _security_problems(path: str, security: Manifest) -> Iterator[Problem]:
    """Of a pod or a container: what the restricted Pod Security Standard forbids."""
    for field, forbidden in (
        ("privileged", True),
        ("allowPrivilegeEscalation", True),
        ("runAsNonRoot", False),
        ("runAsUser", 0),
    ):
        # 0 == False: a type that is not meant would be refused by the API server.
        if field in security and security[field] == forbidden:
            yield Problem(f"{path}.{field}", "is not allowed in a restricted pod", "")
    for field in ("procMount", "sysctls", "windowsOptions"):
        if field in security:
            yield Problem(f"{path}.{field}", "is not allowed in a restricted pod", "")
    # Over what the pod says of itself, where it would stand in its place.
    for field, value in security.items():
        if value is None:
            yield Problem(f"{path}.{field[:63]}", "is null", "a value, or no such field")
    seccomp = _object(security, "seccompProfile")
    if "type" in seccomp and seccomp["type"] not in _SECCOMP_TYPES:
        yield Problem(f"{path}.seccompProfile.type", "is too wide", ", ".join(_SECCOMP_TYPES))
    added = _object(security, "capabilities").get("add") or ()
    if any(name not in _ADDABLE_CAPABILITIES for name in added):
        yield Problem(f"{path}.capabilities.add", "adds rights", ", ".join(_ADDABLE_CAPABILITIES))


def _shape_problems(path: str, spec: Manifest) -> Iterator[Problem]:
    """Whether lists are lists and objects are objects, as far as we look into them."""
    yield from _object_problems(path, spec, _SECURITY)
    for field in ("containers", "initContainers", "volumes"):
        problems = tuple(_list_problems(f"{path}.{field}", spec.get(field)))
        yield from problems
        if problems:
            continue
        for index, item in enumerate(_objects(spec, field)):
            where = f"{path}.{field}[{index}]"
            if field == "volumes":
                yield from _object_problems(where, item, _VOLUME_SHAPE)
            else:
                yield from _object_problems(where, item, _CONTAINER_SHAPE)


_LIST = "list"
_SECURITY: Mapping[str, Any] = {
    "securityContext": {"seccompProfile": {}, "capabilities": {"add": _LIST}}
}
_CONTAINER_SHAPE: Mapping[str, Any] = {
    **_SECURITY,
    "env": [{"valueFrom": {"secretKeyRef": {}}}],
    "envFrom": [{"secretRef": {}}],
    "ports": [{}],
    "resources": {"limits": {}, "requests": {}},
    "volumeMounts": [{}],
}
_VOLUME_SHAPE: Mapping[str, Any] = {"projected": {"sources": [{"secret": {}}]}, "secret": {}}


def _object_problems(path: str, holder: Manifest, shape: Mapping[str, Any]) -> Iterator[Problem]:
    """shape: the fields that are looked into; {..}: an object, [{..}]: a list of objects, "list":
    a list of texts. A field may be absent, never null."""
    for field, inner in shape.items():
        if field not in holder:
            continue
        value, where = holder[field], f"{path}.{field}"
        if isinstance(inner, dict):
            if isinstance(value, dict):
                yield from _object_problems(where, cast(Manifest, value), cast(Manifest, inner))
            else:
                yield Problem(where, "is no object", "an object")
        elif not isinstance(value, list):
            yield Problem(where, "is no list", "a list")
        elif inner == _LIST:
            if not all(isinstance(item, str) for item in cast("list[Any]", value)):
                yield Problem(where, "holds what is no text", "texts")
        else:
            for index, item in enumerate(cast("list[Any]", value)):
                if isinstance(item, dict):
                    yield from _object_problems(
                        f"{where}[{index}]", cast(Manifest, item), cast("list[Any]", inner)[0]
                    )
                else:
                    yield Problem(f"{where}[{index}]", "is no object", "an object")


def _list_problems(path: str, value: Any) -> Iterator[Problem]:
    """Lists of things with a name, each name once."""
    if value is None:
        return
    if not isinstance(value, list):
        yield Problem(path, "is no list", "objects with a name")
        return
    items = cast("list[Any]", value)
    if len(items) > _MAX_ITEMS:
        yield Problem(path, f"has {len(items)} items", f"at most {_MAX_ITEMS}")
        return
    seen: set[str] = set()
    for index, item in enumerate(items):
        name = cast(Manifest, item).get("name") if isinstance(item, dict) else None
        if not isinstance(name, str) or not name:
            yield Problem(f"{path}[{index}].name", "is required", "a text")
        elif name in seen:
            yield Problem(f"{path}[{index}].name", f"{name[:63]!r} is there twice", "")
        else:
            seen.add(name)


def _unknown(path: str, given: Manifest, allowed: tuple[str, ...]) -> Iterator[Problem]:
    for name in given:
        if name not in allowed:
            yield Problem(f"{path}.{name[:63]}", "is not taken from a template", ", ".join(allowed))


def _reserved_name(path: str, given: Manifest) -> Iterator[Problem]:
    name = given.get("name")
    if isinstance(name, str) and name.startswith(RESERVED_PREFIX):
        yield Problem(
            f"{path}.name",
            f"names that begin with {RESERVED_PREFIX} belong to the operator",
            "another name",
        )


def _overlap(path: str, own: str) -> bool:
    """One is the other, or around it. A mount below one of our folders is refused too: it would
    be made inside a read-only or a private volume."""
    path = posixpath.normpath(f"/{path}").replace("//", "/")
    # The same folder in nearly every image.
    path = path.removeprefix("/var") if path.startswith("/var/run") else path
    one, other = f"{path.rstrip('/')}/", f"{own}/"
    return one.startswith(other) or other.startswith(one)


def _objects(holder: Manifest, field: str) -> tuple[Manifest, ...]:
    return tuple(holder.get(field) or ())


def _object(holder: Manifest, field: str) -> Manifest:
    return holder.get(field) or {}
