"""A cancellation that a library has swallowed, raised after all."""

import asyncio


def raise_if_cancelled() -> None:
    """Called after every talk with the server. `asyncio.wait_for` of Python 3.11, which the Redis
    client uses, loses a cancellation that comes together with the result; a task that loops would
    run on for ever, and whoever stops it would wait as long."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
