"""The contract as CustomResourceDefinitions: structural schemas made from the pydantic models.

Called by `make generate`; what it writes is checked in. Kubernetes wants schemas without
references, every node typed, optional fields absent rather than null, and (here) no defaults: the
API server would write them into the object and so defeat a pool's preset. The one default is
`spec.replicas` of a pool: without it the scale subresource answers 500.
"""

import json
from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from duplex_api.base import ApiModel
from duplex_api.constants import (
    API_GROUP,
    API_VERSION,
    API_VERSION_NAME,
    CATEGORIES,
    POOL_KIND,
    POOL_PLURAL,
    POOL_SHORT_NAME,
    POOL_SINGULAR,
    SESSION_KIND,
    SESSION_PLURAL,
    SESSION_SHORT_NAME,
    SESSION_SINGULAR,
)
from duplex_api.metadata import ObjectMeta
from duplex_api.pool import PoolSpec, PoolStatus
from duplex_api.resolve import (
    DEFAULT_CAMERA,
    DEFAULT_LIFECYCLE,
    DEFAULT_OUTPUT,
    DEFAULT_SAMPLING,
)
from duplex_api.resolve_pool import DEFAULT_DRAIN, DEFAULT_POOL, DEFAULT_UPGRADE
from duplex_api.session import IMMUTABLE_SESSION_FIELDS, SessionSpec, SessionStatus
from duplex_api.window import DEFAULT_WINDOW

Schema = dict[str, Any]

_INT32_MAX = 2**31 - 1
_KEPT_AS_THEY_ARE = (
    "type",
    "enum",
    "format",
    "pattern",
    "minLength",
    "maxLength",
    "minimum",
    "maximum",
    "minItems",
    "maxItems",
    "maxProperties",
    "required",
    "x-kubernetes-validations",
    "x-kubernetes-list-type",
    "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
)


def session_crd() -> Schema:
    """The CustomResourceDefinition of DuplexSession."""
    spec = structural_schema(SessionSpec)
    for field, defaults in (
        ("window", DEFAULT_WINDOW.as_policy()),
        ("lifecycle", DEFAULT_LIFECYCLE),
        ("sampling", DEFAULT_SAMPLING),
        ("output", DEFAULT_OUTPUT),
        ("camera", DEFAULT_CAMERA),
    ):
        _tell_defaults(spec["properties"][field], defaults)
    spec["x-kubernetes-validations"] = [
        *(_immutable(_wire_name(SessionSpec, field)) for field in IMMUTABLE_SESSION_FIELDS),
        {
            "rule": "!has(oldSelf.desiredState) || oldSelf.desiredState != 'Closed'"
            " || (has(self.desiredState) && self.desiredState == 'Closed')",
            "message": "a closed session stays closed",
        },
    ]
    return _crd(
        names={
            "kind": SESSION_KIND,
            "listKind": f"{SESSION_KIND}List",
            "plural": SESSION_PLURAL,
            "singular": SESSION_SINGULAR,
            "shortNames": [SESSION_SHORT_NAME],
        },
        description="A live two-way speech conversation with an omni model.",
        spec=spec,
        status=structural_schema(SessionStatus),
        subresources={"status": {}},
        columns=[
            _column("Phase", ".status.phase"),
            _column("Pool", ".spec.poolRef.name"),
            _column("Pod", ".status.placement.pod"),
            _column("Window", ".status.window.mode"),
            _column("Units", ".status.units", type_name="integer"),
            _column("Rebuilds", ".status.rebuilds", type_name="integer", wide=True),
            _column("Queue", ".status.queuePosition", type_name="integer", wide=True),
            _column("Reason", ".status.reason"),
            _column("Age", ".metadata.creationTimestamp", type_name="date"),
        ],
    )


