"""How long a lease is used: what its owner and those who wait for its end have to agree on."""

LEASE_MARGIN_MS = 500
"""An owner stops using its lease so long before the ledger lets go of it, so a lease with no more
than this left is used by nobody, until it is renewed. Sidecars of an earlier release may go on
beside an operator of a later one: it must not grow without regard to them."""
