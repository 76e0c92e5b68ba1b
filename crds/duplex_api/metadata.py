"""The parts of an object that Kubernetes defines and we read."""

from enum import StrEnum
from typing import Annotated, Any

from pydantic import Field, JsonValue, StrictStr

from duplex_api.base import ApiModel, LabelName, LongCount


class ObjectMeta(ApiModel):
    """Kubernetes' ObjectMeta. Its schema is the API server's; a CRD may only narrow the name."""

    name: LabelName
    """At most 63 characters, no dots: it becomes part of labels and of other objects' names."""
    namespace: Annotated[StrictStr, Field(max_length=63)] | None = None
    labels: dict[StrictStr, StrictStr] | None = None
    annotations: dict[StrictStr, StrictStr] | None = None
    finalizers: tuple[StrictStr, ...] | None = None
    owner_references: tuple[dict[str, JsonValue], ...] | None = None
    uid: StrictStr | None = None
    resource_version: StrictStr | None = None
    generation: LongCount | None = None
    generate_name: StrictStr | None = None
    self_link: StrictStr | None = None
    creation_timestamp: StrictStr | None = None
    deletion_timestamp: StrictStr | None = None
    deletion_grace_period_seconds: LongCount | None = None
    managed_fields: tuple[dict[str, JsonValue], ...] | None = None


class ConditionStatus(StrEnum):
    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(ApiModel):
    """Kubernetes' meta/v1 Condition, with its bounds."""

    type: Annotated[StrictStr, Field(min_length=1, max_length=316)]
    """What it is about, for example Ready."""
    status: ConditionStatus
    """True, False or Unknown."""
    reason: Annotated[StrictStr, Field(min_length=1, max_length=1024)]
    """Why, in one word."""
    message: Annotated[StrictStr, Field(max_length=32_768)]
    """Why, in a sentence."""
    last_transition_time: Annotated[
        StrictStr, Field(max_length=64, json_schema_extra={"format": "date-time"})
    ]
    """When the status became what it is."""
    observed_generation: LongCount | None = None
    """The metadata.generation that it was judged by."""


def listed_by(*keys: str) -> dict[str, Any]:
    """Schema extra of a list whose items are told apart by `keys` (server-side apply merges it)."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}
