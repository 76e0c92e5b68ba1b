"""The generated CRDs against the rules that the API server applies to structural schemas."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from duplex_api.crd import pool_crd, session_crd
from duplex_api.manifest import load_manifests
from duplex_api.pool import PoolSpec
from duplex_api.session import IMMUTABLE_SESSION_FIELDS, SessionSpec

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CRDS = {"duplexsessions": session_crd(), "duplexpools": pool_crd()}
KEYS_OF_A_STRUCTURAL_NODE = {
    *("type", "description", "enum", "format", "pattern", "minLength", "maxLength"),
    *("minimum", "maximum", "exclusiveMinimum", "minItems", "maxItems", "maxProperties"),
    *("required", "properties", "items", "additionalProperties", "default"),
    *("x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys"),
    "x-kubernetes-preserve-unknown-fields",
}
OPEN_OBJECTS = {"spec.template.metadata", "spec.template.spec"}


def schema_of(crd: dict[str, Any]) -> dict[str, Any]:
    (version,) = crd["spec"]["versions"]
    return version["schema"]["openAPIV3Schema"]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}" if path else name)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


@pytest.mark.parametrize("plural", CRDS)
def test_the_schema_is_structural(plural: str) -> None:
    for path, node in nodes(schema_of(CRDS[plural])):
        assert set(node) <= KEYS_OF_A_STRUCTURAL_NODE, path
        assert node["type"] in {"object", "array", "string", "integer", "number", "boolean"}, path
        assert ("items" in node) == (node["type"] == "array"), path
        assert not ("properties" in node and "additionalProperties" in node), path
        assert set(node.get("required", ())) <= set(node.get("properties", ())), path
        if node["type"] == "object" and "properties" not in node and path != "metadata":
            closed = "additionalProperties" in node
            assert closed or node.get("x-kubernetes-preserve-unknown-fields") is True, path


@pytest.mark.parametrize("plural", CRDS)
def test_unknown_fields_are_kept_only_in_the_pod_template(plural: str) -> None:
    kept = {
        path
        for path, node in nodes(schema_of(CRDS[plural]))
        if "x-kubernetes-preserve-unknown-fields" in node
    }
    assert kept == (OPEN_OBJECTS if plural == "duplexpools" else set())


def test_the_only_default_is_the_pool_s_replicas() -> None:
    defaults = {
        f"{plural} {path}": node["default"]
        for plural, crd in CRDS.items()
        for path, node in nodes(schema_of(crd))
        if "default" in node
    }
    assert defaults == {"duplexpools spec.replicas": 1}


@pytest.mark.parametrize("plural", CRDS)
def test_what_rules_compare_is_bounded(plural: str) -> None:
    """The API server refuses rules whose worst cost it cannot bound."""
    for path, node in nodes(schema_of(CRDS[plural])):
        if not path.startswith("spec") or any(path.startswith(open) for open in OPEN_OBJECTS):
            continue
        if node["type"] == "string":
            assert "maxLength" in node or "enum" in node, path
        if node["type"] == "array":
            assert "maxItems" in node, path
        if "additionalProperties" in node:
            assert "maxProperties" in node, path


def test_every_immutable_field_is_guarded_on_its_parent() -> None:
    rules = [
        rule["rule"]
        for rule in schema_of(CRDS["duplexsessions"])["properties"]["spec"][
            "x-kubernetes-validations"
        ]
    ]
    for field in IMMUTABLE_SESSION_FIELDS:
        name = SessionSpec.model_fields[field].alias
        guard = f"has(self.{name}) == has(oldSelf.{name})"
        assert [rule for rule in rules if rule.startswith(guard) and f"self.{name} ==" in rule]
    mutable = set(SessionSpec.model_fields) - set(IMMUTABLE_SESSION_FIELDS)
    assert mutable == {"priority", "lifecycle", "desired_state"}


@pytest.mark.parametrize("plural", CRDS)
def test_every_rule_names_fields_that_exist(plural: str) -> None:
    for path, node in nodes(schema_of(CRDS[plural])):
        for rule in node.get("x-kubernetes-validations", ()):
            assert rule["message"], path
            for name in re.findall(r"(?:self|oldSelf)\.(\w+)", rule["rule"]):
                assert name in node["properties"], f"{path}: {rule['rule']}"


@pytest.mark.parametrize("plural", CRDS)
def test_kubectl_explain_has_a_sentence_for_every_field(plural: str) -> None:
    def fields(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        for name, inner in schema.get("properties", {}).items():
            yield f"{path}.{name}", inner
            yield from fields(inner, f"{path}.{name}")
        for key in ("items", "additionalProperties"):
            if key in schema:
                yield from fields(schema[key], f"{path}[]")

    schema = schema_of(CRDS[plural])
    # The server has its own sentences there, and refuses ours.
    assert set(schema["properties"]["metadata"]) == {"type", "properties"}
    found = {path: f for path, f in fields(schema) if not path.startswith(".metadata")}
    assert len(found) > 60
    bare = [
        path
        for path, field in found.items()
        if len(re.sub(r"^Default: .*", "", field.get("description", "")).split()) < 2
    ]
    assert bare == []


@pytest.mark.parametrize("plural", CRDS)
def test_a_kind_fits_into_the_annotation_of_a_client_side_apply(plural: str) -> None:
    """kubectl keeps what was applied there, and all annotations have 262,144 bytes."""
    assert len(json.dumps(CRDS[plural]).encode()) < 65_536


@pytest.mark.parametrize("plural", CRDS)
def test_printer_columns_point_at_fields(plural: str) -> None:
    crd = CRDS[plural]
    known = {path for path, _ in nodes(schema_of(crd))} | {"metadata.creationTimestamp"}
    (version,) = crd["spec"]["versions"]
    for column in version["additionalPrinterColumns"]:
        path = re.sub(r"\[\?\(@\.type==\"\w+\"\)\]", "[]", column["jsonPath"])
        assert path.removeprefix(".") in known
    shown = {
        column["name"]
        for column in version["additionalPrinterColumns"]
        if not column.get("priority")
    }
    assert "Reason" in shown
    assert "status" in version["subresources"]


def test_the_scale_subresource_points_at_fields() -> None:
    (version,) = CRDS["duplexpools"]["spec"]["versions"]
    known = {path for path, _ in nodes(schema_of(CRDS["duplexpools"]))}
    assert {path.removeprefix(".") for path in version["subresources"]["scale"].values()} <= known


@pytest.mark.parametrize("plural", CRDS)
def test_what_is_checked_in_is_what_the_models_give(plural: str) -> None:
    for folder in ("crds", "charts/duplex-crds/templates"):
        text = (ROOT / folder / f"{plural}.yaml").read_text(encoding="utf-8")
        assert yaml.safe_load(text) == CRDS[plural]
        assert "{{" not in text
        assert "&id" not in text


@pytest.mark.parametrize("plural", CRDS)
def test_the_crd_is_small_enough_for_client_side_apply(plural: str) -> None:
    text = (ROOT / "crds" / f"{plural}.yaml").read_text(encoding="utf-8")
    assert len(text) < 200_000


def test_examples_have_only_fields_of_the_schema() -> None:
    schemas = {"DuplexSession": SessionSpec, "DuplexPool": PoolSpec}
    for path in sorted((ROOT / "examples").glob("*.yaml")):
        manifests = load_manifests(path.read_text(encoding="utf-8"))
        for loaded in (*manifests.sessions, *manifests.pools):
            crd = CRDS["duplexsessions" if loaded.kind == "DuplexSession" else "duplexpools"]
            wire = loaded.spec.model_dump(mode="json", exclude_none=True)
            assert set(wire) <= set(schema_of(crd)["properties"]["spec"]["properties"])
            assert schemas[loaded.kind].model_validate(wire) == loaded.spec
