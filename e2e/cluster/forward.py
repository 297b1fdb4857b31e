"""A door from the host into a cluster's network: listens on a host port, connects from inside the cluster's namespace.

Run as a file by `e2e.cluster.sandbox`, so it imports the standard library alone. A socket belongs for ever to the
namespace in which it was made: this process makes the listening one, then moves, and all that it connects is made in
the cluster. It ends when the cluster's first process does.
"""

import argparse
import asyncio
import contextlib
import ctypes
import os
import socket

CLONE_NEWNET = 0x40000000
CHUNK_BYTES = 64 * 1024
CONNECT_DEADLINE_S = 5.0


def enter_network_of(pid: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
    try:
        if libc.setns(namespace, CLONE_NEWNET) != 0:
            code = ctypes.get_errno()
            raise OSError(code, f"setns to the network of {pid}: {os.strerror(code)}")
    finally:
        os.close(namespace)


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the reader ends, then close the writer's sending half, as TCP does."""
    with contextlib.suppress(ConnectionError):
        while chunk := await reader.read(CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        if writer.can_write_eof():
            writer.write_eof()


async def serve(listener: socket.socket, target: tuple[str, int], anchor: int) -> None:
    async def door(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.wait_for(asyncio.open_connection(*target), CONNECT_DEADLINE_S)
        except (OSError, TimeoutError):
            writer.transport.abort()  # a reset, as if nothing listened there
            return
        try:
            await asyncio.gather(pump(reader, inner_writer), pump(inner_reader, writer))
        finally:
            for half in (writer, inner_writer):
                half.close()

    gone = asyncio.Event()
    pidfd = os.pidfd_open(anchor)
    asyncio.get_running_loop().add_reader(pidfd, gone.set)
    async with await asyncio.start_server(door, sock=listener):
        await gone.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--anchor", type=int, required=True, help="pid of the cluster's first process")
    parser.add_argument("--listen", type=int, required=True, help="port on the host's 127.0.0.1")
    parser.add_argument("--to", required=True, help="ADDRESS:PORT inside the cluster")
    args = parser.parse_args()
    address, port = args.to.rsplit(":", 1)
    listener = socket.create_server(("127.0.0.1", args.listen), backlog=256)
    enter_network_of(args.anchor)
    asyncio.run(serve(listener, (address, int(port)), args.anchor))


if __name__ == "__main__":
    main()
