"""What a fitted readout did when it was proven, and what it has to do. Torch-free."""

from pathlib import Path

import msgspec

READOUT_NAME = "readout.json"
"""In a tiny checkpoint: the `Behaviour` of each proof."""

LEAST_LISTENS = 30
LEAST_SPEAKS = 20
LEAST_TURN_ENDS = 5
MOST_UNITS_A_TURN = 6
LEAST_GAP = 2e-4
"""Between the best and the second logit of any greedy choice: far above what fp32 kernels differ
by, so that an engine takes the same tokens."""


class Behaviour(msgspec.Struct, frozen=True):
    """A free rehearsal of `units` seconds (120 in a proof).

    longest_turn_units: consecutive units that speak in one turn. capped_units: units that ended at
    the token cap. least_gap: see `LEAST_GAP`, None for sampled choices. agreement: share of units
    that spoke just when their last 200 ms were quiet. positions: length of the last prompt.
    """

    scene: str
    units: int
    listens: int
    speaks: int
    turn_ends: int
    longest_turn_units: int
    capped_units: int
    least_gap: float | None
    agreement: float
    positions: int
    rebuilds: int

    @property
    def good(self) -> bool:
        """Whether 120 units show what a conversation must."""
        return (
            self.listens >= LEAST_LISTENS
            and self.speaks >= LEAST_SPEAKS
            and self.turn_ends >= LEAST_TURN_ENDS
            and self.longest_turn_units <= MOST_UNITS_A_TURN
            and self.capped_units == 0
            and (self.least_gap is None or self.least_gap >= LEAST_GAP)
        )


def read_behaviours(folder: Path) -> tuple[Behaviour, ...]:
    """What the readout of a checkpoint did when it was made; empty where nothing was fitted."""
    try:
        data = (folder / READOUT_NAME).read_bytes()
        return msgspec.json.decode(data, type=tuple[Behaviour, ...])
    except (OSError, msgspec.MsgspecError):
        return ()
