"""How often an address may be wrong about who it is."""

from collections import OrderedDict
from typing import Final


class FailedAttempts:
    """Failed attempts of each address: `burst` at once, then one each `refill_s`. Of at most
    `addresses` of them; the one that failed longest ago is forgotten first."""

    def __init__(self, burst: int, refill_s: float, addresses: int = 10_000) -> None:
        self._burst: Final = burst
        self._refill_s: Final = refill_s
        self._addresses: Final = addresses
        self._debts: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """address -> (failures that are not forgiven yet, when that was counted)"""

    def allowed(self, address: str, now_s: float) -> bool:
        return self._debt(address, now_s) <= self._burst - 1

    def failed(self, address: str, now_s: float) -> None:
        debt = min(self._debt(address, now_s) + 1, float(self._burst))
        self._debts[address] = (debt, now_s)
        self._debts.move_to_end(address)
        while len(self._debts) > self._addresses:
            self._debts.popitem(last=False)

    def _debt(self, address: str, now_s: float) -> float:
        debt, since_s = self._debts.get(address, (0.0, now_s))
        debt -= (now_s - since_s) / self._refill_s
        if debt <= 0:
            self._debts.pop(address, None)
            return 0.0
        return debt
