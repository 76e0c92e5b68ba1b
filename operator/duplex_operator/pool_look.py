"""One look at one pool while it lasts, and what is kept of a pool between two looks."""

from dataclasses import dataclass, field

from duplex_api.resolve_pool import ResolvedPool
from duplex_operator.decide.pool_status import Trouble
from duplex_operator.objects import PoolObject
from duplex_operator.resources.pods import PoolIdentity


@dataclass(slots=True)
class PoolMemory:
    """What is kept of a pool between looks; all of it can be lost. deleted: pods whose deletion
    was asked for. refused: why the API server takes no pod of this template, and until when that is
    believed. told: the trouble that there was an Event of."""

    deleted: set[str] = field(default_factory=set)
    refused: Trouble | None = None
    refused_hash: str = ""
    refused_until_ms: int = 0
    budget_of: str = ""
    status_ms: int = 0
    told: Trouble | None = None
    looked_s: float = float("-inf")


@dataclass(slots=True)
class PoolLook:
    """One look at one pool, while it lasts."""

    pool: PoolObject
    identity: PoolIdentity
    spec: ResolvedPool
    memory: PoolMemory
    now_ms: int
    trouble: Trouble | None = None
    held: bool = False
    """No pod is made: what it would need is not there."""
    again_s: float | None = None

    def again(self, after_s: float) -> None:
        self.again_s = after_s if self.again_s is None else min(self.again_s, after_s)
