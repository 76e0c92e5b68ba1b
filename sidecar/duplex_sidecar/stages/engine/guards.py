"""What a stage refuses before it submits, because the engine would not survive it.

Seen on vLLM 0.32: a session beyond max_model_len, or an item of a wrong width, count or id, ends
the engine core and with it every session; too many streams or exhausted KV blocks end in a silent
wait for ever. Pure functions; each raises `Refusal` with a sentence.
"""

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from duplex_sidecar.stages.envelope import ElementType, Tensor

_BFLOAT16_EXPONENT = 0x7F80


class Refusal(Exception):
    """The request is wrong or does not fit; the text is for people."""


class EngineLimits(msgspec.Struct, frozen=True):
    """What an engine holds. Positions are tokens; blocks have block_tokens positions each."""

    max_model_len: int
    seats: int
    blocks: int
    block_tokens: int

    def blocks_of(self, positions: int) -> int:
        """Blocks that a stream of so many positions takes."""
        return -(-positions // self.block_tokens)


def check_length(limits: EngineLimits, position: int, new: int, answer_limit: int) -> None:
    """A unit must be able to end within the engine's length, whatever it answers."""
    if new < 1:
        raise Refusal("the feed holds no positions")
    worst = position + new + answer_limit
    if worst > limits.max_model_len:
        raise Refusal(
            f"{position} + {new} positions and an answer of up to {answer_limit} tokens exceed "
            f"the engine's {limits.max_model_len}"
        )


def check_room(
    limits: EngineLimits, own_worst: int, other_worsts: Iterable[int], *, opens: bool
) -> None:
    """Seats, and KV blocks by the worst case of every stream (positions, answers included)."""
    others = list(other_worsts)
    if opens and len(others) >= limits.seats:
        raise Refusal(f"all {limits.seats} seats are taken")
    blocks = limits.blocks_of(own_worst) + sum(map(limits.blocks_of, others))
    if blocks > limits.blocks:
        raise Refusal(f"{blocks} KV blocks are needed in the worst case, {limits.blocks} exist")


class StreamState(msgspec.Struct, frozen=True):
    """What is known of an open stream. positions: KV that it holds between units."""

    positions: int
    last_unit: int
    busy: bool


def check_extends(state: StreamState, unit: int, position: int, *, opens: bool) -> None:
    """A feed for an open stream continues exactly where the stream is."""
    if opens:
        raise Refusal("a stream of this name is open")
    if state.busy:
        raise Refusal("the stream is answering another feed")
    if position != state.positions:
        raise Refusal(f"the stream holds {state.positions} positions, not {position}")
    if unit <= state.last_unit:
        raise Refusal(f"unit {unit} after unit {state.last_unit}")


def check_ids(ids: Sequence[int], size: int, what: str) -> None:
    """All ids are in [0, size)."""
    if ids and not (min(ids) >= 0 and max(ids) < size):
        raise Refusal(f"{what} must be in [0, {size})")


def check_rows(
    tensor: Tensor, width: int, types: Sequence[ElementType], what: str, count: int | None = None
) -> None:
    """Rows [count, width] (any count above 0 if None) of one of the types, all finite."""
    if tensor.element_type not in types:
        allowed = " or ".join(types)
        raise Refusal(f"{what} must be {allowed}, not {tensor.element_type}")
    if len(tensor.shape) != 2 or tensor.shape[1] != width or tensor.shape[0] < 1:
        raise Refusal(f"{what} must have the shape [n, {width}], not {list(tensor.shape)}")
    if count is not None and tensor.shape[0] != count:
        raise Refusal(f"{what} must have {count} rows, not {tensor.shape[0]}")
    if not _is_finite(tensor):
        raise Refusal(f"{what} hold a value that is no number")


def _is_finite(tensor: Tensor) -> bool:
    if tensor.element_type is ElementType.FLOAT32:
        return bool(np.isfinite(np.frombuffer(tensor.data, np.float32)).all())
    bits = np.frombuffer(tensor.data, np.uint16)
    return bool(((bits & _BFLOAT16_EXPONENT) != _BFLOAT16_EXPONENT).all())
