"""Manifests: what is taken, what is refused, and how it is said."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from duplex_api import yaml_text
from duplex_api.constants import API_VERSION
from duplex_api.manifest import ManifestError, load_manifest, load_manifests
from duplex_api.resolve import resolve_session
from duplex_api.window import WindowLimits, WindowMode
from duplex_api.yaml_text import read_documents

pytestmark = pytest.mark.unit

EXAMPLES = Path(__file__).parents[3] / "examples"
HEAD = f"apiVersion: {API_VERSION}\nkind: DuplexSession\nmetadata: {{name: talk}}\n"


def session_text(spec: str) -> str:
    return f"{HEAD}spec:\n  poolRef: {{name: demo}}\n" + "".join(
        f"  {line}\n" for line in spec.splitlines()
    )


def problems(text: str) -> dict[str, str]:
    """Path -> what is said about it."""
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    return {problem.path: str(problem) for problem in caught.value.problems}


CLAIMS = EXAMPLES.glob("claim*.yaml")
"""Kubernetes' own kinds: what the pools' examples want to be there."""
EXAMPLES_OF_OURS = sorted({*EXAMPLES.glob("*.yaml")} - {*CLAIMS})


@pytest.mark.parametrize("path", EXAMPLES_OF_OURS, ids=lambda path: path.name)
def test_every_example_is_taken_and_runs_on_the_tiny_model(path: Path) -> None:
    manifests = load_manifests(path.read_text(encoding="utf-8"))
    assert len(manifests.sessions) + len(manifests.pools) == 1
    for session in manifests.sessions:
        limits = WindowLimits(max_model_tokens=2048, least_unit_tokens=13)
        assert resolve_session(session.spec, None, limits).window.mode is not WindowMode.OFF


def test_the_pool_example_serves_the_session_example() -> None:
    both = "---\n".join(
        (EXAMPLES / name).read_text(encoding="utf-8") for name in ("pool.yaml", "session.yaml")
    )
    manifests = load_manifests(both)
    pool = manifests.pool_of(manifests.sessions[0])
    assert pool is not None
    window = resolve_session(manifests.sessions[0].spec, pool, WindowLimits()).window
    assert (window.mode, window.context_max_units) == (WindowMode.CONTEXT, 16)


@pytest.mark.parametrize(
    ("spec", "path", "says"),
    [
        ("window: {mode: sliding}", "spec.window.mode", "'off', 'basic' or 'context'"),
        ("window: {mode: off}", "spec.window.mode", "quote it"),
        ("window: {contextMaxUnits: 0}", "spec.window.contextMaxUnits", "equal to 1"),
        ("window: {contextMaxUnits: true}", "spec.window.contextMaxUnits", "valid integer"),
        ('window: {contextMaxUnits: "7"}', "spec.window.contextMaxUnits", "valid integer"),
        ("window: {contextMaxUnits: 7.5}", "spec.window.contextMaxUnits", "valid integer"),
        ("window: {contextMaxUnits: null}", "spec.window.contextMaxUnits", "is null"),
        ("window: {context_max_units: 7}", "spec.window.context_max_units", "contextMaxUnits"),
        ("windw: {}", "spec.windw", "did you mean window?"),
        ("prompt: 7", "spec.prompt", "valid string"),
        ("voice: {}", "spec.voice", "exactly one of"),
        ("voice: {name: a, secretRef: {name: b}}", "spec.voice", "exactly one of"),
        ("voice: {secretRef: {name: B}}", "spec.voice.secretRef.name", "small letters"),
        ("camera: {framesPerUnit: 3}", "spec.camera.framesPerUnit", "less than or equal to 2"),
        ("output: {modalities: [audio, video]}", "spec.output.modalities[1]", "'text'"),
        ("output: {modalities: [text, text]}", "spec.output.modalities", "twice"),
        ("sampling: {greedy: true, topK: 3}", "spec.sampling", "greedy excludes"),
        ("sampling: {temperature: .nan}", "spec.sampling.temperature", "JSON value"),
        ("sampling: {temperature: 1e400}", "spec.sampling.temperature", "valid number"),
        ("sampling: {temperature: hot}", "spec.sampling.temperature", "number, above 0, at most 2"),
        ("sampling: {topK: few}", "spec.sampling.topK", "valid integer, at least 1, at most 1000"),
        ("window: {contextMaxUnits: x}", "spec.window.contextMaxUnits", "integer, at least 1)"),
        ("lifecycle: {idleTimeout: 30}", "spec.lifecycle.idleTimeout", "in quotes"),
        ("lifecycle: {idleTimeout: 5 min}", "spec.lifecycle.idleTimeout", "for example"),
        (f"lifecycle: {{idleTimeout: {'9' * 41}s}}", "spec.lifecycle.idleTimeout", "42 characters"),
        ("lifecycle: {idleTimeout: 0s}", "spec.lifecycle.idleTimeout", "between 1s and 720h"),
        ("desiredState: running", "spec.desiredState", "'Running', 'Parked' or 'Closed'"),
        (
            "window: {basicWindowHighTokens: 9, basicWindowLowTokens: 9}",
            "spec.window.basicWindowLowTokens",
            "less than 9",
        ),
    ],
)
def test_a_wrong_field_is_named_with_what_is_allowed(spec: str, path: str, says: str) -> None:
    found = problems(session_text(spec))
    assert list(found) == [path]
    assert says in found[path]
    assert found[path].startswith("line 6: ")


def test_a_long_prompt_is_refused_and_not_repeated() -> None:
    assert load_manifest(session_text(f"prompt: {'é' * 32_768}")).spec.prompt == "é" * 32_768
    found = problems(session_text(f"prompt: {'é' * 32_769}"))
    assert "text of 32769 characters" in found["spec.prompt"]
    assert "éé" not in found["spec.prompt"]


@pytest.mark.parametrize(
    ("text", "path", "says"),
    [
        ("", "", "holds no DuplexSession"),
        ("---\n# nothing\n---\n", "", "holds no DuplexSession"),
        ("apiVersion: v1\nkind: Secret\n", "", "holds no DuplexSession"),
        ("just text", "", "is no object"),
        ("a: [1", "", "is not YAML"),
        ("kind: DuplexSession\n", "apiVersion", API_VERSION),
        (f"apiVersion: {API_VERSION}\n", "kind", "DuplexSession"),
        (f"apiVersion: {API_VERSION}\nkind: Duplex\n", "kind", "DuplexPool"),
        ("apiVersion: duplex.dev/v9\nkind: DuplexSession\n", "apiVersion", API_VERSION),
        ("apiVersion: example.org/v1\nkind: DuplexSession\n", "apiVersion", API_VERSION),
        (HEAD, "spec", "is required"),
        (f"{HEAD}spec: {{}}\n", "spec.poolRef", "is required"),
        (f"{HEAD}spec: null\n", "spec", "is null"),
        (HEAD.replace("talk", "Talk") + "spec: {}\n", "metadata.name", "inner hyphens"),
        (HEAD.replace("talk", "a.b") + "spec: {}\n", "metadata.name", "inner hyphens"),
        (session_text("prompt: a\nprompt: b"), "spec.prompt", "is given twice"),
        (session_text("prompt: !!binary YQ=="), "spec.prompt", "tag"),
        (session_text("sampling: {seed: 99999999999999999999}"), "spec.sampling.seed", "less than"),
    ],
)
def test_a_wrong_file_is_refused(text: str, path: str, says: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load_manifest(text)
    found = {problem.path: str(problem) for problem in caught.value.problems}
    assert path in found
    assert says in found[path]


def test_problems_of_all_documents_come_at_once_in_order() -> None:
    text = "---\n".join(
        (session_text("prompt: 7\nvoice: {}"), "kind: DuplexSession\n", session_text("camera: 5"))
    )
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    lines = [problem.line for problem in caught.value.problems]
    assert lines == [6, 7, 9, 16]


def test_what_kubectl_prints_is_taken_back() -> None:
    text = session_text("prompt: a") + "status: {phase: Nonsense}\n"
    printed = text.replace(
        "{name: talk}",
        "{name: talk, namespace: ns, uid: u, creationTimestamp: null, labels: {a: b}}",
    )
    session = load_manifest(printed)
    assert (session.metadata.namespace, session.status) == ("ns", None)


def test_one_session_is_chosen_by_name() -> None:
    text = session_text("") + "---\n" + session_text("").replace("talk", "other")
    with pytest.raises(ManifestError, match="holds 2"):
        load_manifest(text)
    assert load_manifest(text, "other").metadata.name == "other"
    with pytest.raises(ManifestError, match="holds no DuplexSession named third"):
        load_manifest(text, "third")


def test_aliases_and_merges_are_read_but_bombs_are_not() -> None:
    merged = "window: &w {mode: context}\nlifecycle: {<<: &l {idleTimeout: 5m}, parkAfter: 1m}"
    assert load_manifest(session_text(merged)).spec.lifecycle is not None
    bomb = "a: &a [x, x, x, x, x, x, x, x, x, x]\n"
    for letter, before in zip("bcdefgh", "abcdefg", strict=True):
        bomb += f"{letter}: &{letter} [{', '.join([f'*{before}'] * 10)}]\n"
    for text in (bomb, "a: &a [*a]", "[" * 500 + "]" * 500, "x" * 2_000_000):
        with pytest.raises(ManifestError):
            load_manifests(text)


@pytest.mark.parametrize(
    ("scalar", "value"),
    [
        ("017", 15),
        ("0o17", 15),
        ("0x1F", 31),
        ("-3", -3),
        ("1_000", 1000),
        ("1e3", 1000),
        ("7.0", 7),
        ("0.7", 0.7),
        ("089", 89),
        ("1e400", "1e400"),
        ("1:30", "1:30"),
        ("2026-01-02", "2026-01-02"),
        ("yes", True),
        ("n", False),
        ("~", None),
        ("<<", "<<"),
        ("1.2.3", "1.2.3"),
    ],
)
def test_scalars_are_read_as_kubectl_reads_them(scalar: str, value: Any) -> None:
    (document,) = read_documents(f"key: {scalar}")
    assert document.value == {"key": value}


def says_something(text: str) -> bool:
    """Read, or refused with problems; anything else raises."""
    try:
        load_manifests(text)
    except ManifestError as error:
        return len(error.problems) > 0
    return True


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["poolRef", "window", "prompt", "voice", "x"]), JSON))
def test_no_spec_makes_it_fail_in_another_way(spec: dict[str, Any]) -> None:
    whole = {
        "apiVersion": API_VERSION,
        "kind": "DuplexSession",
        "metadata": {"name": "a"},
        "spec": spec,
    }
    assert says_something(yaml.safe_dump(whole))


@given(st.text(max_size=60))
def test_no_text_makes_it_fail_in_another_way(text: str) -> None:
    assert says_something(text)


ODD = '\x7f\x85\x9f\u2028\u2029\ufeff\uffff \U0001f600 \\ud83d \\\\ " / \t\n'


@given(text=st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(ODD)))
@pytest.mark.parametrize("ascii_only", [True, False])
def test_json_is_taken_as_json(text: str, ascii_only: bool) -> None:
    """Whichever characters its strings hold, and however they are written."""
    value = {"a": {"text": text + ODD}, "b": [text]}
    for indent in (None, 2):
        given_text = json.dumps(value, ensure_ascii=ascii_only, indent=indent)
        (document,) = read_documents(given_text)
        assert document.value == value
    assert document.lines["b"] == json.dumps(value, indent=2).split('"b"')[0].count("\n") + 1


def test_a_manifest_in_json_keeps_its_prompt() -> None:
    spec = {"poolRef": {"name": "demo"}, "prompt": f"one{ODD}two"}
    manifest = {"apiVersion": API_VERSION, "kind": "DuplexSession", "spec": spec}
    text = json.dumps(manifest | {"metadata": {"name": "talk"}}, ensure_ascii=False)
    assert load_manifest(text).spec.prompt == f"one{ODD}two"


# --- texts that are made to keep a reader busy ----------------------------------------------------


def refusal(text: str) -> str:
    with pytest.raises(ManifestError) as caught:
        load_manifests(text)
    return str(caught.value)


def test_a_text_is_read_no_further_than_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1_000)
    started = time.process_time()
    assert "too many documents (allowed: at most 16)" in refusal("---\na: 1\n" * 29_000)
    assert "line 1: holds too many values" in refusal(f"x: [{'1,' * 250_000}1]\n")
    wide = "".join(f"k{n}: {n}\n" for n in range(60_000))
    assert "holds too many values (allowed: at most 1000)" in refusal(HEAD + wide)
    # Far below what it takes to read all of these texts, a minute.
    assert time.process_time() - started < 5


def test_values_are_bounded_over_all_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(yaml_text, "MAX_VALUES", 1_000)
    document = f"x: [{'1,' * 299}1]\n"
    assert len(read_documents("---\n".join([document] * 3))) == 3
    assert "holds too many values" in refusal("---\n".join([document] * 4))
    expands = f"a: &a [{'1,' * 199}1]\nb: *a\n"
    assert len(read_documents("---\n".join([expands] * 2))) == 2
    assert "expands to too many values" in refusal("---\n".join([expands] * 3))


def test_the_first_of_many_merges_is_kept() -> None:
    wide = "".join(f"  k{n}: {n}\n" for n in range(1_500))
    text = f"a: &a\n{wide}b: &b {{}}\nc:\n  <<: [*a{', *b' * 4_000}]\n"
    (document,) = read_documents(text)
    assert isinstance(document.value, dict)
    assert document.value["c"] == document.value["a"]


def test_a_long_path_is_refused_before_it_is_kept_with_each_value() -> None:
    text = f"? {'k' * 2_000}\n: [{'1,' * 1_000}1]\n"
    assert "path is too long" in refusal(text)


@pytest.mark.parametrize("digits", ["0x" + "f" * 5_000, "9" * 5_000, "0b" + "1" * 5_000])
def test_an_absurd_number_is_refused(digits: str) -> None:
    found = problems(session_text(f"sampling: {{seed: {digits}}}"))
    assert list(found) == ["spec.sampling.seed"]