def pool_crd() -> Schema:
    """The CustomResourceDefinition of DuplexPool."""
    spec = structural_schema(PoolSpec)
    _tell_defaults(spec, DEFAULT_POOL)
    _tell_defaults(spec["properties"]["drain"], DEFAULT_DRAIN)
    _tell_defaults(spec["properties"]["upgrade"], DEFAULT_UPGRADE)
    spec["properties"]["replicas"]["default"] = PoolSpec.model_fields["replicas"].default
    return _crd(
        names={
            "kind": POOL_KIND,
            "listKind": f"{POOL_KIND}List",
            "plural": POOL_PLURAL,
            "singular": POOL_SINGULAR,
            "shortNames": [POOL_SHORT_NAME],
        },
        description="GPU pods that serve the same model.",
        spec=spec,
        status=structural_schema(PoolStatus),
        subresources={
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        columns=[
            _column("Replicas", ".status.replicas", type_name="integer"),
            _column("Ready", ".status.readyReplicas", type_name="integer"),
            _column("Slots", ".status.slots", type_name="integer"),
            _column("Free", ".status.freeSlots", type_name="integer"),
            _column("Queued", ".status.queued", type_name="integer"),
            _column("Reason", '.status.conditions[?(@.type=="Ready")].reason'),
            _column("Age", ".metadata.creationTimestamp", type_name="date"),
        ],
    )


def structural_schema(model: type[BaseModel]) -> Schema:
    """The model's JSON schema in the structural form that Kubernetes takes."""
    schema = model.model_json_schema(by_alias=True)
    return _structural(schema, schema.get("$defs", {}))


def _structural(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    schema = _without_indirection(schema, definitions)
    result: Schema = {}
    if "description" in schema:
        result["description"] = " ".join(str(schema["description"]).split())
    result |= {key: schema[key] for key in _KEPT_AS_THEY_ARE if key in schema}
    if "exclusiveMinimum" in schema:
        result |= {"minimum": schema["exclusiveMinimum"], "exclusiveMinimum": True}
    if schema.get("type") == "integer":
        _size_integer(result)
    if "properties" in schema:
        result["properties"] = {
            name: _structural(inner, definitions) for name, inner in schema["properties"].items()
        }
    if "items" in schema:
        result["items"] = _structural(schema["items"], definitions)
    if result.get("x-kubernetes-preserve-unknown-fields"):
        return result
    extra = schema.get("additionalProperties")
    if isinstance(extra, dict):
        result["additionalProperties"] = _structural(cast(Schema, extra), definitions)
    return result


def _without_indirection(schema: Schema, definitions: Mapping[str, Schema]) -> Schema:
    """References replaced by what they name, `X | null` by X. What stands beside them wins."""
    while "$ref" in schema or "anyOf" in schema:
        beside = {key: value for key, value in schema.items() if key not in ("$ref", "anyOf")}
        if "$ref" in schema:
            inner = definitions[str(schema["$ref"]).removeprefix("#/$defs/")]
        else:
            (inner,) = (choice for choice in schema["anyOf"] if choice.get("type") != "null")
        schema = {**inner, **beside}
    return schema


def _size_integer(result: Schema) -> None:
    """int32 where the bound says so, else int64, whose own bound no schema number can express."""
    if result.get("maximum", _INT32_MAX + 1) <= _INT32_MAX:
        result["format"] = "int32"
    else:
        result.pop("maximum", None)
        result["format"] = "int64"


def _tell_defaults(schema: Schema, defaults: ApiModel) -> None:
    """Says in words what an absent field means. No `default:`, see above."""
    for name, value in defaults.model_dump(mode="json", exclude_none=True).items():
        inner = schema["properties"][name]
        text = value if isinstance(value, str) else json.dumps(value)
        inner["description"] = f"{inner.get('description', '')} Default: {text}.".strip()


def _wire_name(model: type[BaseModel], field: str) -> str:
    return model.model_fields[field].alias or field


def _immutable(name: str) -> dict[str, str]:
    """On the parent: a rule on the field itself is passed by removing it and adding it again."""
    return {
        "rule": f"has(self.{name}) == has(oldSelf.{name})"
        f" && (!has(self.{name}) || self.{name} == oldSelf.{name})",
        "message": f"{name} cannot be changed, added or removed",
    }


def _column(
    name: str, json_path: str, *, type_name: str = "string", wide: bool = False
) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": type_name, "jsonPath": json_path}
    return column | ({"priority": 1} if wide else {})


def _text(description: str) -> Schema:
    return {"type": "string", "description": description}


def _crd(
    *,
    names: dict[str, Any],
    description: str,
    spec: Schema,
    status: Schema,
    subresources: dict[str, Any],
    columns: list[dict[str, Any]],
) -> Schema:
    name = structural_schema(ObjectMeta)["properties"]["name"]
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{names['plural']}.{API_GROUP}",
            # Removing the chart must not remove everybody's sessions.
            "annotations": {"helm.sh/resource-policy": "keep"},
        },
        "spec": {
            "group": API_GROUP,
            "scope": "Namespaced",
            "names": {**names, "categories": list(CATEGORIES)},
            "versions": [
                {
                    "name": API_VERSION_NAME,
                    "served": True,
                    "storage": True,
                    "subresources": subresources,
                    "additionalPrinterColumns": columns,
                    "schema": {
                        "openAPIV3Schema": {
                            "type": "object",
                            "description": description,
                            "required": ["spec"],
                            "properties": {
                                "apiVersion": _text(f"Always {API_VERSION}."),
                                "kind": _text(f"Always {names['kind']}."),
                                # Beside its type only the name may be narrowed here; it tells
                                # what it is by itself.
                                "metadata": {
                                    "type": "object",
                                    "properties": {
                                        "name": {
                                            key: name[key]
                                            for key in ("type", "maxLength", "pattern")
                                        }
                                    },
                                },
                                "spec": spec,
                                "status": status,
                            },
                        }
                    },
                }
            ],
        },
    }
