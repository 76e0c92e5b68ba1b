"""Kubernetes objects as the operator sees them: frozen, only what decisions look at.

Everything raw is read here and nowhere else. An object that cannot be read is `None` with a log
line, never an exception that stops a watch.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from functools import lru_cache
from typing import Any, NamedTuple, cast

from pydantic import ValidationError

from duplex_api.metadata import Condition
from duplex_api.pool import PoolSpec, PoolStatus
from duplex_api.session import SessionSpec, SessionStatus
from duplex_operator.names import (
    ANNOTATION_ATTEMPT,
    ANNOTATION_CHECKPOINT_HASH,
    ANNOTATION_IDLE_SINCE,
    ANNOTATION_MARK,
    ANNOTATION_MARKED_AT,
    ANNOTATION_TEMPLATE_HASH,
    LABEL_MANAGED_BY,
    LABEL_OCCUPIED,
    LABEL_POOL,
    SIDECAR_CONTAINER,
)

log = logging.getLogger(__name__)

RawObject = Mapping[str, Any]

MOST_SHARED = 16_384
LONGEST_ANNOTATION = 256
_LABELS = (LABEL_MANAGED_BY, LABEL_OCCUPIED, LABEL_POOL)
_ANNOTATIONS = (
    ANNOTATION_ATTEMPT,
    ANNOTATION_CHECKPOINT_HASH,
    ANNOTATION_IDLE_SINCE,
    ANNOTATION_MARK,
    ANNOTATION_MARKED_AT,
    ANNOTATION_TEMPLATE_HASH,
)
"""What is kept: users may write 256 KiB of others on each object."""


class Kind(StrEnum):
    SESSION = "session"
    POOL = "pool"
    POD = "pod"
    NODE = "node"


class ObjectKey(NamedTuple):
    """namespace is empty for objects of the cluster."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True, slots=True)
class Meta:
    """version: the resourceVersion. created_ms, deleted_ms: since 1970; deleted_ms is when its
    deletion was asked for, 0 if it was not. labels, annotations: those that decisions look at."""

    key: ObjectKey
    uid: str
    version: str
    generation: int
    created_ms: int
    deleted_ms: int
    finalizers: tuple[str, ...]
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def deleting(self) -> bool:
        return self.deleted_ms > 0


@dataclass(frozen=True, slots=True)
class SessionObject:
    meta: Meta
    spec: SessionSpec
    status: SessionStatus

    @property
    def pool_key(self) -> ObjectKey:
        wanted = self.spec.pool_ref
        return ObjectKey(wanted.namespace or self.meta.key.namespace, wanted.name)


@dataclass(frozen=True, slots=True)
class PoolObject:
    meta: Meta
    spec: PoolSpec
    status: PoolStatus


class PodPhase(StrEnum):
    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"


_PHASES = {str(phase): phase for phase in PodPhase}


@dataclass(frozen=True, slots=True)
class PodObject:
    """A pod of a pool. ready: its Ready condition. disrupted: DisruptionTarget is true (an eviction
    is under way). sidecar_restarts, sidecar_terminated: of the sidecar's container; terminated is
    the reason (for example OOMKilled) while the container is not running, else empty."""

    meta: Meta
    pool: ObjectKey
    phase: PodPhase
    ready: bool
    ip: str
    node: str
    occupied: bool | None
    template_hash: str
    disrupted: bool
    scheduled: bool
    sidecar_restarts: int
    sidecar_terminated: str
    owner_uid: str
    mark: str = ""
    """What the pool's reconciler has decided about it (a `decide.pods.Mark`); empty: it stays."""
    readiness_changed_ms: int = 0
    unplaced: bool = False
    """No node has room for it."""
    sidecar_waits: str = ""
    """Why the sidecar's container is not running, for example CrashLoopBackOff."""


@dataclass(frozen=True, slots=True)
class NodeObject:
    """taints: keys of those with effect NoSchedule or NoExecute."""

    meta: Meta
    unschedulable: bool
    taints: tuple[str, ...]
    ready: bool


AnyObject = SessionObject | PoolObject | PodObject | NodeObject


def read_session(raw: RawObject) -> SessionObject | None:
    """None: not an object of this release's schema. Its fields are named in the log, not their
    values."""
    try:
        return SessionObject(
            meta=read_meta(raw),
            spec=SessionSpec.model_validate(raw.get("spec") or {}),
            status=_with_shared_conditions(SessionStatus.model_validate(raw.get("status") or {})),
        )
    except ValidationError as error:
        _unreadable(Kind.SESSION, raw, error)
        return None


def read_pool(raw: RawObject) -> PoolObject | None:
    try:
        return PoolObject(
            meta=read_meta(raw),
            spec=PoolSpec.model_validate(raw.get("spec") or {}),
            status=PoolStatus.model_validate(raw.get("status") or {}),
        )
    except ValidationError as error:
        _unreadable(Kind.POOL, raw, error)
        return None


