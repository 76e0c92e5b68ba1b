"""A cancellation that a library has swallowed, raised after all."""

import asyncio


def raise_if_cancelled() -> None:
    """Called after a library's call. asyncio.wait_for of Python 3.11, which the Redis client sends
    with, loses a cancellation that comes together with the result; the task would run on for ever
    and its group wait for it."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError
