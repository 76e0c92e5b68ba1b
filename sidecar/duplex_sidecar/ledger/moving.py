"""The two scripts of a hand-over: the replica that is ready offers, the owner hands over.

The offer names the fence and nonce under which the next owner will write. The owner's script puts
exactly these into the lease, so there is no moment in which both may write, and none in which
nobody may: `Ledger.acquire` with the offered nonce is how the next owner sees that it is its turn.
"""

import secrets

import msgspec

from duplex_sidecar.ledger.call import Argument, Head, PendingCall, ScriptName
from duplex_sidecar.ledger.keys import session_keys
from duplex_sidecar.ledger.lease import LEASE_MS, Lease, asked_at
from duplex_sidecar.ledger.owners import OwnersCalls

OFFER_MS = 30_000
"""How long an offer holds unless it is repeated."""


class Offer(msgspec.Struct, frozen=True):
    """fence: larger than the recorded one. nonce: random, of the owner to be. address: host:port of
    its door, "" where there is none. asked: see `asked_at`; of several offers of one replica the
    one made last counts, whichever comes last."""

    session: str
    replica: str
    fence: int
    nonce: str
    address: str = ""
    asked: str = ""


def new_offer(session: str, replica: str, fence: int, address: str = "") -> Offer:
    return Offer(session, replica, fence, secrets.token_hex(16), address, asked_at())


class MoveCalls:
    """Every method may raise `LedgerUnavailable`, `SessionUnknown` and `SessionErased`."""

    def __init__(self, calls: OwnersCalls) -> None:
        self._calls = calls

    async def offer(self, offer: Offer) -> None:
        """Hold for `OFFER_MS` from now. Raises `StaleFence` where the fence is not larger than all
        that are recorded, `NotOffered` where nobody else runs the session, `SessionEnded`."""
        await self._offer(offer, OFFER_MS)

    async def withdraw(self, offer: Offer) -> None:
        """Take it back. Raises as `offer` does; `StaleFence` also where it was taken already."""
        await self._offer(offer, 0)

    async def hand_over(self, lease: Lease, head: Head, *, replica: str, fence: int) -> None:
        """The owner's last write: that replica's offer becomes the lease. Raises `NotOffered` (or
        no longer), `HeadMismatch` where something is open, `LeaseLost`, `StaleFence`."""
        await self._run(
            lease.session,
            ScriptName.HAND_OVER,
            (lease.fence, lease.nonce, head.hash, fence, replica, LEASE_MS),
        )

    async def _offer(self, offer: Offer, lifetime_ms: int) -> None:
        who = (offer.fence, offer.nonce, offer.replica, offer.address)
        await self._run(offer.session, ScriptName.OFFER, (*who, lifetime_ms, offer.asked))

    async def _run(self, session: str, script: ScriptName, arguments: tuple[Argument, ...]) -> None:
        key = session_keys(session).meta
        await self._calls.run(PendingCall(session, script, (key,), arguments))
