"""The operator's rights are exactly what its code asks of the API server, call by call."""

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from duplex_api.constants import API_GROUP
from duplex_operator.kube import resources

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
CODE = ROOT / "operator" / "duplex_operator"
GOLDEN = Path(__file__).parent / "golden" / "defaults.yaml"

VERBS = {"get", "list", "create", "patch", "delete"}
RESOURCES: dict[str, resources.Resource] = {
    name: value for name, value in vars(resources).items() if isinstance(value, resources.Resource)
}
WATCHED = ("SESSIONS", "POOLS", "PODS", "NODES")
"""Listed and watched by the intake, which names them in a table."""


class Right(NamedTuple):
    group: str
    resource: str
    verb: str


BLOCKS_OWNERS = {
    Right(API_GROUP, f"{plural}/finalizers", "update")
    for plural in ("duplexpools", "duplexsessions")
}
"""Never called: some clusters ask for it when an owner reference says blockOwnerDeletion."""


def right(resource: resources.Resource, verb: str, subresource: str = "") -> Right:
    parts = resource.base.split("/")
    group = parts[2] if parts[1] == "apis" else ""
    name = f"{resource.plural}/{subresource}" if subresource else resource.plural
    return Right(group, name, verb)


def calls(tree: ast.AST) -> Iterator[Right]:
    """Calls of KubernetesApi that name a resource: `api.patch(PODS, ...)`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        verb = node.func.attr
        named = node.args[0].id if node.args and isinstance(node.args[0], ast.Name) else ""
        if verb in VERBS and named in RESOURCES:
            subresource = next(
                (
                    str(keyword.value.value)
                    for keyword in node.keywords
                    if keyword.arg == "subresource" and isinstance(keyword.value, ast.Constant)
                ),
                "",
            )
            yield right(RESOURCES[named], verb, subresource)


def asked() -> set[Right]:
    files = sorted(CODE.rglob("*.py"))
    trees = [ast.parse(file.read_text(encoding="utf-8")) for file in files]
    found = {each for tree in trees for each in calls(tree)}
    watched = {right(RESOURCES[name], verb) for name in WATCHED for verb in ("list", "watch")}
    return found | watched


def granted() -> set[Right]:
    with GOLDEN.open(encoding="utf-8") as text:
        objects = list(yaml.safe_load_all(text))
    roles = [
        each
        for each in objects
        if each["kind"] in ("Role", "ClusterRole") and "operator" in each["metadata"]["name"]
    ]
    return {
        Right(group, resource, verb)
        for role in roles
        for rule in role["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_no_right_is_missing() -> None:
    assert asked() - granted() == set()


def test_no_right_is_unused() -> None:
    assert granted() - asked() == BLOCKS_OWNERS


def test_the_table_of_watches_is_the_intakes() -> None:
    text = (CODE / "intake.py").read_text(encoding="utf-8")
    assert [name for name in WATCHED if f"({name}, " not in text] == []
    assert {name for name in RESOURCES if f"({name}, " in text} == set(WATCHED)
