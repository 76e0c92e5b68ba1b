"""Pauses that grow. Pure."""

MOST_DOUBLINGS = 20
"""More would only make the number before the bound larger."""


def doubled_ms(first_ms: int, times: int, longest_ms: int) -> int:
    """`first_ms`, doubled so many times (0 or more), `longest_ms` at most."""
    return min(first_ms << min(times, MOST_DOUBLINGS), longest_ms)
