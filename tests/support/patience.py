"""For tests that are not about a length of time: a machine that stands still for some seconds is no
reason for another outcome."""

import pytest

from duplex_sidecar.ledger import lease, moving, store
from duplex_sidecar.ledger.store import LedgerOptions
from duplex_sidecar.session import departures, ending, owners, passing_on, standing_by
from duplex_sidecar.session.departures import Departures

PATIENCE_S = 60.0
"""For what comes a moment later on a machine with nothing else to do."""
PATIENT = LedgerOptions(call_timeout_ms=5_000)
"""Of a ledger that always answers, at last."""


def leases_run_out(patch: pytest.MonkeyPatch) -> None:
    """Leases last as long as the product's, where one is waited for."""
    for module in (store, moving):
        patch.setattr(module, "LEASE_MS", lease.LEASE_MS)


def unhurried(patch: pytest.MonkeyPatch) -> None:
    """Leases last so long that none runs out, and what the product bounds has time enough. So that
    something happens at once, and not when a lease has run out, is proved with `PATIENCE_S`, too:
    it is no longer than the lease."""
    for module in (store, moving):
        patch.setattr(module, "LEASE_MS", round(2_000 * PATIENCE_S))
    for module in (ending, departures, standing_by):
        patch.setattr(module, "END_TIMEOUT_S", 2 * PATIENCE_S)
    for module in (ending, standing_by):
        patch.setattr(module, "LAST_WRITE_S", PATIENCE_S)
    patch.setattr(owners, "GIVE_BACK_S", PATIENCE_S)
    patch.setattr(passing_on, "HAND_OVER_S", PATIENCE_S)
    for order in (Departures.park, Departures.hand_over):
        assert order.__kwdefaults__ is not None
        patch.setitem(order.__kwdefaults__, "unit_s", PATIENCE_S)
