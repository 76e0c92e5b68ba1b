"""What every verb does with values that cannot be meant: one sentence, status 2, nothing begun."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from cyclopts import App
from cyclopts.argument import Argument

from duplex_api.manifest import ManifestError
from duplex_sidecar.cli.main import app
from duplex_sidecar.cli.manifest_file import read_manifest
from duplex_sidecar.cli.serve import serve

pytestmark = pytest.mark.unit

BAD_URL = "redis://u:hidden#word@h:6379/0"
OUTPUTS = {"--out", "--output", "--contract-tape", "--checkpoint", "--path"}
"""Options whose path need not be there: to be made, or told with how to make it."""


def verbs(of: App = app, chain: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], App]]:
    for name in of:
        if name.startswith("-"):
            continue
        verb = of[name]
        if verb.default_command is not None:
            yield (*chain, name), verb
        yield from verbs(verb, (*chain, name))


def plain(hint: Any) -> type:
    """Of `X | None`, `tuple[X, ...]` and X: X."""
    inner = [each for each in get_args(hint) if each not in (type(None), ...)]
    return plain(inner[0]) if inner else hint


def wrong_values(argument: Argument) -> tuple[str, ...]:
    hint, name = plain(argument.hint), argument.name
    if hint is Path and name not in OUTPUTS:
        return ("/nowhere/at/all",)
    if hint is float:
        return ("nan", "inf", "-1", "soon")
    if hint is int:
        return ("-1", "x", *(("70000",) if name == "--port" else ()))
    if "url" in name:
        return ("foo", BAD_URL, "http://h", "redis://h:port/0", "redis+sentinel://h")
    return ()


def given(argument: Argument, value: str) -> str:
    return f"{argument.name}={value}" if argument.name.startswith("-") else value


def right_value(argument: Argument) -> str:
    if plain(argument.hint) is Path:
        return __file__
    return "redis://h" if "url" in argument.name else "something"


def needed(verb: App, but: str) -> list[str]:
    return [
        given(argument, right_value(argument))
        for argument in verb.assemble_argument_collection()
        if argument.required and argument.name != but
    ]


CASES = [
    pytest.param(chain, verb, argument, value, id=f"{' '.join(chain)} {argument.name} {value}")
    for chain, verb in verbs()
    for argument in verb.assemble_argument_collection()
    for value in wrong_values(argument)
]
NEEDED = [
    pytest.param(chain, verb, argument, id=f"{' '.join(chain)} {argument.name}")
    for chain, verb in verbs()
    for argument in verb.assemble_argument_collection(parse_docstring=True)
    if argument.required
]


def test_every_verb_is_looked_at() -> None:
    found = {" ".join(chain) for chain, _ in verbs()}
    assert {"demo", "run", "serve", "doctor", "ledger sweep", "history check"} <= found
    assert len(CASES) > 80


def refusal(
    chain: tuple[str, ...], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> str:
    """Only read, never called."""
    with pytest.raises(SystemExit) as left:
        app.parse_args([*chain, *arguments])
    told = capsys.readouterr().err
    verb = " ".join(("duplex", *chain))
    assert left.value.code == 2
    assert told.startswith(f"{verb}: ")
    assert told.endswith(f"\nmore: {verb} --help\n")
    return told.splitlines()[0]


@pytest.mark.parametrize(("chain", "verb", "argument", "value"), CASES)
def test_a_value_that_cannot_be_meant(
    chain: tuple[str, ...],
    verb: App,
    argument: Argument,
    value: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refusal(chain, [*needed(verb, argument.name), given(argument, value)], capsys)
    assert argument.name in told
    assert "hidden" not in told


@pytest.mark.parametrize(
    ("chain", "verb"), [pytest.param(*one, id=" ".join(one[0])) for one in verbs()]
)
def test_what_may_be_left_out_may_be_left_out(chain: tuple[str, ...], verb: App) -> None:
    """Only read, never called."""
    app.parse_args([*chain, *needed(verb, "")])


def test_a_problem_of_the_whole_file_has_no_path(tmp_path: Path) -> None:
    file = tmp_path / "pool.yaml"
    file.write_bytes((Path(__file__).parents[3] / "examples" / "pool.yaml").read_bytes())
    with pytest.raises(ManifestError, match=r"\Aholds no DuplexSession"):
        read_manifest(file)


def test_settings_that_cannot_be_read_name_their_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "settings.json"
    for text in ('{"checkpoint": "c", "slotz": 4}', "{", '{"slots": "four"}'):
        file.write_text(text)
        assert serve(config=file) == 2
        assert capsys.readouterr().err.startswith(f"duplex serve: {file}: ")


@pytest.mark.parametrize(("chain", "verb", "argument"), NEEDED)
def test_a_value_that_is_missing_is_named_with_what_it_is(
    chain: tuple[str, ...],
    verb: App,
    argument: Argument,
    capsys: pytest.CaptureFixture[str],
) -> None:
    told = refusal(chain, needed(verb, argument.name), capsys)
    assert argument.name in told
    assert (argument.parameter.help or "no help").splitlines()[0] in told


def test_files_are_told_by_their_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    told = refusal(("run",), [f"-f={tmp_path}", f"--audio={__file__}"], capsys)
    assert told == f"duplex run: --file: {tmp_path}: Is a directory"
    told = refusal(("run",), [f"--audio={__file__}"], capsys)
    assert told.startswith("duplex run: --file (-f) is missing: DuplexSession manifest")
    told = refusal(("demo",), [f"--examples={__file__}"], capsys)
    assert told == f"duplex demo: --examples: {__file__}: Not a directory"


@pytest.mark.parametrize(
    ("content", "told"),
    [(b"\x80\x81", "is no text"), (b"a" * 1_048_577, "is too long"), (b"a: [1", "is not YAML")],
)
def test_a_file_that_is_no_manifest(tmp_path: Path, content: bytes, told: str) -> None:
    (tmp_path / "session.yaml").write_bytes(content)
    with pytest.raises(ManifestError, match=told):
        read_manifest(tmp_path / "session.yaml")


def test_a_ledger_that_is_not_named_is_told_with_its_variable(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DUPLEX_LEDGER_URL", raising=False)
    told = refusal(("ledger", "show"), ["session"], capsys)
    assert told.startswith("duplex ledger show: --url is missing: ")
    assert "DUPLEX_LEDGER_URL" in told
