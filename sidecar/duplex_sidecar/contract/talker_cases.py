"""Runs recorded Talker rules (`talker_steps`, `talker_context_sessions`) through ours."""

from collections.abc import Iterator
from functools import partial

import msgspec
import torch

from duplex_sidecar.contract.files import RecordedFile
from duplex_sidecar.contract.types import CaseResult, Comparison, ContractFileError, guarded
from duplex_sidecar.model.minicpmo45.talker import (
    BUDGETS,
    CODEC_EOS,
    CODEC_PENALTY,
    EosRule,
    UnitKind,
    eos_rule,
    unit_kind,
)
from duplex_sidecar.model.minicpmo45.talker_context import (
    TalkerContext,
    TalkerContextError,
    plan_condition,
)
from duplex_sidecar.model.minicpmo45.talker_sampling import penalise_codes

PENALTY_TOLERANCE = 2e-5
"""The recorded values are rounded to five decimals."""

_RECORDED_KINDS = {
    "middle": unit_kind(turn_start=False, turn_end=False),
    "turn_start": unit_kind(turn_start=True, turn_end=False),
    "turn_end": unit_kind(turn_start=False, turn_end=True),
    "turn_start_and_end": unit_kind(turn_start=True, turn_end=True),
}
_RECORDED_RULES = {EosRule.FREE: ".", EosRule.MASK: "M", EosRule.FORCE: "F"}


class _Steps(msgspec.Struct):
    kind: str
    max_tokens: int
    min_tokens: int
    turn_end_drain: bool
    eos_by_frames_already_produced: str


class _Repetition(msgspec.Struct):
    id: int | str
    logits: list[float]
    history: list[int]
    penalty: float
    expected: list[float]


def check_talker_steps_file(file: RecordedFile) -> Iterator[CaseResult]:
    """The end-of-chunk rules per kind of unit, then the repetition penalty rows."""
    eos = file.parts().get("codec_eos_id")
    if eos is not None:
        yield guarded("codec_eos_id", partial(_check_eos, file, eos))
    for index, steps in enumerate(file.listed("steps")):
        yield guarded(f"steps {index}", partial(_check_steps, file, steps))
    for index, row in enumerate(file.listed("codec_repetition")):
        yield guarded(f"codec_repetition {index}", partial(_check_repetition, file, row))


def _check_eos(file: RecordedFile, data: msgspec.Raw) -> CaseResult:
    compare = Comparison("codec")
    compare.same("codec_eos_id", file.decode(data, int), CODEC_EOS)
    return compare.result()


def _check_steps(file: RecordedFile, data: msgspec.Raw) -> CaseResult:
    recorded = file.decode(data, _Steps)
    kind = _RECORDED_KINDS.get(recorded.kind)
    if kind is None:
        raise ContractFileError(f"unknown kind of Talker unit: {recorded.kind}")
    compare = Comparison(recorded.kind)
    compare.same("max_tokens", recorded.max_tokens, BUDGETS[kind].max_codes)
    compare.same("min_tokens", recorded.min_tokens, BUDGETS[kind].min_codes)
    compare.same("turn_end_drain", recorded.turn_end_drain, kind is UnitKind.END)
    for produced, expected in enumerate(recorded.eos_by_frames_already_produced):
        compare.same(f"step {produced}", expected, _RECORDED_RULES[eos_rule(kind, produced)])
    return compare.result()


def _check_repetition(file: RecordedFile, data: msgspec.Raw) -> CaseResult:
    recorded = file.decode(data, _Repetition)
    compare = Comparison(f"repetition {recorded.id}")
    compare.same("penalty", recorded.penalty, CODEC_PENALTY)
    logits = torch.tensor([recorded.logits], dtype=torch.float32)
    penalised: list[float] = penalise_codes(logits, [recorded.history])[0].tolist()
    for code, (expected, actual) in enumerate(zip(recorded.expected, penalised, strict=True)):
        near = abs(expected - actual) <= PENALTY_TOLERANCE
        compare.same(f"code {code}", expected, expected if near else actual)
    return compare.result()


class _ExpectedPlan(msgspec.Struct):
    action: str
    prompt_len_after: int | None = None
    error: str | None = None
    upstream_quirk: str | None = None


class _Condition(msgspec.Struct):
    confirmed_codes: int
    condition_seq: int
    condition_len: int
    reserve: int
    turn_start: bool
    expected: _ExpectedPlan


class TalkerContextSession(msgspec.Struct):
    id: int | str
    max_model_len: int
    opening_condition_len: int
    steps: list[_Condition]


def check_talker_context_session(session: TalkerContextSession) -> CaseResult:
    """One session of `talker_context_sessions`; its opening condition has number 0."""
    compare = Comparison(session.id)
    opening = session.opening_condition_len
    context = TalkerContext(prompt_len=opening, condition_len=opening, condition_seq=0)
    for index, given in enumerate(session.steps):
        expected = given.expected
        if expected.upstream_quirk is not None:
            compare.skip(len(session.steps) - index)
            break
        where = f"condition {index}"
        try:
            plan = plan_condition(
                context,
                condition_seq=given.condition_seq,
                condition_len=given.condition_len,
                confirmed_codes=given.confirmed_codes,
                reserve=given.reserve,
                turn_start=given.turn_start,
                limit=session.max_model_len,
            )
        except TalkerContextError as error:
            compare.same(f"{where} action", expected.action, "error")
            compare.same(f"{where} error", expected.error, error.fault.value)
            break
        context = plan.after
        compare.same(f"{where} action", expected.action, plan.action.value)
        compare.same(f"{where} prompt_len_after", expected.prompt_len_after, plan.after.prompt_len)
        if expected.action == "error":
            break
    return compare.result()
