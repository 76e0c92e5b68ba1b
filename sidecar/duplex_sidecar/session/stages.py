"""The four stages as one session uses them, and the wait for one that restarts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
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
class RedoGates:
    """What a stage lost is submitted to it again by one session at a time. Who was in it when it
    died cannot be told from the unit that ended it, and each may be submitted only so often: so
    what ends a stage takes no other session's last try with it."""

    encoder: asyncio.Lock = field(default_factory=asyncio.Lock)
    thinker: asyncio.Lock = field(default_factory=asyncio.Lock)
    talker: asyncio.Lock = field(default_factory=asyncio.Lock)
    code2wav: asyncio.Lock = field(default_factory=asyncio.Lock)


@dataclass(frozen=True)
class StageSet:
    encoder: EncoderStage
    thinker: ThinkerStage
    talker: TalkerStage
    code2wav: Code2WavStage
    thinker_spare: SpareSeats
    talker_spare: SpareSeats
    redo_gates: RedoGates = field(default_factory=RedoGates)


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


@asynccontextmanager
async def alone_at(stage: Stage, name: str, gate: asyncio.Lock) -> AsyncGenerator[None]:
    """Nobody else submits again meanwhile, and the stage stands. One that is away is waited for
    side by side, also by those for whose turn it ended again: in the gate nobody waits for it.
    Raises StageAway."""
    while True:
        await wait_ready(stage, name)
        async with gate:
            if await _stands(stage):
                yield
                return


async def _stands(stage: Stage) -> bool:
    try:
        await stage.health()
    except StageError:
        return False
    return True
