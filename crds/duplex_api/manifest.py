"""A user's file, taken exactly as `kubectl apply` would take it.

Group, version and kind are checked, unknown fields and nulls are refused, several documents are
told apart. Every problem is reported at once, with its path, its line and what is allowed.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import JsonValue, ValidationError

from duplex_api.constants import API_GROUP, API_VERSION, POOL_KIND, SESSION_KIND
from duplex_api.explain import explain_errors
from duplex_api.pool import DuplexPool, PoolSpec
from duplex_api.problems import Problem
from duplex_api.session import DuplexSession
from duplex_api.window import order_problems
from duplex_api.yaml_text import Document, YamlProblemError, read_documents

_Kind = TypeVar("_Kind", DuplexSession, DuplexPool)


class ManifestError(ValueError):
    """The file cannot be applied. `problems` is never empty."""

    code = "invalid_manifest"

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("\n".join(str(problem) for problem in problems))
        self.problems = tuple(problems)


@dataclass(frozen=True, slots=True)
class Manifests:
    """What a file holds. others: "Kind/name" of objects that are not ours."""

    sessions: tuple[DuplexSession, ...]
    pools: tuple[DuplexPool, ...]
    others: tuple[str, ...]

    def only_session(self, name: str | None = None) -> DuplexSession:
        """The file's one DuplexSession, or the one called `name`. Raises ManifestError."""
        sessions = [each for each in self.sessions if name in (None, each.metadata.name)]
        if len(sessions) == 1:
            return sessions[0]
        names = ", ".join(session.metadata.name for session in sessions)
        found = (
            f"holds {len(sessions)} of kind {SESSION_KIND} ({names})"
            if sessions
            else (f"holds no {SESSION_KIND}" + (f" named {name}" if name else ""))
        )
        raise ManifestError([Problem("", found, f"exactly one {SESSION_KIND}")])

    def pool_of(self, session: DuplexSession) -> PoolSpec | None:
        """The spec of the session's pool, if this file holds it."""
        wanted = session.spec.pool_ref
        namespace = wanted.namespace or session.metadata.namespace
        for pool in self.pools:
            if pool.metadata.name == wanted.name and pool.metadata.namespace == namespace:
                return pool.spec
        return None


def load_manifest(text: str, name: str | None = None) -> DuplexSession:
    """The file's one DuplexSession, or the one called `name`. Raises ManifestError."""
    return load_manifests(text).only_session(name)


def load_manifests(text: str) -> Manifests:
    """Everything the file holds. Raises ManifestError with the problems of all its documents."""
    try:
        documents = read_documents(text)
    except YamlProblemError as error:
        raise ManifestError([error.problem]) from error
    sessions: list[DuplexSession] = []
    pools: list[DuplexPool] = []
    others: list[str] = []
    problems: list[Problem] = []
    for document in documents:
        try:
            kind = _kind(document)
            if kind == SESSION_KIND:
                sessions.append(_load(DuplexSession, document))
            elif kind == POOL_KIND:
                pools.append(_load(DuplexPool, document))
            else:
                others.append(kind)
        except ManifestError as error:
            problems.extend(error.problems)
    if problems:
        raise ManifestError(sorted(problems, key=lambda problem: problem.line or 0))
    return Manifests(tuple(sessions), tuple(pools), tuple(others))


def _kind(document: Document) -> str:
    """The document's kind. One that claims to be ours has our group, version and kinds."""
    value = document.value
    if not isinstance(value, dict):
        raise ManifestError([Problem("", "is no object", "apiVersion, kind, metadata, spec")])
    api_version, kind = value.get("apiVersion"), value.get("kind")
    problems = [
        Problem(
            path, "is required" if given is None else "is no text", allowed, _line(document, path)
        )
        for path, given, allowed in (
            ("apiVersion", api_version, API_VERSION),
            ("kind", kind, f"{SESSION_KIND}, {POOL_KIND}"),
        )
        if not isinstance(given, str) or not given
    ]
    if problems:
        raise ManifestError(problems)
    ours = str(api_version).partition("/")[0] == API_GROUP
    if kind in (SESSION_KIND, POOL_KIND):
        _require(document, "apiVersion", str(api_version), (API_VERSION,))
    elif ours:
        _require(document, "kind", str(kind), (SESSION_KIND, POOL_KIND))
    return str(kind)


def _require(document: Document, path: str, given: str, allowed: tuple[str, ...]) -> None:
    if given not in allowed:
        raise ManifestError(
            [Problem(path, f"is {given[:64]!r}", ", ".join(allowed), _line(document, path))]
        )


def _load(kind: type[_Kind], document: Document) -> _Kind:
    value = document.value
    assert isinstance(value, dict)  # `_kind` looked
    # The API server ignores a status that is applied with the object.
    value = {key: field for key, field in value.items() if key != "status"}
    nulls = dict(_nulls(value.get("spec"), "spec"))
    problems = list(nulls.values())
    loaded: _Kind | None = None
    try:
        loaded = kind.model_validate(value, extra="forbid", by_alias=True, by_name=False)
    except ValidationError as error:
        problems += [p for p in explain_errors(kind, error) if p.path not in nulls]
    if loaded is not None:
        problems += _window_problems(loaded)
    if loaded is None or problems:
        raise ManifestError([_placed(document, problem) for problem in problems])
    return loaded


def _nulls(value: JsonValue, path: str) -> Iterator[tuple[str, Problem]]:
    """Nulls below `path`: the API server takes none where the schema does not say so."""
    if isinstance(value, dict):
        for key, inner in value.items():
            inner_path = f"{path}.{key}"
            if inner_path.startswith("spec.template."):
                continue  # the API server's own schema, kept as it is
            if inner is None:
                yield inner_path, Problem(inner_path, "is null", "a value, or leave it out")
            yield from _nulls(inner, inner_path)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _nulls(inner, f"{path}[{index}]")


def _window_problems(loaded: DuplexSession | DuplexPool) -> Iterator[Problem]:
    if isinstance(loaded, DuplexSession):
        if loaded.spec.window is not None:
            yield from order_problems(loaded.spec.window, "spec.window")
        return
    for name, preset in (loaded.spec.window_presets or {}).items():
        yield from order_problems(preset, f"spec.windowPresets.{name}")


def _line(document: Document, path: str) -> int | None:
    """The line of a field, or of the nearest field around it."""
    while path and path not in document.lines:
        path = path.rpartition(".")[0]
    return document.lines.get(path)


def _placed(document: Document, problem: Problem) -> Problem:
    return replace(problem, line=_line(document, problem.path))
