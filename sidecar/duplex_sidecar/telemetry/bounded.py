"""Flush and shutdown of the SDK block for as long as a collector lets them wait; these do not."""

import threading
from collections.abc import Callable


def finishes_within(timeout_ms: int, action: Callable[[], object], name: str) -> bool:
    """Run `action` in a daemon thread; False when it has not returned after `timeout_ms`."""
    thread = threading.Thread(target=action, name=name, daemon=True)
    thread.start()
    thread.join(timeout_ms / 1000)
    return not thread.is_alive()
