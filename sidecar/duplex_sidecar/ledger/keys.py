"""Names of a session's keys. All share one hash tag, so a cluster keeps them on one node."""

import re
from dataclasses import dataclass
from functools import lru_cache

_SESSION = re.compile(r"[A-Za-z0-9._-]{1,64}")


@dataclass(frozen=True)
class SessionKeys:
    """meta: hash, lease, head, floors, phase. entries: hash index -> record bytes. order: list of
    "seq hash" from the trim floor. pcm, rows, frames: hashes seq -> blob. state: hash of opaque
    blobs. events: hash sequence -> event bytes; events_order: list of "at_ms bytes". voice: list of
    voice marks of the present epoch."""

    meta: str
    entries: str
    order: str
    pcm: str
    rows: str
    frames: str
    state: str
    events: str
    events_order: str
    voice: str

    def all(self) -> tuple[str, ...]:
        """meta first."""
        return (
            self.meta,
            self.entries,
            self.order,
            self.pcm,
            self.rows,
            self.frames,
            self.state,
            self.events,
            self.events_order,
            self.voice,
        )


@lru_cache(maxsize=1024)
def session_keys(session: str) -> SessionKeys:
    """Raises ValueError on a name that could leave the hash tag or grow a key without bound."""
    if not _SESSION.fullmatch(session):
        raise ValueError("a session id has 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    tag = f"duplex:{{{session}}}"
    return SessionKeys(
        meta=f"{tag}:meta",
        entries=f"{tag}:entries",
        order=f"{tag}:order",
        pcm=f"{tag}:pcm",
        rows=f"{tag}:rows",
        frames=f"{tag}:frames",
        state=f"{tag}:state",
        events=f"{tag}:events",
        events_order=f"{tag}:events_order",
        voice=f"{tag}:voice",
    )


META_PATTERN = "duplex:{*}:meta"


def session_of(meta_key: str) -> str | None:
    """The session whose meta key this is, None for a foreign key."""
    match = re.fullmatch(r"duplex:\{([A-Za-z0-9._-]{1,64})\}:meta", meta_key)
    return match.group(1) if match else None
