"""A Thinker whose admission guard looks away: vLLM itself has to make room, by preemption.

Imported in the stage's process alone (`exact_crowded_thinker`).
"""

from typing import Any

from msgspec import structs

from duplex_sidecar.stages.thinker import service
from duplex_sidecar.stages.thinker.config import ThinkerSettings

MANY_BLOCKS = 1_000_000


class _CrowdedService(service.ThinkerService):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._host.limits = structs.replace(self._host.limits, blocks=MANY_BLOCKS)


async def load(settings: ThinkerSettings) -> service.ThinkerService:
    service.ThinkerService = _CrowdedService
    return await service.load(settings)
