"""What all calls of one gateway may keep in memory together. Pure.

Each call has bounds of its own, but many calls at their bounds are more than a process may have,
and one that is killed for its memory ends everybody's. Half of the budget is for whoever asks
first. The other half is set aside in equal shares, so that a call that keeps no more than a second
or two of sound goes on, whatever the others keep.
"""

import contextlib
from collections.abc import Generator


class Budget:
    """Of a process. What `Account.fits` agrees to never comes to more than the limit."""

    def __init__(self, limit_bytes: int, most_calls: int) -> None:
        self.common_bytes = limit_bytes // 2
        self.share_bytes = self.common_bytes // most_calls
        self.held_bytes = 0

    @contextlib.contextmanager
    def account(self) -> Generator["Account"]:
        """Of one call. What it still holds at its end, however it ends, is given back."""
        account = Account(self)
        try:
            yield account
        finally:
            account.change(-account.held_bytes)


class _Call:
    """What all accounts of one call hold."""

    held_bytes = 0


class Account:
    """What one call holds of the budget, or a part of that."""

    def __init__(self, budget: Budget, call: _Call | None = None) -> None:
        self._budget = budget
        self._call = call or _Call()
        self.held_bytes = 0

    def part(self) -> "Account":
        """Another one of the same call, for what outlives this one. Whoever has it gives back what
        it holds."""
        return Account(self._budget, self._call)

    def fits(self, more_bytes: int) -> bool:
        """Whether the call may hold so much more."""
        budget = self._budget
        own = self._call.held_bytes + more_bytes <= budget.share_bytes
        return own or budget.held_bytes + more_bytes <= budget.common_bytes

    def change(self, by_bytes: int) -> None:
        """It holds so much more, or less, whether or not that fits."""
        self.held_bytes += by_bytes
        self._call.held_bytes += by_bytes
        self._budget.held_bytes += by_bytes

    @contextlib.contextmanager
    def holding(self, more_bytes: int) -> Generator[None]:
        self.change(more_bytes)
        try:
            yield
        finally:
            self.change(-more_bytes)
