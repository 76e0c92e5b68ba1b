"""Runs recorded files of public behaviour through the functions that the sidecar runs.

A file's kind is in its name (`files.kind_of`); what each kind covers is in `KINDS`.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from msgspec import Raw

from duplex_sidecar.contract import window_cases
from duplex_sidecar.contract.decode_cases import check_decode_file
from duplex_sidecar.contract.files import RecordedFile
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
from duplex_sidecar.contract.types import (
    CaseResult,
    ContractFileError,
    Difference,
    guarded,
)
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
    """Check one file.

    A case that cannot be run is one difference. Raises `ContractFileError` when the file cannot be
    checked at all: it is of no known kind, cannot be read to its end, holds no case, or none that
    is in the schema of its kind.
    """
    file = RecordedFile(path)
    kind = KINDS.get(file.kind)
    if kind is None:
        known = ", ".join(KINDS)
        raise ContractFileError(f"{path}: unknown kind {file.kind!r}; known are {known}")
    cases = unusable = comparisons = skipped_steps = 0
    differences: list[Difference] = []
    for result in kind.run(file):
        cases += 1
        unusable += result.unusable
        comparisons += result.comparisons
        skipped_steps += result.skipped_steps
        differences += result.differences
    if cases == unusable:
        # Nothing was compared: "equal" would be as wrong as "different".
        first = f"{differences[0].case}: {differences[0].actual}" if cases else "holds no case"
        raise ContractFileError(f"{path}: {first}")
    return FileReport(path, file.kind, cases, comparisons, skipped_steps, tuple(differences))


def _each_line(type_: type[T], check: Callable[[T], CaseResult]) -> Runner:
    """One case a line, in a `.jsonl` file."""

    def run(file: RecordedFile) -> Iterator[CaseResult]:
        for number, line in enumerate(file.lines(), start=1):
            yield guarded(f"line {number}", partial(_run_case, file, line, type_, check))

    return run


def _each_listed(**checks: Callable[[Mapping[str, Any]], CaseResult]) -> Runner:
    """The cases of a `.json` file, by the key that they are listed under."""

    def run(file: RecordedFile) -> Iterator[CaseResult]:
        for key, check in checks.items():
            for index, raw in enumerate(file.listed(key)):
                case = partial(_run_case, file, raw, dict[str, Any], check)
                yield guarded(f"{key} {index}", case)

    return run


def _run_case(
    file: RecordedFile, data: bytes | Raw, type_: type[T], check: Callable[[T], CaseResult]
) -> CaseResult:
    return check(file.decode(data, type_))


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
