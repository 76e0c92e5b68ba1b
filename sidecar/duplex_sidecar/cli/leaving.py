"""A verb that is asked to leave takes along what it has started."""

import signal
from collections.abc import Generator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit status of a verb that was asked to leave by a signal."""


@contextmanager
def leaves_in_order() -> Generator[None]:
    """SIGTERM inside does what Ctrl-C does: every `finally` runs, then KeyboardInterrupt goes on.
    Of the main thread. SIGINT too, which a shell's background jobs would ignore. A second signal
    (`timeout` sends two) breaks off nothing of what the first one began."""
    leaving = False

    def leave(*_: object) -> None:
        nonlocal leaving
        if not leaving:
            leaving = True
            raise KeyboardInterrupt

    before = {each: signal.signal(each, leave) for each in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
