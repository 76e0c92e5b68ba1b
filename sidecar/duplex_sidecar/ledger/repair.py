"""What a living owner wrote lately, and what of it a ledger that lost its tail must hear again.

A failover to a replica that lagged, or a server's restart after a disk that did not keep up, leaves
a ledger that ends some writes ago. Writes reach a replica and the file in their order, so what is
left is a prefix: the owner sends the calls behind it again, as they were. Each carries its fence,
nonce, expected head and operation id; nobody else's ledger can be changed by that. Pure.
"""

from collections import deque
from enum import StrEnum

import msgspec

from duplex_sidecar.ledger.call import PendingCall, ScriptName
from duplex_sidecar.ledger.session_view import SessionMeta

KEPT_MS = 30_000
KEPT_BYTES = 32 * 1024 * 1024
"""Whichever comes first; 30 s with two image blocks a second at the real shapes fit."""

_CHAIN = frozenset({ScriptName.ACCEPT, ScriptName.COMMIT, ScriptName.NOTE, ScriptName.CUT})
_PREVIOUS_HASH = 3
"""Index of the expected head's hash among the arguments of every write of the chain."""


class Standing(StrEnum):
    """How the ledger stands to what this owner wrote."""

    AHEAD = "ahead"
    """Nothing of it is missing: it holds a write more, whose answer nobody waited for."""
    SHORT = "short"
    """It is a prefix, and the rest is at hand."""
    REGRESSED = "regressed"
    """It is another history, or ends before what is at hand."""


class Suffix(msgspec.Struct, frozen=True):
    """calls: to be sent again in this order."""

    standing: Standing
    calls: tuple[PendingCall, ...] = ()


class _Written(msgspec.Struct, frozen=True):
    call: PendingCall
    at_ms: int
    size_bytes: int


class RecentWrites:
    """Of one owner: the writes of its chain and journal that were acknowledged, oldest first."""

    def __init__(self) -> None:
        self._written: deque[_Written] = deque()
        self._bytes = 0

    def note(self, call: PendingCall, now_ms: int) -> None:
        """An acknowledged write. Old ones go with new ones: a session that is silent keeps its
        last."""
        if call.script not in _CHAIN and call.events is None:
            return
        size = sum(len(word) for word in call.arguments if isinstance(word, bytes))
        self._written.append(_Written(call, now_ms, size))
        self._bytes += size
        while len(self._written) > 1 and (
            self._bytes > KEPT_BYTES or now_ms - self._written[0].at_ms > KEPT_MS
        ):
            self._bytes -= self._written.popleft().size_bytes

    def copy(self) -> "RecentWrites":
        """As they are now."""
        other = RecentWrites()
        other._written, other._bytes = self._written.copy(), self._bytes
        return other

    def after(self, meta: SessionMeta) -> Suffix:
        """meta: of the ledger that refused a write of this owner for its head or its journal."""
        behind = tuple(w.call for w in self._written if _is_behind(w.call, meta))
        if not behind:
            return Suffix(Standing.AHEAD)
        heads = [w.call for w in self._written if w.call.then is not None]
        link = next((call for call in heads if _is_behind(call, meta)), None)
        events = next((call.events for call in behind if call.events is not None), None)
        if link is not None:
            joins = link.arguments[_PREVIOUS_HASH] == meta.head.hash
        else:
            joins = not heads or heads[-1].then == meta.head
        joins = joins and (events is None or events[0] == meta.events_last + 1)
        return Suffix(Standing.SHORT, behind) if joins else Suffix(Standing.REGRESSED)


def _is_behind(call: PendingCall, meta: SessionMeta) -> bool:
    """Whether the ledger does not have it."""
    if call.then is not None:
        return call.then.index > meta.head.index
    return call.events is not None and call.events[1] > meta.events_last
