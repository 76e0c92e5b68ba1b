"""What is promised of the images can be read off their Dockerfiles."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docker").glob("*.Dockerfile"))
USER = "65532:65532"

by_file = pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)


def instructions(file: Path) -> list[tuple[str, str]]:
    """(instruction, arguments), continuation lines joined, comments gone."""
    lines = [
        line
        for line in file.read_text(encoding="utf-8").splitlines()
        if not line.startswith("#") and line.strip()
    ]
    text = "\n".join(lines).replace("\\\n", " ")
    pairs = (line.split(maxsplit=1) for line in text.splitlines())
    return [(word.upper(), rest) for word, rest in pairs]


def test_there_is_one_for_each_image() -> None:
    assert [file.name for file in FILES] == ["control.Dockerfile", "sidecar.Dockerfile"]


@by_file
def test_the_base_is_an_argument_with_a_full_version(file: Path) -> None:
    found = instructions(file)
    assert found[0][0] == "ARG"
    assert re.fullmatch(r"BASE=[a-z]+:\d+\.\d+\.\d+-[a-z-]+", found[0][1])
    assert {rest.split()[0] for word, rest in found if word == "FROM"} == {"${BASE}"}


@by_file
def test_nothing_else_comes_from_somewhere(file: Path) -> None:
    for word, rest in instructions(file):
        assert word != "ADD"
        assert "://" not in rest
        if word == "COPY":
            source = re.fullmatch(r"--from=(build /opt/duplex|project /project) /opt/duplex", rest)
            inside = all((ROOT / part).exists() for part in rest.split()[:-1])
            assert source or inside, rest


@by_file
def test_what_is_installed_is_pinned(file: Path) -> None:
    found = instructions(file)
    runs = [rest for word, rest in found if word == "RUN"]
    pins = {rest.split("=")[0] for word, rest in found if word == "ARG" and "=" in rest}
    assert {"UV_VERSION", "HATCHLING_VERSION"} <= pins
    syncs = [run for run in runs if re.search(r"\buv sync\b", run)]
    assert syncs
    assert all("--frozen" in run for run in syncs)
    installs = [run for run in runs if " install " in run and "apt-get" not in run]
    for run in installs:
        assert '"uv==${UV_VERSION}"' in run or "--no-deps" in run
    [project] = [run for run in runs if run.rstrip().endswith(" .")]
    assert '"hatchling==${HATCHLING_VERSION}"' in project
    assert "--build-constraints" in project


def test_what_is_heavy_stays_when_the_project_changes() -> None:
    """A release then costs a registry and its nodes the last layers, not gigabytes."""
    found = instructions(ROOT / "docker" / "sidecar.Dockerfile")
    last = [index for index, (word, _) in enumerate(found) if word == "FROM"][-1]
    sources = [each.name for each in (ROOT / "docker").parent.iterdir() if each.is_dir()]
    changing = [
        index
        for index, (word, rest) in enumerate(found[last:])
        if word == "COPY" and (set(rest.split()) & set(sources) or "--from=project" in rest)
    ]
    heavy = [index for index, (_, rest) in enumerate(found[last:]) if "uv sync" in rest]
    assert len(heavy) == 2
    assert max(heavy) < min(changing)


@by_file
def test_no_step_mounts_another_stage(file: Path) -> None:
    """buildah 1.28 mounts nothing of a stage that it takes from its cache."""
    assert [rest for word, rest in instructions(file) if word == "RUN" and "--mount" in rest] == []


@by_file
def test_nobody_is_root_in_the_end(file: Path) -> None:
    last = [rest for word, rest in instructions(file) if word in ("FROM", "USER")][-1]
    assert last == USER
    names = (ROOT / "charts" / "duplex" / "templates" / "_names.tpl").read_text(encoding="utf-8")
    assert f"runAsUser: {USER.split(':')[0]}" in names


@by_file
def test_a_user_without_an_entry_has_a_name(file: Path) -> None:
    """kopf and torch ask for it, and getpass looks here first."""
    [variables] = [rest for word, rest in instructions(file) if word == "ENV" and "PATH=" in rest]
    assert "USER=duplex" in variables.split()


def test_operator_and_gateway_come_without_an_engine() -> None:
    text = (ROOT / "docker" / "control.Dockerfile").read_text(encoding="utf-8")
    assert "--only-group control --no-install-project" in text
    assert "--extra" not in text


def test_the_context_holds_what_is_copied_and_no_more() -> None:
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").split()
    assert lines[0] == "*"
    copied = {
        part
        for file in FILES
        for word, rest in instructions(file)
        if word == "COPY" and not rest.startswith("--from")
        for part in rest.split()[:-1]
    }
    assert {line.removeprefix("!") for line in lines if line.startswith("!")} == copied
