"""``python pass_through.py HOST:PORT PORT``: hand bytes between a port and another one of this host, as they come.

Stands in for the proxy of a federation where nginx is not installed: TLS ends at the SuperLink, and nothing is refused.
"""

from __future__ import annotations

import asyncio
import sys
from contextlib import suppress


async def hand_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    """Copy bytes until the source ends, then end the target."""
    with suppress(OSError):
        while piece := await source.read(2**16):
            target.write(piece)
            await target.drain()
    target.close()


async def main(listen: str, port: int) -> None:
    async def join(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            back, forth = await asyncio.open_connection("127.0.0.1", port)
        except OSError:  # the SuperLink starts again; nodes retry
            target.close()
            return
        await asyncio.gather(hand_on(source, forth), hand_on(back, target))

    host, _, own = listen.rpartition(":")
    server = await asyncio.start_server(join, host, int(own))
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
