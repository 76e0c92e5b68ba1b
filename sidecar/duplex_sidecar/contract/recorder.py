"""`duplex contract record`: tapes of live sessions become files that `duplex contract check` runs.

What a tape measured goes into the expected values, what was given (answers, input, codes) into the
steps; the check then computes the same anew with the functions that the sidecar runs.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from duplex_sidecar.contract.recorder_layout import layout_session
from duplex_sidecar.contract.recorder_session import TapedSession, taped_session
from duplex_sidecar.contract.recorder_tape import Entry, Opening, TapeError, read_tape
from duplex_sidecar.contract.recorder_voice import (
    consumer_session,
    handoff_sessions,
    producer_session,
    talker_context_sessions,
)
from duplex_sidecar.contract.recorder_window import NotExpressible, changed_prompts, planner_session
from duplex_sidecar.contract.vocabulary_file import VOCABULARY_NAME, recorded_vocabulary
from duplex_sidecar.model.minicpmo45.vocabulary import Vocabulary

Case = dict[str, Any]

RECORDED: Mapping[str, str] = {
    "planner_sessions": "lengths, slides and previous text of the prompts that were fed",
    "layout_sessions": "what entered the Thinker's cache, id by id, in the toy tokenizer",
    "handoff_sessions": "tokens and hidden rows that the Talker got",
    "talker_context_sessions": "growth and rebuilds of the Talker's prompt",
    "producer_sessions": "chunks that were sent to the vocoder",
    "consumer_sessions": "chunks that the vocoder took and refused",
}
"""Kinds of files that are written, and what of a live session is in them."""
NOT_RECORDED = (
    "decode_cases, talker_steps: logits do not leave the engines",
    "framing_cases, window_config_cases: no session; slots are in layout_sessions",
    "whether an append was final, lengths of texts: stages are not told (written as false and 0)",
    "refused appends: they reach no stage",
    "sessions with hysteresisUnits or boundary: no planner_sessions, no layout_sessions",
    "frames that highResolution: false left whole: no layout_sessions",
    "a vocoder that was caught up from the middle of a long turn: no producer_sessions",
)


class RecordReport(NamedTuple):
    """files: what was written, with its number of cases. left_out: why something was not.
    findings: what is wrong with a session and no recorded schema has words for."""

    files: tuple[tuple[Path, int], ...]
    left_out: tuple[str, ...]
    findings: tuple[str, ...]


def record(tapes: Sequence[Path], folder: Path) -> RecordReport:
    """Write the traces of these tapes into `folder`. Raises TapeError, ContractFileError, OSError.

    All tapes have to be of one vocabulary, which lies beside them and is copied.
    """
    vocabulary = recorded_vocabulary(_one_vocabulary(tapes))
    cases: dict[str, list[Case]] = {kind: [] for kind in RECORDED}
    left_out: list[str] = []
    findings: list[str] = []
    for entries in _sessions([read_tape(path) for path in tapes]):
        session = taped_session(entries, vocabulary)
        name = session.opening.session
        if session.cut is not None:
            left_out.append(f"{name}: from unit {len(session.units) + 1} on: {session.cut}")
        if not session.units:
            continue
        findings += [f"{name}: {what}" for what in changed_prompts(session, vocabulary)]
        _trace(session, vocabulary, cases, left_out)
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    (folder / VOCABULARY_NAME).write_bytes((tapes[0].parent / VOCABULARY_NAME).read_bytes())
    files = [
        (_write(folder / f"{kind}.jsonl", found), len(found))
        for kind, found in cases.items()
        if found
    ]
    return RecordReport(tuple(files), tuple(left_out), tuple(findings))


def _trace(
    session: TapedSession,
    vocabulary: Vocabulary,
    cases: dict[str, list[Case]],
    left_out: list[str],
) -> None:
    """Add the session's cases of every kind."""
    kinds: dict[str, Callable[[], Iterable[Case | None]]] = {
        "planner_sessions": lambda: [planner_session(session, vocabulary)],
        "layout_sessions": lambda: [layout_session(session, vocabulary)],
        "handoff_sessions": lambda: handoff_sessions(session, vocabulary),
        "talker_context_sessions": lambda: talker_context_sessions(session),
        "producer_sessions": lambda: [producer_session(session, vocabulary)],
        "consumer_sessions": lambda: [consumer_session(session)],
    }
    for kind, trace in kinds.items():
        try:
            cases[kind] += [case for case in trace() if case is not None]
        except NotExpressible as reason:
            left_out.append(f"{session.opening.session}: {kind}: {reason}")


def _sessions(tapes: Sequence[list[Entry]]) -> list[list[list[Entry]]]:
    """The tapes of each session, in the order of their fences."""
    sessions: dict[str, dict[int, list[Entry]]] = {}
    for tape in tapes:
        opening = tape[0]
        if not isinstance(opening, Opening):
            raise TapeError("a tape without an opening")
        owners = sessions.setdefault(opening.session, {})
        if opening.fence in owners:
            raise TapeError(f"two tapes of session {opening.session} with fence {opening.fence}")
        owners[opening.fence] = tape
    return [[owners[fence] for fence in sorted(owners)] for owners in sessions.values()]


def _one_vocabulary(tapes: Sequence[Path]) -> Path:
    """One of the tapes. Raises TapeError unless the vocabularies beside all of them are equal."""
    found: set[bytes] = set()
    for path in tapes:
        try:
            found.add((path.parent / VOCABULARY_NAME).read_bytes())
        except OSError as error:
            raise TapeError(f"{path.parent / VOCABULARY_NAME}: {error.strerror}") from error
    if len(found) != 1:
        raise TapeError("the tapes are of different vocabularies")
    return tapes[0]


def _write(path: Path, cases: Sequence[Case]) -> Path:
    path.write_bytes(b"".join(msgspec.json.encode(case) + b"\n" for case in cases))
    return path
