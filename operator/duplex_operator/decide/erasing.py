"""How often an erasure that a sidecar refuses is asked for. Pure.

What passes by itself (the ledger is away) is asked for again at the usual pace. Any other refusal
comes again each time, such as that of a key that is no session's: ever more rarely, then.
"""

from dataclasses import replace

from duplex_operator.decide.facts import Memory
from duplex_operator.decide.pauses import doubled_ms

FIRST_PAUSE_MS = 1_000
LONGEST_PAUSE_MS = 3_600_000
_PASSES = frozenset(("ledger_unavailable", "not_ready", "unauthorized", ""))


def passes(code: str) -> bool:
    """Whether that refusal says nothing of the next time."""
    return code in _PASSES


def pause_ms(refusals: int, first_ms: int = FIRST_PAUSE_MS) -> int:
    """After so many refusals in a row (1 or more): twice as long each time, an hour at most."""
    return doubled_ms(first_ms, refusals - 1, LONGEST_PAUSE_MS)


def after_refusal(memory: Memory, why: str, now_ms: int) -> Memory:
    """why: in the sidecar's words."""
    refusals = memory.erase_refusals + 1
    return replace(
        memory,
        erase_refusals=refusals,
        erase_refused=why,
        erase_again_ms=now_ms + pause_ms(refusals),
    )
