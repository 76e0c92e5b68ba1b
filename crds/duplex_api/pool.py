"""DuplexPool: GPU pods that serve the same model."""

from enum import StrEnum
from typing import Annotated, Self

from pydantic import ConfigDict, Field, JsonValue, StrictInt, StrictStr, model_validator

from duplex_api.base import (
    DISTINCT,
    QUANTITY_PATTERN,
    ApiModel,
    Count,
    LabelName,
    LongCount,
    ObjectName,
    Real,
    cel_rules,
)
from duplex_api.constants import API_VERSION, POOL_KIND
from duplex_api.durations import Duration, duration_ms
from duplex_api.metadata import Condition, ObjectMeta, listed_by
from duplex_api.window import WindowPolicy

ImageName = Annotated[StrictStr, Field(min_length=1, max_length=512)]
FolderPath = Annotated[StrictStr, Field(min_length=1, max_length=1024)]
Quantity = Annotated[StrictStr, Field(max_length=32, pattern=QUANTITY_PATTERN)]
"""A Kubernetes quantity such as "16Gi"."""


OpenObject = Annotated[
    dict[str, JsonValue],
    Field(json_schema_extra={"x-kubernetes-preserve-unknown-fields": True}),
]
"""An object whose fields are kept as they are."""


class CheckpointClaim(ApiModel):
    """A PersistentVolumeClaim of the pool's namespace."""

    claim_name: ObjectName
    """Name of the claim. It is mounted read-only."""
    path: FolderPath | None = None
    """Folder inside the volume. Default: its root."""


class CheckpointImage(ApiModel):
    """An image, mounted as a volume."""

    reference: ImageName
    """Name of the image."""
    path: FolderPath | None = None
    """Folder inside the image. Default: its root."""


_ONE_SOURCE = "exactly one of pvc, imageVolume, path is required"


class Checkpoint(ApiModel):
    """Where the model's files are: exactly one of the three."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "[has(self.pvc), has(self.imageVolume), has(self.path)]"
                ".filter(given, given).size() == 1",
                _ONE_SOURCE,
            )
        )
    )

    pvc: CheckpointClaim | None = None
    image_volume: CheckpointImage | None = None
    path: FolderPath | None = None
    """A folder that the pod has anyway (baked into its image, or mounted by the template)."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if sum(source is not None for source in (self.pvc, self.image_volume, self.path)) != 1:
            raise ValueError(_ONE_SOURCE)
        return self


class CheckpointChange(StrEnum):
    """What a new checkpoint does to live sessions: a checkpoint change never moves them."""

    FINISH = "Finish"
    END = "End"


class ResourceClaim(ApiModel):
    """A claim for a device by dynamic resource allocation."""

    name: LabelName
    """Its name inside the pod."""
    resource_claim_template_name: ObjectName
    """The ResourceClaimTemplate of the pool's namespace that each pod's claim is made from."""


_NOT_BOTH = "resourceName and resourceClaims exclude each other"


class Gpu(ApiModel):
    """Devices of one pod: an extended resource, or claims. None of both: the pod runs on CPUs."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("!(has(self.resourceName) && has(self.resourceClaims))", _NOT_BOTH),
            (
                "!has(self.count) || has(self.resourceName)",
                "count belongs to resourceName",
            ),
        )
    )

    resource_name: Annotated[StrictStr, Field(min_length=1, max_length=253)] | None = None
    """For example nvidia.com/gpu."""
    count: Annotated[StrictInt, Field(ge=1, le=16)] | None = None
    """How many of the resource a pod asks for. Default: 1."""
    resource_claims: (
        Annotated[
            tuple[ResourceClaim, ...],
            Field(min_length=1, max_length=16, json_schema_extra=listed_by("name")),
        ]
        | None
    ) = None
    """Claims for devices by dynamic resource allocation, instead."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.resource_name is not None and self.resource_claims is not None:
            raise ValueError(_NOT_BOTH)
        if self.count is not None and self.resource_name is None:
            raise ValueError("count belongs to resourceName")
        return self


class Scaling(ApiModel):
    """Between the two by free slots. Absent: exactly spec.replicas pods."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "self.minReplicas <= self.maxReplicas",
                "minReplicas must not be above maxReplicas",
            )
        )
    )

    min_replicas: Annotated[StrictInt, Field(ge=0, le=1000)]
    """Pods that are there even if nobody talks."""
    max_replicas: Annotated[StrictInt, Field(ge=1, le=1000)]
    """Pods at most, whoever waits."""
    spare_slots: Count | None = None
    """Slots kept free, so that a new session need not wait for a pod."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("minReplicas must not be above maxReplicas")
        return self


class NamespaceSource(StrEnum):
    SAME = "Same"
    ALL = "All"
    LISTED = "Listed"


_LISTED_NAMES = "names belong to from: Listed, which requires them"


class AllowedNamespaces(ApiModel):
    """Whose sessions may name this pool. Default: those of the pool's own namespace."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("(self.from == 'Listed') == has(self.names)", _LISTED_NAMES),
        )
    )

    source: Annotated[NamespaceSource, Field(alias="from")]
    """Same: the pool's own. All: every namespace. Listed: those in names."""
    names: (
        Annotated[
            tuple[LabelName, ...],
            Field(min_length=1, max_length=256),
            *DISTINCT,
        ]
        | None
    ) = None
    """Namespaces whose sessions may come."""

    @model_validator(mode="after")
    def _names_when_listed(self) -> Self:
        if (self.source is NamespaceSource.LISTED) != (self.names is not None):
            raise ValueError(_LISTED_NAMES)
        return self


_LONGEST_GRACE_MS = 3_600_000
_GRACE_BOUND = "grace must not be above 1h"


class DrainPolicy(ApiModel):
    """How a pod is emptied."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            ("!has(self.grace) || duration(self.grace) <= duration('1h')", _GRACE_BOUND)
        )
    )

    grace: Duration | None = None
    """How long a leaving pod may move its sessions before it parks the rest. At most 1h."""

    @model_validator(mode="after")
    def _bounded_grace(self) -> Self:
        if self.grace is not None and duration_ms(self.grace) > _LONGEST_GRACE_MS:
            raise ValueError(_GRACE_BOUND)
        return self


class UpgradePolicy(ApiModel):
    """How pods are replaced when the pool has changed."""

    max_surge: Annotated[StrictInt, Field(ge=0, le=100)] | None = None
    """Pods above the wanted number while a new template rolls out. Never assumed to be there."""


class Telemetry(ApiModel):
    """Traces of the pool's sessions. A change makes new pods."""

    otlp_endpoint: Annotated[StrictStr, Field(min_length=1, max_length=2048)] | None = None
    """Where they are sent, as a URL. Absent: nowhere."""
    sample_ratio: Annotated[Real, Field(ge=0, le=1)] | None = None
    """The part of the sessions that is traced, each of them whole."""


class VoiceVolume(ApiModel):
    """A volume of voice files, one `<name>.safetensors` each."""

    claim_name: ObjectName
    """A PersistentVolumeClaim of the pool's namespace, mounted read-only."""


class PodTemplate(ApiModel):
    """A Kubernetes PodTemplateSpec. Its schema is the API server's business, so only the outer
    shape is fixed here; the operator's pod is refused where it is wrong."""

    metadata: OpenObject | None = None
    """Labels and annotations of the pods."""
    spec: OpenObject | None = None
    """A PodSpec."""


class PoolSpec(ApiModel):
    """What is wanted of the pods."""

    model_config = ConfigDict(
        json_schema_extra=cel_rules(
            (
                "!has(self.defaultWindowPreset) || (has(self.windowPresets)"
                " && self.defaultWindowPreset in self.windowPresets)",
                "defaultWindowPreset must be one of windowPresets",
            )
        )
    )

    checkpoint: Checkpoint
    checkpoint_change: CheckpointChange | None = None
    image: ImageName | None = None
    """The sidecar's image. Default: the one of the installed release."""
    slots: Annotated[StrictInt, Field(ge=1, le=256)]
    """Live sessions on one pod."""
    rebuilds_at_once: Annotated[StrictInt, Field(ge=1, le=64)] | None = None
    """Rebuilds that a pod keeps room for beside its slots."""
    gpu: Gpu | None = None
    shared_memory: Quantity | None = None
    """Size of /dev/shm."""
    startup_timeout: Duration | None = None
    """How long a pod may load its model before it is started again."""
    replicas: Annotated[StrictInt, Field(ge=0, le=1000)] = 1
    """Pods wanted. Yours (or an autoscaler's) to write: the operator never does."""
    scaling: Scaling | None = None
    allowed_namespaces: AllowedNamespaces | None = None
    drain: DrainPolicy | None = None
    upgrade: UpgradePolicy | None = None
    window_presets: Annotated[dict[StrictStr, WindowPolicy], Field(max_length=32)] | None = None
    """Window policies by name, for sessions to choose from."""
    default_window_preset: LabelName | None = None
    """The preset of sessions that name none. Absent: the product's defaults."""
    voices: VoiceVolume | None = None
    telemetry: Telemetry | None = None
    template: PodTemplate | None = None
    """Merged into the pods by container name: what it says of `duplex-sidecar` (resources, env,
    volumeMounts, imagePullPolicy) goes into the sidecar, other containers stand beside it. They
    reach the realtime door at $DUPLEX_REALTIME_URL and none of the product's volumes or Secrets.
    What would reach further is refused, see the condition Degraded."""

    @model_validator(mode="after")
    def _default_preset_exists(self) -> Self:
        name = self.default_window_preset
        if name is not None and name not in (self.window_presets or {}):
            raise ValueError("defaultWindowPreset must be one of windowPresets")
        return self


class PoolStatus(ApiModel):
    """How things stand, as the operator tells it."""

    observed_generation: LongCount | None = None
    """The metadata.generation that this status is about."""
    replicas: Count | None = None
    """Pods that are there."""
    ready_replicas: Count | None = None
    """Those of them that take sessions."""
    selector: Annotated[StrictStr, Field(max_length=4096)] | None = None
    """The pods' labels as text, for the scale subresource."""
    slots: Count | None = None
    """Sessions that fit on the ready pods."""
    free_slots: Count | None = None
    """Sessions that fit beside those that are there."""
    queued: Count | None = None
    """Sessions that wait for a slot."""
    conditions: (
        Annotated[tuple[Condition, ...], Field(max_length=16, json_schema_extra=listed_by("type"))]
        | None
    ) = None
    """Among them Ready and Degraded."""


class DuplexPool(ApiModel):
    """GPU pods that serve the same model."""

    api_version: StrictStr = API_VERSION
    kind: StrictStr = POOL_KIND
    metadata: ObjectMeta
    spec: PoolSpec
    status: PoolStatus | None = None