def read_pod(raw: RawObject) -> PodObject | None:
    """None: no pod of a pool."""
    meta = read_meta(raw)
    pool = meta.labels.get(LABEL_POOL)
    if not pool:
        return None
    spec, status = _child(raw, "spec"), _child(raw, "status")
    phase = str(status.get("phase") or PodPhase.UNKNOWN)
    restarts, terminated, waits = _sidecar_container(status)
    occupied = meta.labels.get(LABEL_OCCUPIED)
    return PodObject(
        meta=meta,
        pool=ObjectKey(meta.key.namespace, pool),
        phase=_PHASES.get(phase, PodPhase.UNKNOWN),
        ready=_condition(status, "Ready"),
        ip=str(status.get("podIP") or ""),
        node=str(spec.get("nodeName") or ""),
        occupied=None if occupied is None else occupied == "true",
        template_hash=meta.annotations.get(ANNOTATION_TEMPLATE_HASH, ""),
        disrupted=_condition(status, "DisruptionTarget"),
        scheduled=bool(spec.get("nodeName")),
        sidecar_restarts=restarts,
        sidecar_terminated=terminated,
        owner_uid=_controller_uid(raw),
        mark=meta.annotations.get(ANNOTATION_MARK, ""),
        readiness_changed_ms=_readiness_changed_ms(status),
        unplaced=any(
            found.get("type") == "PodScheduled" and found.get("reason") == "Unschedulable"
            for found in _children(status, "conditions")
        ),
        sidecar_waits=waits,
    )


def read_node(raw: RawObject) -> NodeObject:
    spec = _child(raw, "spec")
    taints = [
        str(taint.get("key"))
        for taint in _children(spec, "taints")
        if taint.get("effect") in ("NoSchedule", "NoExecute")
    ]
    return NodeObject(
        meta=read_meta(raw),
        unschedulable=bool(spec.get("unschedulable")),
        taints=tuple(taints),
        ready=_condition(_child(raw, "status"), "Ready"),
    )


def read_meta(raw: RawObject) -> Meta:
    meta = _child(raw, "metadata")
    return Meta(
        key=ObjectKey(str(meta.get("namespace") or ""), str(meta.get("name") or "")),
        uid=str(meta.get("uid") or ""),
        version=str(meta.get("resourceVersion") or ""),
        generation=int(meta.get("generation") or 0),
        created_ms=timestamp_ms(str(meta.get("creationTimestamp") or "")),
        deleted_ms=timestamp_ms(str(meta.get("deletionTimestamp") or "")),
        finalizers=tuple(meta.get("finalizers") or ()),
        labels=_kept(_child(meta, "labels"), _LABELS),
        annotations=_kept(_child(meta, "annotations"), _ANNOTATIONS),
    )


def _kept(texts: RawObject, names: tuple[str, ...]) -> dict[str, str]:
    found = {name: str(texts[name]) for name in names if name in texts}
    return {name: text for name, text in found.items() if len(text) <= LONGEST_ANNOTATION}


def timestamp_ms(text: str) -> int:
    """Milliseconds since 1970 of an RFC 3339 time; 0 for what is none."""
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError:
        return 0


def timestamp(at_ms: int) -> str:
    """RFC 3339 in whole seconds, as Kubernetes writes times."""
    return datetime.fromtimestamp(at_ms // 1000, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _with_shared_conditions(status: SessionStatus) -> SessionStatus:
    """Thousands of sessions have the same few conditions, which would be most of their memory."""
    if status.conditions is None:
        return status
    # Frozen models have a hash, which pydantic's types do not tell.
    shared = tuple(_shared(cast("Any", condition)) for condition in status.conditions)
    return status.model_copy(update={"conditions": shared})


@lru_cache(maxsize=MOST_SHARED)
def _shared(condition: Condition) -> Condition:
    return condition


def _unreadable(kind: Kind, raw: RawObject, error: ValidationError) -> None:
    fields = ", ".join(sorted({".".join(map(str, found["loc"])) for found in error.errors()}))
    log.error("%s %s cannot be read: %s", kind, read_meta(raw).key, fields[:1024])


def _child(raw: RawObject, name: str) -> RawObject:
    child = raw.get(name)
    return cast(RawObject, child) if isinstance(child, Mapping) else {}


def _children(raw: RawObject, name: str) -> tuple[RawObject, ...]:
    children = raw.get(name)
    return tuple(cast("list[RawObject]", children)) if isinstance(children, list) else ()


def _condition(status: RawObject, name: str) -> bool:
    return any(
        found.get("type") == name and found.get("status") == "True"
        for found in _children(status, "conditions")
    )


def _readiness_changed_ms(status: RawObject) -> int:
    for found in _children(status, "conditions"):
        if found.get("type") == "Ready":
            return timestamp_ms(str(found.get("lastTransitionTime") or ""))
    return 0


def _sidecar_container(status: RawObject) -> tuple[int, str, str]:
    """Restarts, why it has ended, why it waits."""
    for container in _children(status, "containerStatuses"):
        if container.get("name") == SIDECAR_CONTAINER:
            state = _child(container, "state")
            terminated, waiting = _child(state, "terminated"), _child(state, "waiting")
            ended = str(terminated.get("reason") or "Terminated") if terminated else ""
            waits = str(waiting.get("reason") or "")
            return int(container.get("restartCount") or 0), ended, waits
    return 0, "", ""


def _controller_uid(raw: RawObject) -> str:
    for owner in _children(_child(raw, "metadata"), "ownerReferences"):
        if owner.get("controller"):
            return str(owner.get("uid") or "")
    return ""
