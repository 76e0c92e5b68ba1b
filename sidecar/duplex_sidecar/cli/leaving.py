"""A verb that is asked to leave takes along what it has started."""

import signal
from collections.abc import Generator
from contextlib import contextmanager

INTERRUPTED = 130
"""Exit status of a verb that was asked to leave by a signal."""


@contextmanager
def leaves_in_order() -> Generator[None]:
    """SIGTERM inside does what Ctrl-C does: every `finally` runs, then KeyboardInterrupt goes on.
    Of the main thread."""

    def leave(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
