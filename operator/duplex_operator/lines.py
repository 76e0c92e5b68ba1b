"""Lines of a stream that somebody else writes: bounded, and never starving who waits beside."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp


class LineTooLongError(Exception):
    """The stream is of no use any more."""


async def lines_of(content: aiohttp.StreamReader, most_bytes: int) -> AsyncIterator[bytes]:
    """Without their ends. Raises LineTooLongError, and what aiohttp raises."""
    rest = bytearray()
    async for chunk in content.iter_any():
        rest += chunk
        while (end := rest.find(b"\n")) >= 0:
            yield bytes(rest[:end])
            del rest[: end + 1]
        if len(rest) > most_bytes:
            raise LineTooLongError
        await asyncio.sleep(0)
