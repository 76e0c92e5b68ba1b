"""README and docs/ hold: links lead somewhere, what they name exists, tables are complete."""

import re
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from duplex_sidecar.cli.main import app
from duplex_sidecar.settings import SidecarSettings
from duplex_sidecar.telemetry import names

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
PAGES = sorted(
    (ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md"))
)
HOMES = (ROOT, ROOT / "sidecar" / "duplex_sidecar", ROOT / "crds", ROOT / "docs")
"""Where a path that a page names may begin."""
MAX_PICTURE_BYTES = 200_000
GROUPS = ("checkpoint", "contract", "history", "ledger", "voice")
"""Verbs that have verbs."""

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_CODE = re.compile(r"^```.*?^```|`[^`]+`", re.MULTILINE | re.DOTALL)
_MAKE = re.compile(r"(?<!duplex voice )\bmake ([a-z-]+)")
_PATH = re.compile(r"^[\w./-]+/[\w.-]+\.(?:py|md|yaml|toml|lua|json)$")

by_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def code_of(page: Path) -> Iterator[str]:
    """What a page sets as code."""
    yield from (found[0].strip("`") for found in _CODE.finditer(page.read_text(encoding="utf-8")))


@by_page
def test_every_link_leads_somewhere(page: Path) -> None:
    links = _LINK.findall(page.read_text(encoding="utf-8"))
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    assert [link for link in inside if link and not (page.parent / link).exists()] == []


@by_page
def test_every_file_that_is_named_exists(page: Path) -> None:
    paths = {code for code in code_of(page) if _PATH.match(code)}
    homes = (page.parent, *HOMES)
    made = {"demo-out/spans.jsonl", "tests/faults/last_run.json", "tests/soak/last_soak.json"}
    gone = {path for path in paths if not any((home / path).exists() for home in homes)}
    assert gone - made == set()


@by_page
def test_every_make_verb_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    verbs = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    named = {verb for code in code_of(page) for verb in _MAKE.findall(code)}
    assert named - verbs == set()


@by_page
def test_every_duplex_verb_exists(page: Path) -> None:
    verbs = {name for name in app if not name.startswith("-")}
    for code in code_of(page):
        for verb, inner in re.findall(r"(?:^|[\s/])duplex ([a-z]+)(?![\w/])(?: ([a-z]+)\b)?", code):
            assert verb in verbs, code
            assert not inner or verb not in GROUPS or inner in list(app[verb]), code


def test_every_verb_is_in_the_readme() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    verbs = [name for name in app if not name.startswith("-") and name not in GROUPS]
    verbs += [f"{group} {name}" for group in GROUPS for name in app[group] if name[0] != "-"]
    assert [verb for verb in verbs if f"`duplex {verb}`" not in text] == []


def test_the_readmes_code_is_the_examples() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    example = (ROOT / "examples" / "talk.py").read_text(encoding="utf-8")
    wanted = {line.strip() for line in example.splitlines()}
    blocks = re.findall(r"^```python\n(.*?)^```", readme, re.MULTILINE | re.DOTALL)
    lines = {line.strip() for block in blocks for line in block.splitlines()}
    assert blocks
    assert lines - wanted == set()


def test_pictures_are_small() -> None:
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert [path.name for path in pictures if path.stat().st_size > MAX_PICTURE_BYTES] == []


def operations() -> str:
    return (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")


def test_every_setting_is_explained_with_its_default() -> None:
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", operations(), re.MULTILINE))
    for field in msgspec.structs.fields(SidecarSettings):
        said = rows.pop(field.name)
        if field.required:
            assert said == "must be said"
        elif isinstance(field.default, bool | int | float) or field.name == "host":
            assert said == f"`{_as_json(field.default)}`", field.name
    assert rows == {}


def _as_json(value: object) -> str:
    return value if isinstance(value, str) else msgspec.json.encode(value).decode()


def test_every_span_event_attribute_and_metric_is_explained() -> None:
    text = operations()
    known = {value for value in vars(names).values() if isinstance(value, str)}
    ours = {value for value in known if value.startswith("duplex.") and value.count(".")}
    assert sorted(name for name in ours if f"`{name}`" not in text) == []


def test_decisions_are_numbered_without_gaps() -> None:
    numbers = [path.name[:4] for path in sorted((ROOT / "docs" / "decisions").iterdir())]
    assert numbers == [f"{number:04}" for number in range(1, len(numbers) + 1)]
