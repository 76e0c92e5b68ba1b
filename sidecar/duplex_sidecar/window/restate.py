"""The window's state from records: after a truncation changed what its units hold, or to check it.

Lengths are counted from what would be rendered, so the next plan and the renderer agree.
"""

from collections.abc import Sequence

from duplex_api.window import WindowBoundary, WindowMode
from duplex_sidecar.window.parts import (
    HistoryUnit,
    LayoutIds,
    MediaLengths,
    UnitInput,
    parts_length,
)
from duplex_sidecar.window.policy import WindowPolicy
from duplex_sidecar.window.render import append_parts, unit_parts
from duplex_sidecar.window.state import WindowLayout, WindowState, WindowUnit, previous_tokens


def restate(
    state: WindowState,
    policy: WindowPolicy,
    layout: WindowLayout,
    closed: Sequence[HistoryUnit],
    last: UnitInput,
    ids: LayoutIds,
    lengths: MediaLengths,
) -> WindowState:
    """The state whose window holds `closed` (oldest first) and then the append `last`.

    `last` is the newest admitted append; its answer comes with the next `WindowAppend`, as always.
    Boundaries are taken over from `state` by seq, `previous_ids` as they are: only what is still in
    the window can be truncated. In mode `off` `closed` is everything before `last`.
    """
    ends = {unit.seq: unit.ends for unit in state.units}
    units = tuple(
        WindowUnit(
            seq=unit.input.seq,
            tokens=parts_length(unit_parts(unit, ids, lengths)),
            spoken_ids=_spoken(unit, policy, layout),
            ends=ends.get(unit.input.seq, WindowBoundary.UNIT),
        )
        for unit in closed
    )
    unit_tokens = sum(unit.tokens for unit in units)
    open_start = layout.context_tokens + previous_tokens(layout, state.previous_ids) + unit_tokens
    prompt_tokens = open_start + parts_length(append_parts(last, None, ids, lengths))
    if policy.mode is WindowMode.OFF:
        return WindowState(prompt_tokens, None, (), 0, ())
    return WindowState(prompt_tokens, open_start, units, unit_tokens, state.previous_ids)


def _spoken(unit: HistoryUnit, policy: WindowPolicy, layout: WindowLayout) -> tuple[int, ...]:
    if policy.mode is not WindowMode.CONTEXT:
        return ()
    return tuple(id_ for id_ in unit.ids if id_ not in layout.special_ids)
