"""Runs recorded files of public behaviour through the functions that the sidecar runs.

A file's kind is in its name (`files.kind_of`); what each kind covers is in `KINDS`.
"""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from duplex_sidecar.contract import window_cases
from duplex_sidecar.contract.decode_cases import check_decode_file
from duplex_sidecar.contract.files import ContractFileError, RecordedFile
from duplex_sidecar.contract.handoff_cases import HandoffSession, check_handoff_session
from duplex_sidecar.contract.stage2_cases import (
    ConsumerSession,
    ProducerSession,
    check_consumer_session,
    check_producer_session,
)
from duplex_sidecar.contract.talker_cases import (
    TalkerContextSession,
    check_talker_context_session,
    check_talker_steps_file,
)
from duplex_sidecar.contract.types import CaseResult, Difference
from duplex_sidecar.contract.vocabulary_file import recorded_vocabulary

T = TypeVar("T")
Runner = Callable[[RecordedFile], Iterator[CaseResult]]

NOT_COVERED = (
    "encoder rows, vocoder audio and logits of real weights",
    "PCM queueing and realtime events",
    "batching across sessions, connector timing, performance",
)
"""What no recorded file describes; other tests have to."""


class Kind(NamedTuple):
    """A kind of recorded file: what it covers, and what runs it."""

    covers: str
    run: Runner


class FileReport(NamedTuple):
    """What the check of one file found. differences: all of them, in the file's order."""

    path: Path
    kind: str
    cases: int
    comparisons: int
    skipped_steps: int
    differences: tuple[Difference, ...]


def check_file(path: Path) -> FileReport:
    """Check one file. Raises `ContractFileError` when it is not one of a known kind."""
    file = RecordedFile(path)
    kind = KINDS.get(file.kind)
    if kind is None:
        known = ", ".join(KINDS)
        raise ContractFileError(f"{path}: unknown kind {file.kind!r}; known are {known}")
    cases = comparisons = skipped_steps = 0
    differences: list[Difference] = []
    results = kind.run(file)
    while True:
        try:
            result = next(results, None)
        except ContractFileError:
            raise
        except Exception as error:
            # A runner that advances many cases together cannot go on after a failure.
            result = _raised(f"after case {cases}", error)
        if result is None:
            break
        cases += 1
        comparisons += result.comparisons
        skipped_steps += result.skipped_steps
        differences += result.differences
    return FileReport(path, file.kind, cases, comparisons, skipped_steps, tuple(differences))


def _each_line(type_: type[T], check: Callable[[T], CaseResult]) -> Runner:
    """One case a line, in a `.jsonl` file."""

    def run(file: RecordedFile) -> Iterator[CaseResult]:
        for number, line in enumerate(file.lines(), start=1):
            case = file.decode(line, type_)
            yield _guarded(file, f"line {number}", case, check)

    return run


def _each_listed(**checks: Callable[[Mapping[str, Any]], CaseResult]) -> Runner:
    """The cases of a `.json` file, by the key that they are listed under."""

    def run(file: RecordedFile) -> Iterator[CaseResult]:
        for key, check in checks.items():
            for index, raw in enumerate(file.listed(key)):
                case = file.decode(raw, dict[str, Any])
                yield _guarded(file, f"{key} {index}", case, check)

    return run


def _guarded(
    file: RecordedFile, place: str, case: T, check: Callable[[T], CaseResult]
) -> CaseResult:
    """Run one case; an exception of the product's code is a difference like any other."""
    try:
        return check(case)
    except ContractFileError as error:
        raise ContractFileError(f"{file.path}: {place}: {error}") from error
    except Exception as error:
        return _raised(place, error)


def _raised(place: str, error: Exception) -> CaseResult:
    raised = f"{type(error).__name__}: {error}"
    return CaseResult(1, (Difference(place, "the whole case", "a result", raised),))


def _check_handoff_file(file: RecordedFile) -> Iterator[CaseResult]:
    vocabulary = recorded_vocabulary(file.path)

    def check(session: HandoffSession) -> CaseResult:
        return check_handoff_session(session, vocabulary)

    yield from _each_line(HandoffSession, check)(file)


KINDS: Mapping[str, Kind] = {
    "planner_sessions": Kind(
        "window plan of off, basic and context; overflow guard",
        _each_line(dict[str, Any], window_cases.check_planner_session),
    ),
    "window_config_cases": Kind(
        "window options of a session", _each_listed(cases=window_cases.check_window_config)
    ),
    "framing_cases": Kind(
        "slots of an append, forced listens; session context",
        _each_listed(
            cases=window_cases.check_framing,
            context_cases=window_cases.check_session_context,
        ),
    ),
    "layout_sessions": Kind(
        "slots, plan and rendered prompt together",
        _each_line(dict[str, Any], window_cases.check_layout_session),
    ),
    "decode_cases": Kind("decode policy, token by token", check_decode_file),
    "handoff_sessions": Kind("segment selection, hidden rows, Talker budgets", _check_handoff_file),
    "talker_steps": Kind("end code rules, codec repetition penalty", check_talker_steps_file),
    "talker_context_sessions": Kind(
        "growth and rebuild of the Talker's prompt",
        _each_line(TalkerContextSession, check_talker_context_session),
    ),
    "producer_sessions": Kind(
        "codes to numbered chunks, epochs", _each_line(ProducerSession, check_producer_session)
    ),
    "consumer_sessions": Kind(
        "admission of chunks, refusals", _each_line(ConsumerSession, check_consumer_session)
    ),
}
