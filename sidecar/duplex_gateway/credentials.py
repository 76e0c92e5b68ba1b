"""Who a client says it is, and how often an address may be wrong about it."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

_TOKEN_PROTOCOL = "openai-insecure-api-key."


def bearer_token(headers: Mapping[str, str]) -> tuple[str, str | None]:
    """(token, subprotocol to confirm), as the sidecar's door takes them: `Authorization: Bearer`,
    or, for browsers, a subprotocol. An absent token is the empty string."""
    scheme, _, token = headers.get("authorization", "").partition(" ")
    offered = [part.strip() for part in headers.get("sec-websocket-protocol", "").split(",")]
    confirmed = "realtime" if "realtime" in offered else None
    if scheme.lower() == "bearer" and token:
        return token.strip(), confirmed
    for part in offered:
        if part.startswith(_TOKEN_PROTOCOL):
            return part.removeprefix(_TOKEN_PROTOCOL), confirmed
    return "", confirmed


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
