"""forward.py LISTEN PID TARGET PORTFILE: listen here, connect in the network namespace of PID.

LISTEN and TARGET are host:port; port 0 takes a free one. The port is written to PORTFILE once
connections are taken.
"""

import asyncio
import ctypes
import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 65_536


def enter_network_of(pid: int) -> None:
    descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    try:
        while data := await reader.read(CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
        writer.write_eof()
    except OSError:
        writer.close()


async def serve(listener: socket.socket, target: tuple[str, int], port_file: Path) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_connection(*target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        for end in (inner_writer, writer):
            end.close()

    server = await asyncio.start_server(carry, sock=listener)
    unfinished = port_file.with_name(port_file.name + ".new")
    unfinished.write_text(str(listener.getsockname()[1]))
    unfinished.rename(port_file)
    await server.serve_forever()


def address(text: str) -> tuple[str, int]:
    host, port = text.rsplit(":", 1)
    return host, int(port)


def main() -> None:
    listen, pid, target, port_file = sys.argv[1:]
    listener = socket.create_server(address(listen), backlog=256)
    enter_network_of(int(pid))
    with suppress(KeyboardInterrupt):
        asyncio.run(serve(listener, address(target), Path(port_file)))


if __name__ == "__main__":
    main()
