"""The disruption budget of a pool: nobody evicts a pod that holds a conversation. Pure.

It selects occupied pods alone, so an empty one can always be evicted. An eviction that is refused
is tried again by whoever wants it (`kubectl drain` does), and by then the pod has been drained.

Of those it selects it asks for more than there ever are. `maxUnavailable` would be counted from
the pool's `spec.replicas`: an autoscaled pool, or one that is rolled or shrunk, has more pods than
that, and each one above the number could be evicted with its conversations.
"""

from duplex_operator.names import (
    COMPONENT_SIDECAR,
    FIELD_MANAGER,
    LABEL_COMPONENT,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_OCCUPIED,
    LABEL_POOL,
    PRODUCT,
)
from duplex_operator.resources.pod_template import Manifest
from duplex_operator.resources.pods import PoolIdentity, owner_reference

MORE_THAN_ANY_POOL = 1_000_000


def budget_name(pool_name: str) -> str:
    return f"{pool_name}-occupied"


def occupied_budget(pool: PoolIdentity) -> Manifest:
    """The PodDisruptionBudget as it is sent."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": {
            "name": budget_name(pool.name),
            "namespace": pool.namespace,
            "labels": {
                LABEL_NAME: PRODUCT,
                LABEL_COMPONENT: COMPONENT_SIDECAR,
                LABEL_MANAGED_BY: FIELD_MANAGER,
                LABEL_POOL: pool.name,
            },
            "ownerReferences": [owner_reference(pool)],
        },
        "spec": {
            "minAvailable": MORE_THAN_ANY_POOL,
            "selector": {
                "matchLabels": {
                    LABEL_COMPONENT: COMPONENT_SIDECAR,
                    LABEL_POOL: pool.name,
                    LABEL_OCCUPIED: "true",
                }
            },
            # Conversations wait for a ledger that is away, or for a stage, on pods that are not
            # ready. Of those that have lost theirs the label is taken off.
            "unhealthyPodEvictionPolicy": "IfHealthyBudget",
        },
    }
