"""How many pods a pool wants. Pure. `spec.replicas` is read and never written."""

from dataclasses import dataclass

from duplex_api.resolve_pool import ResolvedPool


@dataclass(frozen=True, slots=True)
class Demand:
    """taken: slots of sessions that run, or are being placed, and would want one elsewhere.
    queued: sessions that wait for a slot."""

    taken: int
    queued: int


@dataclass(frozen=True, slots=True)
class Wanted:
    """only_empty: the number is ours, so no conversation is moved for it."""

    pods: int
    only_empty: bool
    message: str


def wanted_pods(spec: ResolvedPool, demand: Demand) -> Wanted:
    """Of what a person wrote, or between the two bounds by slots."""
    if spec.scaling is None:
        return Wanted(spec.replicas, only_empty=False, message=f"spec.replicas is {spec.replicas}")
    slots = demand.taken + demand.queued + spec.scaling.spare_slots
    needed = -(-slots // spec.slots)
    pods = min(max(needed, spec.scaling.min_replicas), spec.scaling.max_replicas)
    message = (
        f"{demand.taken} slots taken, {demand.queued} sessions queued,"
        f" {spec.scaling.spare_slots} slots spare: {needed} pods of {spec.slots} slots,"
        f" between {spec.scaling.min_replicas} and {spec.scaling.max_replicas}"
    )
    return Wanted(pods, only_empty=True, message=message)
