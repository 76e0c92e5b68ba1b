"""The values of the chart `duplex`: every one is in the schema, and nothing else passes it."""

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CHART = ROOT / "charts" / "duplex"
SETS = (
    *sorted((Path(__file__).parent / "values").glob("*.yaml")),
    *sorted((ROOT / "examples" / "helm").glob("*.yaml")),
)
SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
SHIPPED: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

FREE = {"annotations", "labels", "nodeSelector", "affinity", "spec", "requests", "limits", "global"}
"""Objects whose fields are Kubernetes' or the user's business."""


def merged(base: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    """As Helm does it: objects field by field, everything else replaced."""
    result = copy.deepcopy(base)
    for name, value in over.items():
        both = isinstance(value, dict) and isinstance(result.get(name), dict)
        result[name] = merged(result[name], value) if both else value
    return result


def accepts(over: dict[str, Any]) -> bool:
    return Draft202012Validator(SCHEMA).is_valid(merged(SHIPPED, over))


def objects(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object in the schema that is ours to describe, by its path."""
    if "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]]
    if schema.get("type") == "array":
        yield from objects(schema["items"], f"{path}[]")
    if schema.get("type") != "object" or path.rpartition(".")[2] in FREE:
        return
    if path.endswith("[]") and "properties" not in schema:
        return
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from objects(inner, f"{path}.{name}")


def test_the_schema_is_one() -> None:
    Draft202012Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", [path for path, _ in objects(SCHEMA)])
def test_no_object_takes_a_field_it_does_not_know(path: str) -> None:
    assert dict(objects(SCHEMA))[path]["additionalProperties"] is False


def test_the_shipped_values_name_every_field() -> None:
    def names(schema: dict[str, Any], values: dict[str, Any], path: str) -> None:
        schema = SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema
        known = set(schema.get("properties", {})) - {"global", "claims"}
        assert known == set(values), path
        for name in known:
            if isinstance(values[name], dict) and name not in FREE:
                names(schema["properties"][name], values[name], f"{path}.{name}")

    names(SCHEMA, SHIPPED, "")
    assert accepts({})


@pytest.mark.parametrize("values", SETS, ids=lambda path: path.stem)
def test_a_set_of_values_that_is_used_somewhere_passes(values: Path) -> None:
    assert accepts(yaml.safe_load(values.read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    "over",
    [
        {"gatway": {}},
        {"gateway": {"replica": 2}},
        {"gateway": {"replicas": 0}},
        {"gateway": {"replicas": "2"}},
        {"gateway": {"externalUrl": "https://voice.example"}},
        {"gateway": {"ingress": {"enabled": True}}},
        {"operator": {"logLevel": "loud"}},
        {"operator": {"resources": {"request": {}}}},
        {"watchNamespaces": ["Voice"]},
        {"watchNamespaces": ["voice", "voice"]},
        {"image": {"digest": "sha256:12"}},
        {"image": {"pullPolicy": "Sometimes"}},
        {"trialLedger": {"enabled": False}},
        {"externalLedger": {"urlSecretName": "ledger"}},
        {"defaultPool": {"enabled": True}},
        {"defaultPool": {"enabled": True, "spec": {"slots": 2}}},
        {"networkPolicy": {"apiServer": {"ports": []}}},
        {"networkPolicy": {"dns": []}},
        {"podMonitor": {"pools": [{"name": "demo"}]}},
        {"uninstall": {"timeoutSeconds": 5}},
        {"test": {"pool": "a/b"}},
    ],
    ids=str,
)
def test_a_wrong_value_is_refused(over: dict[str, Any]) -> None:
    assert not accepts(over)


def test_no_ledger_at_all_is_told_by_the_value_that_is_missing() -> None:
    over = merged(SHIPPED, {"trialLedger": {"enabled": False}})
    (error,) = Draft202012Validator(SCHEMA).iter_errors(over)
    assert list(error.absolute_path) == ["externalLedger", "urlSecretName"]
