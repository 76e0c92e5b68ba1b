"""The four stages as one session uses them, and the wait for one that restarts."""

import asyncio
from dataclasses import dataclass, field

from duplex_sidecar.admission.seats import SpareSeats
from duplex_sidecar.stages.errors import StageAway, StageError
from duplex_sidecar.stages.interface import (
    Code2WavStage,
    EncoderStage,
    Stage,
    TalkerStage,
    ThinkerStage,
)

READY_TIMEOUT_S = 90.0
"""A stage that restarts has this long before a session that waits for it is let go."""
_POLL_S = 0.05


@dataclass(frozen=True)
class StageSet:
    encoder: EncoderStage
    thinker: ThinkerStage
    talker: TalkerStage
    code2wav: Code2WavStage
    thinker_spare: SpareSeats
    talker_spare: SpareSeats
    redo_gate: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Units of all sessions are submitted again to the Thinker one at a time: one that ends the
    engine takes no other redo with it, whose attempts are as limited."""


async def wait_ready(stage: Stage, name: str) -> None:
    """Returns when the stage answers its health. Raises StageAway after 90 s."""
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            while True:
                try:
                    await stage.health()
                    return
                except StageError:
                    await asyncio.sleep(_POLL_S)
    except TimeoutError:
        raise StageAway(name, READY_TIMEOUT_S) from None
