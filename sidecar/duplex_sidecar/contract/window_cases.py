"""Runs recorded cases of framing, window options, planner and layout through the product's code.

Each function takes one case of the file kind it is named after (schemas: the contract's README) and
compares what the product computes with what was recorded.
"""

from collections.abc import Mapping
from typing import Any, Final

from duplex_api.window import WindowMode
from duplex_sidecar.contract.types import CaseResult, Comparison, has_quirk
from duplex_sidecar.model.minicpmo45.context import (
    MEDIA_LENGTHS,
    SessionContext,
    build_context,
    layout_ids_of,
)
from duplex_sidecar.model.minicpmo45.framing import (
    FrameSize,
    context_positions,
    force_listen,
    reserve_append,
    split_chunks,
)
from duplex_sidecar.model.minicpmo45.vocabulary import ControlToken
from duplex_sidecar.window.parts import HistoryUnit, LayoutIds, PromptPart, UnitInput, parts_length
from duplex_sidecar.window.plan import plan
from duplex_sidecar.window.policy import WindowOptionsError, WindowPolicy, parse_window_options
from duplex_sidecar.window.render import append_parts, history_parts, layout_ids, prompt_parts
from duplex_sidecar.window.state import (
    EMPTY_WINDOW,
    Directive,
    Extend,
    Overflow,
    Plan,
    PlanLimits,
    Rebuild,
    WindowAppend,
    WindowLayout,
    WindowState,
)

Case = Mapping[str, Any]
"""One recorded case, as JSON reads it."""

NO_DIRECTIVE: Final = Directive()
TOY_CONTROL_IDS: Final = {token: number for number, token in enumerate(ControlToken, start=1)}
TOY_UNKNOWN_ID: Final = 0
TOY_TEXT_OFFSET: Final = 1000


def toy_encode(text: str) -> list[int]:
    """The recorded cases' tokenizer: control tokens are 1..19, other characters 1000 + code."""
    ids: list[int] = []
    position = 0
    while position < len(text):
        token = next((t for t in ControlToken if text.startswith(t, position)), None)
        ids.append(
            TOY_TEXT_OFFSET + ord(text[position]) if token is None else TOY_CONTROL_IDS[token]
        )
        position += 1 if token is None else len(token)
    return ids


# --- window options -----------------------------------------------------------------------------


def check_window_config(case: Case) -> CaseResult:
    """One case of `window_config_cases`."""
    compare, expected = Comparison(case["id"]), case["expected"]
    if has_quirk(expected):
        compare.skip(1)
        return compare.result()
    got = _config_outcome(case["input"])
    for name in ("config", "error_code"):
        compare.same(name, expected.get(name), got.get(name))
    return compare.result()


def _config_outcome(options: Mapping[str, object]) -> dict[str, object]:
    try:
        policy = parse_window_options(options)
    except WindowOptionsError as error:
        return {"error_code": error.code}
    if policy is None:
        return {"config": None}
    return {
        "config": {
            "sliding_window_mode": policy.mode.value,
            "basic_window_high_tokens": policy.basic_high_tokens,
            "basic_window_low_tokens": policy.basic_low_tokens,
            "context_previous_max_tokens": policy.context_previous_max_tokens,
            "context_max_units": policy.context_max_units,
        }
    }


# --- framing ------------------------------------------------------------------------------------


def check_framing(case: Case) -> CaseResult:
    """One of the `cases` of `framing_cases`: the reservation of one append."""
    given, expected = case["input"], case["expected"]
    compare = Comparison(case["id"])
    if has_quirk(expected):
        compare.skip(1)
        return compare.result()
    reservation = reserve_append(
        seq=given["seq"],
        samples=given["audio"]["samples"] if given["audio"]["kind"] == "pcm_f32le" else None,
        frames=[FrameSize(f["w"], f["h"]) if "w" in f else None for f in given["frames"]],
        context_positions=context_positions(
            given["context"]["exact_context_tokens"], given["context"]["ref_samples"]
        ),
        tile_pixels=given["tile_pixels"],
    )
    forced = force_listen(
        given["append_force_listen"], given["turn_seq"], given["force_listen_count"]
    )
    compare.same("slots", expected["slots"], reservation.slots)
    compare.same("vision_slots", expected["vision_slots"], reservation.vision_slots)
    compare.same("context_slots", expected["context_slots"], reservation.context_slots)
    compare.same("force_listen", expected["force_listen"], forced)
    return compare.result()


