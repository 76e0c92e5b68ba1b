"""A pool's spec with every default filled in: what the operator builds pods from.

The only home of a pool's defaults; the CRD carries them as words alone (`duplex_api.crd`).
"""

from dataclasses import dataclass

from duplex_api.base import ApiModel
from duplex_api.durations import duration_ms
from duplex_api.pool import (
    Checkpoint,
    CheckpointChange,
    DrainPolicy,
    Gpu,
    PodTemplate,
    PoolSpec,
    UpgradePolicy,
)


class PoolDefaults(ApiModel):
    """Of a pool's own fields. shared_memory: the hand-off rings and the engines' queues at the 8B
    shape, with room; a bound, no reservation. startup_timeout: 19 GB of weights from a network
    volume, then 70 s (one H200, CUDA graphs)."""

    checkpoint_change: CheckpointChange
    rebuilds_at_once: int
    shared_memory: str
    startup_timeout: str


DEFAULT_POOL = PoolDefaults(
    checkpoint_change=CheckpointChange.FINISH,
    rebuilds_at_once=2,
    shared_memory="8Gi",
    startup_timeout="10m",
)
DEFAULT_DRAIN = DrainPolicy(grace="60s")
DEFAULT_UPGRADE = UpgradePolicy(max_surge=1)


@dataclass(frozen=True, slots=True)
class ResolvedScaling:
    min_replicas: int
    max_replicas: int
    spare_slots: int


@dataclass(frozen=True, slots=True)
class ResolvedPool:
    """image None: the release's. gpu None: CPUs. scaling None: exactly `replicas` pods.

    voices_claim, otlp_endpoint, template None: nothing of the kind. trace_sample_ratio None: the
    sidecar's default.
    """

    checkpoint: Checkpoint
    checkpoint_change: CheckpointChange
    image: str | None
    slots: int
    rebuilds_at_once: int
    gpu: Gpu | None
    shared_memory: str
    startup_timeout_ms: int
    replicas: int
    scaling: ResolvedScaling | None
    drain_grace_ms: int
    max_surge: int
    voices_claim: str | None
    otlp_endpoint: str | None
    trace_sample_ratio: float | None
    template: PodTemplate | None


def resolve_pool(spec: PoolSpec) -> ResolvedPool:
    """Everything named: the spec's, else the default."""
    grace = (spec.drain and spec.drain.grace) or DEFAULT_DRAIN.grace
    surge = spec.upgrade.max_surge if spec.upgrade else None
    if surge is None:
        surge = DEFAULT_UPGRADE.max_surge
    assert grace is not None  # the default names it
    assert surge is not None
    return ResolvedPool(
        checkpoint=spec.checkpoint,
        checkpoint_change=spec.checkpoint_change or DEFAULT_POOL.checkpoint_change,
        image=spec.image,
        slots=spec.slots,
        rebuilds_at_once=spec.rebuilds_at_once or DEFAULT_POOL.rebuilds_at_once,
        gpu=spec.gpu,
        shared_memory=spec.shared_memory or DEFAULT_POOL.shared_memory,
        startup_timeout_ms=duration_ms(spec.startup_timeout or DEFAULT_POOL.startup_timeout),
        replicas=spec.replicas,
        scaling=_scaling(spec),
        drain_grace_ms=duration_ms(grace),
        max_surge=surge,
        voices_claim=spec.voices.claim_name if spec.voices else None,
        otlp_endpoint=spec.telemetry.otlp_endpoint if spec.telemetry else None,
        trace_sample_ratio=spec.telemetry.sample_ratio if spec.telemetry else None,
        template=spec.template,
    )


def _scaling(spec: PoolSpec) -> ResolvedScaling | None:
    if spec.scaling is None:
        return None
    return ResolvedScaling(
        min_replicas=spec.scaling.min_replicas,
        max_replicas=spec.scaling.max_replicas,
        spare_slots=spec.scaling.spare_slots or 0,
    )
