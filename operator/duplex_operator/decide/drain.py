"""Why a pod has to go although nobody of ours wants it to. Pure.

A refused eviction leaves no trace on the pod, so what comes before is watched: the cordon of its
node, and the taints by which autoscalers say that a node is about to go.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from duplex_operator.objects import NodeObject, PodObject


class LeaveReason(StrEnum):
    """The word in Events and on the pod."""

    NODE_LOST = "NodeLost"
    EVICTED = "Evicted"
    NODE_GOING = "NodeGoing"
    NODE_CORDONED = "NodeCordoned"


@dataclass(frozen=True, slots=True)
class Leave:
    """message: one sentence for a person."""

    reason: LeaveReason
    message: str


GOING_TAINTS = frozenset(
    (
        "ToBeDeletedByClusterAutoscaler",
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "cloud.google.com/impending-node-termination",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "aws-node-termination-handler/rebalance-recommendation",
        "node.kubernetes.io/out-of-service",
    )
)
"""Those by which somebody says that the node will be taken away soon."""

LOST_TAINT = "node.kubernetes.io/unreachable"
"""The node controller's, about 50 s after a kubelet's last sign of life. Not `not-ready`: that
kubelet still speaks, and every new node carries it for a moment."""

Rule = Callable[[PodObject, NodeObject | None], Iterator[Leave]]


def leaving(pod: PodObject, node: NodeObject | None) -> Leave | None:
    """The first rule that has something to say. node None: not seen (the operator may have no
    right to look at nodes), or the pod has none yet."""
    for rule in RULES:
        for leave in rule(pod, node):
            return leave
    return None


def node_lost(pod: PodObject, node: NodeObject | None) -> Iterator[Leave]:
    """Nobody can be asked to leave there; the pod's place is given to another one."""
    if node is not None and not pod.ready and LOST_TAINT in node.taints:
        yield Leave(LeaveReason.NODE_LOST, f"node {pod.node} does not answer")


def evicted(pod: PodObject, node: NodeObject | None) -> Iterator[Leave]:
    if pod.disrupted:
        yield Leave(LeaveReason.EVICTED, "the pod is being evicted")


def node_going(pod: PodObject, node: NodeObject | None) -> Iterator[Leave]:
    taints = sorted(GOING_TAINTS.intersection(node.taints)) if node is not None else []
    if taints:
        yield Leave(LeaveReason.NODE_GOING, f"node {pod.node} carries the taint {taints[0]}")


def node_cordoned(pod: PodObject, node: NodeObject | None) -> Iterator[Leave]:
    if node is not None and node.unschedulable:
        yield Leave(LeaveReason.NODE_CORDONED, f"node {pod.node} is cordoned")


RULES: tuple[Rule, ...] = (node_lost, evicted, node_going, node_cordoned)