def check_session_context(case: Case) -> CaseResult:
    """One of the `context_cases` of `framing_cases`."""
    given, expected = case["input"], case["expected"]
    compare = Comparison(f"context {case['id']}")
    if has_quirk(expected):
        compare.skip(1)
        return compare.result()
    context = _toy_context(given["instructions"], given["ref_samples"], given["initial_user_text"])
    compare.same("prefix_text", expected["prefix_text"], context.prefix_text)
    compare.same("suffix_text", expected["suffix_text"], context.suffix_text)
    compare.same("context_reserve", expected["context_reserve"], context.window.context_tokens)
    compare.same("prefix_tokens", expected["prefix_tokens"], context.window.prefix_tokens)
    compare.same("suffix_ids", expected["suffix_ids"], list(context.prompt.suffix_ids))
    compare.same("marker_ids", expected["marker_ids"], list(context.prompt.marker_ids))
    compare.same("special_ids", expected["special_ids"], sorted(context.window.special_ids))
    return compare.result()


def _toy_context(
    instructions: str | None, reference_samples: int | None, user_text: str | None
) -> SessionContext:
    return build_context(
        instructions,
        reference_samples,
        user_text,
        toy_encode,
        frozenset(TOY_CONTROL_IDS.values()),
    )


# --- planner ------------------------------------------------------------------------------------


def check_planner_session(case: Case) -> CaseResult:
    """One session of `planner_sessions`."""
    compare = Comparison(case["id"])
    policy, limits = _policy(case["policy"])
    layout = _planner_layout(case["layout"])
    first = WindowAppend(1, case["opening_prompt_len"], ())
    # The recorded guard looks at later appends only.
    _, state = plan(
        EMPTY_WINDOW, first, policy, layout, PlanLimits(max_model_tokens=None), NO_DIRECTIVE
    )
    steps = list(zip(case["appends"], case["expected"], strict=True))
    for index, (given, expected) in enumerate(steps):
        if has_quirk(expected):
            compare.skip(len(steps) - index)
            break
        where = f"append {given['seq']}."
        compare.same(f"{where}num_prompt_before", given["num_prompt_before"], state.prompt_tokens)
        append = WindowAppend(given["seq"], given["update_len"], tuple(given["generated_ids"]))
        decision, after = plan(state, append, policy, layout, limits, NO_DIRECTIVE)
        _compare_plan(compare, where, expected, decision, after)
        if isinstance(decision, Overflow):
            compare.same(f"{where}state", state, after)
            break
        state = after
    return compare.result()


def _compare_plan(
    compare: Comparison, where: str, expected: Case, decision: Plan, after: WindowState
) -> None:
    planned = decision.refused if isinstance(decision, Overflow) else decision
    slides = planned if isinstance(planned, Rebuild) else None
    got: dict[str, object] = {
        "action": _action(decision),
        "drop_units": slides.drop_units if slides else 0,
        "dropped_tokens": slides.dropped_tokens if slides else 0,
        "previous_ids": list(slides.previous_ids) if slides else None,
        "replacement_len": slides.replacement_tokens if slides else None,
    }
    if isinstance(decision, Overflow):
        got["overflow_from"] = _action(decision.refused)
        got["projected_len"] = decision.projected_tokens
    else:
        got["open_start_after"] = after.open_start
        got["retained_unit_lens"] = [unit.tokens for unit in after.units]
        got["prompt_len_after"] = after.prompt_tokens
    for name, value in got.items():
        compare.same(where + name, expected.get(name), value)


def _action(decision: Plan) -> str:
    if isinstance(decision, Overflow):
        return "overflow"
    return "extend" if isinstance(decision, Extend) else "rebuild"


def _policy(given: Case) -> tuple[WindowPolicy, PlanLimits]:
    policy = WindowPolicy(
        mode=WindowMode(given["mode"]),
        basic_high_tokens=given["basic_high"],
        basic_low_tokens=given["basic_low"],
        context_previous_max_tokens=given["context_previous_max"],
        context_max_units=given["context_max_units"],
    )
    return policy, PlanLimits(given["max_model_len"], given["sampled_tokens_per_step"])


