"""When a pod that is being emptied is told to park what it has left. Pure.

Told at once, a sidecar parks whoever is silent just then, and the client waits for a prompt to be
rebuilt elsewhere. So those who talk get the time to be handed over first: where there is no slot
for them yet, one may come, and they talk on meanwhile.
"""

HAND_OVER_BOUND_MS = 20_000
"""From the mark on: a call to make ready and one to give away, and some of them in turn."""


def may_park(talkers: int, marked_ms: int, now_ms: int) -> bool:
    """talkers: sessions that run on the pod and have a client."""
    return talkers == 0 or now_ms - marked_ms >= HAND_OVER_BOUND_MS
