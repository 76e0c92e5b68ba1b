"""What can be done next about a session: one frozen action, with its reason and its sentence."""

from dataclasses import dataclass

from duplex_api.session import SessionStatus

RETRY_S = 1.0
"""When to look again after a step that came to nothing."""
SOON_S = 0.25
"""The same, where what is missing is on its way."""


@dataclass(frozen=True, slots=True)
class EnsureFinalizer:
    """Before anything exists outside Kubernetes that a deletion would have to undo."""


@dataclass(frozen=True, slots=True)
class AssignToken:
    """Make the client's token (or read the user's), and the route record that knows its hash."""


@dataclass(frozen=True, slots=True)
class AskForSlot:
    """Stand in the pool's queue."""


@dataclass(frozen=True, slots=True)
class Place:
    """Write the placement, with its larger fence, before anybody is told of it."""

    status: SessionStatus
    sentence: str


@dataclass(frozen=True, slots=True)
class Open:
    """Tell the placed pod's sidecar. dead_pod_uid: the pod where it was before, whose sidecar may
    still hold the lease, for what is proven of its death; empty for none. goes_on: it has a
    history, and must not begin without it."""

    pod_uid: str
    fence: int
    dead_pod_uid: str
    goes_on: bool = False


@dataclass(frozen=True, slots=True)
class HandOver:
    """Let it change pods while it speaks: the placed pod makes ready under the placement's fence,
    then the pod that runs it gives it away."""

    pod_uid: str
    source_uid: str
    fence: int


@dataclass(frozen=True, slots=True)
class Park:
    pod_uid: str


@dataclass(frozen=True, slots=True)
class End:
    """End it on its pod, for good."""

    pod_uid: str
    reason: str


@dataclass(frozen=True, slots=True)
class WriteStatus:
    """reason and sentence of what happened; told as an Event where `event`. warning: such one.
    queued: the session goes on waiting for a slot."""

    status: SessionStatus
    reason: str
    sentence: str
    event: bool = False
    warning: bool = False
    queued: bool = False


@dataclass(frozen=True, slots=True)
class Erase:
    """Erase the ledger and the route record."""


@dataclass(frozen=True, slots=True)
class RemoveFinalizer:
    """Let the object go. sentence: what was erased, or what is still to be."""

    reason: str
    sentence: str
    warning: bool


@dataclass(frozen=True, slots=True)
class Delete:
    """The object has outlived its ttl."""

    reason: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Nothing:
    """after_s: when to look again, None: when something changes. queued: as above."""

    after_s: float | None = None
    queued: bool = False


Action = (
    EnsureFinalizer
    | AssignToken
    | AskForSlot
    | Place
    | Open
    | HandOver
    | Park
    | End
    | WriteStatus
    | Erase
    | RemoveFinalizer
    | Delete
    | Nothing
)