def _planner_layout(given: Case) -> WindowLayout:
    return WindowLayout(
        context_tokens=given["context_reserve"],
        prefix_tokens=given["prefix_tokens"],
        suffix_tokens=given["suffix_ids_len"],
        marker_tokens=len(given["marker_ids"]),
        special_ids=frozenset(given["special_ids"]),
    )


# --- layout -------------------------------------------------------------------------------------


def check_layout_session(case: Case) -> CaseResult:
    """One session of `layout_sessions`: reservation, plan and rendered prompt together."""
    compare = Comparison(case["id"])
    replay = _LayoutReplay(case)
    compare.same("context_layout", case["context_layout"], replay.context_layout())
    for index, given in enumerate(case["appends"]):
        expected = given["expected"]
        if has_quirk(expected):
            compare.skip(len(case["appends"]) - index)
            break
        got = replay.append(given)
        if got["action"] == "overflow":
            compare.same(f"append {given['seq']}.action", expected["action"], got["action"])
            break
        for name, value in got.items():
            compare.same(f"append {given['seq']}.{name}", expected[name], value)
    return compare.result()


class _LayoutReplay:
    """A session as the sidecar would run it: every admitted append is kept as a record."""

    def __init__(self, case: Case) -> None:
        self._policy, self._limits = _policy(case["policy"])
        self._context = _toy_context(
            case["instructions"], case["ref_samples"], case["initial_user_text"]
        )
        self._ids: LayoutIds = layout_ids_of(TOY_CONTROL_IDS, TOY_UNKNOWN_ID)
        self._state = EMPTY_WINDOW
        self._carry_samples = 0
        self._pending: UnitInput | None = None
        self._history: list[HistoryUnit] = []

    def context_layout(self) -> list[list[int]]:
        """The session context alone."""
        parts = history_parts(self._context.prompt, (), (), self._ids, MEDIA_LENGTHS)
        return layout_ids(parts, self._ids)

    def append(self, given: Case) -> dict[str, object]:
        """Admit one append; what was reserved, planned and rendered."""
        seq, completed_ids = given["seq"], tuple(given["completed_ids"])
        frames = [FrameSize(width, height) for width, height in given["frames"]]
        split = split_chunks(self._carry_samples, given["samples"], first=seq == 1)
        reservation = reserve_append(
            seq, given["samples"], frames, self._context.window.context_tokens
        )
        decision, after = plan(
            self._state,
            WindowAppend(seq, reservation.slots, completed_ids),
            self._policy,
            self._context.window,
            self._limits,
            NO_DIRECTIVE,
        )
        if isinstance(decision, Overflow):
            return {"action": "overflow"}
        if self._pending is not None:
            unit = HistoryUnit(self._pending, completed_ids, given["completed_terminator"])
            self._history.append(unit)
        if isinstance(decision, Rebuild):
            del self._history[: decision.drop_units]
        pending = UnitInput(seq, split.chunks, reservation.blocks)
        parts, planned_tokens = self._render(decision, reservation.slots, pending)
        self._state = after
        self._carry_samples = split.carry_samples
        self._pending = pending
        length = parts_length(parts)
        return {
            "slots": reservation.slots,
            "action": "open" if seq == 1 else _action(decision),
            "drop_units": decision.drop_units if isinstance(decision, Rebuild) else 0,
            "prompt_len_after": after.prompt_tokens,
            "worker_len": length,
            "layout": layout_ids(parts, self._ids),
            "lengths_agree": length == planned_tokens,
        }

    def _render(
        self, decision: Extend | Rebuild, slots: int, pending: UnitInput
    ) -> tuple[tuple[PromptPart, ...], int]:
        if isinstance(decision, Extend) and pending.seq > 1:
            return append_parts(pending, self._history[-1], self._ids, MEDIA_LENGTHS), slots
        previous_ids = decision.previous_ids if isinstance(decision, Rebuild) else ()
        parts = prompt_parts(
            self._context.prompt, previous_ids, self._history, pending, self._ids, MEDIA_LENGTHS
        )
        planned = slots if isinstance(decision, Extend) else decision.replacement_tokens
        return parts, planned
