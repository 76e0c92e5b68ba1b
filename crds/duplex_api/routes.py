"""Route records and the wake stream: what the operator writes into the ledger for the gateway.

The gateway has no rights in Kubernetes. It finds a session by its token's hash in the route
record, the pod by the lease in the session's meta; where no lease exists it asks for one on the
wake stream.
Names and meanings only: whoever reads or writes brings the connection.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field, StrictStr

from duplex_api.base import ApiModel
from duplex_api.session import SessionPhase

ROUTE_PATTERN = "duplex:{*}:route"
"""All route records, for SCAN."""

WAKE_STREAM = "duplex:wake"
WAKE_FIELD = "session"
"""The one field of a wake entry: the session's uid."""
WAKE_MOST_ENTRIES = 10_000
"""The stream is cut to about this length (XADD MAXLEN ~). A lost wake is sent again by a client
that goes on waiting."""

_UID = re.compile(r"[A-Za-z0-9._-]{1,64}")
Sha256Hex = Annotated[StrictStr, Field(pattern=r"^[0-9a-f]{64}$")]
NamespacedName = Annotated[StrictStr, Field(pattern=r"^[^/\s]{1,63}/[^/\s]{1,253}$")]


def route_key(uid: str) -> str:
    """A session's route record. Raises ValueError on a uid that could leave the hash tag."""
    if not _UID.fullmatch(uid):
        raise ValueError("a session id has 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return f"duplex:{{{uid}}}:route"


def call_key(uid: str) -> str:
    """The gateways' mark of a session's newest call. Raises ValueError as `route_key`."""
    return route_key(uid).removesuffix("route") + "call"


def route_uid(key: str) -> str | None:
    """The session whose route record this is, None for a foreign key."""
    uid = key.removeprefix("duplex:{").removesuffix("}:route")
    return uid if _UID.fullmatch(uid) and route_key(uid) == key else None


class RouteRecord(ApiModel):
    """A hash of texts. Absent fields are absent in the hash."""

    token_sha256: Sha256Hex
    """Of the token that lets a client in."""
    token_sha256_next: Sha256Hex | None = None
    """Of the token that replaces it: both are good until the record names one again, or the ledger
    has this one as the one that lets in."""
    phase: SessionPhase
    pool: NamespacedName
    session: NamespacedName
    queue_position: Annotated[int, Field(ge=1, le=2**31 - 1)] | None = None
    reason: Annotated[StrictStr, Field(max_length=1024)] | None = None
    """Why the phase is what it is, in one word."""

    @classmethod
    def from_hash(cls, fields: Mapping[str, str]) -> Self | None:
        """None: no record. Raises pydantic's ValidationError on one that is none of ours."""
        if not fields:
            return None
        return cls.model_validate(dict(fields), by_name=True)

    def to_hash(self) -> dict[str, str]:
        values = self.model_dump(mode="json", by_alias=False, exclude_none=True)
        return {name: str(value) for name, value in values.items()}
