"""How a condition enters the Talker's prompt (contract section D, "Context 4096").

A condition (tokens of a unit and their hidden rows) extends the Talker's prompt, replaces it at a
turn start, or, when the prompt would outgrow the limit, rebuilds it from the previous condition,
the codes it got, and the current one. `plan_condition` decides that and changes nothing.
"""

from enum import StrEnum

import msgspec

from duplex_sidecar.model.minicpmo45.talker import MAX_UNIT_CODES


class PromptAction(StrEnum):
    """What happens to the Talker's prompt."""

    EXTEND = "extend"
    RECOMPUTE = "recompute"
    REPLACE = "replace"


class ContextFault(StrEnum):
    """Why a condition cannot be planned. It ends the turn's speech, not the Talker."""

    SEQUENCE_NOT_CONTIGUOUS = "sequence_not_contiguous"
    CONDITION_TOO_LONG = "condition_too_long"
    TOO_MANY_CONFIRMED_CODES = "too_many_confirmed_codes"
    WINDOW_TOO_LONG = "window_too_long"


class TalkerContextError(Exception):
    """A condition cannot enter the Talker's prompt; `fault` says why. Nothing was changed."""

    def __init__(self, fault: ContextFault) -> None:
        super().__init__(fault.value)
        self.fault = fault


class TalkerContext(msgspec.Struct, frozen=True):
    """The Talker's prompt after its last condition, before the codes of that condition.

    prompt_len: positions. condition_len: positions of the last condition (tokens + 1).
    condition_seq: number of the last condition, counted from 0 over the session.
    """

    prompt_len: int
    condition_len: int
    condition_seq: int


class PromptPlan(msgspec.Struct, frozen=True):
    """`after` is the context to keep once the condition was accepted by the Talker."""

    action: PromptAction
    after: TalkerContext


def plan_condition(
    context: TalkerContext | None,
    *,
    condition_seq: int,
    condition_len: int,
    confirmed_codes: int,
    reserve: int,
    turn_start: bool,
    limit: int,
    stream_lost: bool = False,
) -> PromptPlan:
    """Plan one condition.

    context: None before the first condition. confirmed_codes: codes of the previous condition,
    without the end code. reserve: budget of this unit in codes (26 or 104). limit: positions of the
    loaded Talker. stream_lost: the Talker no longer holds the prompt (its process restarted), so
    extending it is out of the question. Raises `TalkerContextError`.
    """
    expected_seq = 0 if context is None else context.condition_seq + 1
    if condition_seq != expected_seq:
        raise TalkerContextError(ContextFault.SEQUENCE_NOT_CONTIGUOUS)
    if condition_len + reserve > limit:
        raise TalkerContextError(ContextFault.CONDITION_TOO_LONG)

    def planned(action: PromptAction, prompt_len: int) -> PromptPlan:
        return PromptPlan(action, TalkerContext(prompt_len, condition_len, condition_seq))

    if context is None or turn_start:
        return planned(PromptAction.REPLACE, condition_len)
    extended = context.prompt_len + confirmed_codes + condition_len
    if not stream_lost and extended + reserve <= limit:
        return planned(PromptAction.EXTEND, extended)
    if confirmed_codes > MAX_UNIT_CODES:
        raise TalkerContextError(ContextFault.TOO_MANY_CONFIRMED_CODES)
    rebuilt = context.condition_len + confirmed_codes + condition_len
    if rebuilt + reserve > limit:
        raise TalkerContextError(ContextFault.WINDOW_TOO_LONG)
    return planned(PromptAction.RECOMPUTE, rebuilt)
