"""What the planner reads and returns: frozen, serialisable, nothing that depends on a clock."""

from enum import StrEnum
from typing import Final

import msgspec

from duplex_api.window import WindowBoundary

BOUNDARY_LIMIT_UNITS: Final = 8
"""How many units a slide may go beyond what is due to end at a boundary, unless told otherwise."""


class RebuildCause(StrEnum):
    """Why a stream's prompt is replaced."""

    SLIDE = "slide"
    TRUNCATION = "truncation"
    EVICTION = "eviction"
    ENGINE_RESTART = "engine_restart"
    REPLICA_RESTART = "replica_restart"
    MOVE = "move"


class WindowLayout(msgspec.Struct, frozen=True):
    """Lengths of the session context.

    context_tokens: the whole context, as reserved with the first append. prefix_tokens: the part
    before `previous`, None when only the reserve is known. special_ids: ids that never count as
    spoken text.
    """

    context_tokens: int
    prefix_tokens: int | None
    suffix_tokens: int
    marker_tokens: int
    special_ids: frozenset[int]


class PlanLimits(msgspec.Struct, frozen=True):
    """max_model_tokens: most positions of one stream, None for no limit. sampled_tokens_per_step:
    tokens that one engine step may add (room that an admission has to leave)."""

    max_model_tokens: int | None
    sampled_tokens_per_step: int = 1


class Directive(msgspec.Struct, frozen=True):
    """What is decided outside of the planner and recorded with the unit.

    rebuild: the stream is gone or has to go, so the prompt is replaced even if nothing slides.
    hysteresis_units: a slide drops at least so many units at once. boundary: a slide goes on, for
    at most boundary_limit_units more units, until it ends where a sentence or a turn ended; if it
    cannot, it ends where it is due. All off by default: they change outputs.
    """

    rebuild: RebuildCause | None = None
    hysteresis_units: int = 1
    boundary: WindowBoundary = WindowBoundary.UNIT
    boundary_limit_units: int = BOUNDARY_LIMIT_UNITS


class WindowAppend(msgspec.Struct, frozen=True):
    """The append to admit, and the answer to the one before it.

    update_tokens: reserved positions of the append (with the context for seq 1, with the two
    closure positions after that). completed_ids: confirmed ids of the previous append without its
    terminator. completed_ends: the strongest boundary at which that answer ended; listening outside
    of a reply counts as a turn end.
    """

    seq: int
    update_tokens: int
    completed_ids: tuple[int, ...]
    completed_ends: WindowBoundary = WindowBoundary.UNIT


class WindowUnit(msgspec.Struct, frozen=True, gc=False):
    """A completed append in the window: its positions up to its `</unit>`, and in mode `context`
    the ids it said."""

    seq: int
    tokens: int
    spoken_ids: tuple[int, ...]
    ends: WindowBoundary


class WindowState(msgspec.Struct, frozen=True):
    """The window after an admission.

    prompt_tokens: length of the stream's prompt, without the answer to the last append. open_start:
    where the append that is not completed yet begins, None before the first completed one.
    unit_tokens: sum over `units`. Mode `off` keeps neither units nor open_start.
    """

    prompt_tokens: int
    open_start: int | None
    units: tuple[WindowUnit, ...]
    unit_tokens: int
    previous_ids: tuple[int, ...]


EMPTY_WINDOW: Final = WindowState(0, None, (), 0, ())
"""Before the first append of a session."""


class Extend(msgspec.Struct, frozen=True, tag="extend"):
    """Feed the append to the stream. position_tokens: positions that the stream holds before it.
    prompt_tokens: its prompt afterwards."""

    position_tokens: int
    prompt_tokens: int


class Rebuild(msgspec.Struct, frozen=True, tag="rebuild"):
    """Replace the stream by one with a prompt of replacement_tokens positions.

    dropped_through_seq: the newest append that left the window with this plan, None if none did.
    previous_ids: text of earlier replies to render behind the prefix (mode `context`, else empty).
    """

    cause: RebuildCause
    drop_units: int
    dropped_tokens: int
    dropped_through_seq: int | None
    previous_ids: tuple[int, ...]
    replacement_tokens: int


class Overflow(msgspec.Struct, frozen=True, tag="overflow"):
    """The append does not fit: the session ends with `context_length_exceeded`. The state stays."""

    refused: Extend | Rebuild
    projected_tokens: int


Plan = Extend | Rebuild | Overflow


def previous_tokens(layout: WindowLayout, previous_ids: tuple[int, ...]) -> int:
    """Positions of the previous region: its marker costs nothing while there is no text."""
    return layout.marker_tokens + len(previous_ids) if previous_ids else 0
