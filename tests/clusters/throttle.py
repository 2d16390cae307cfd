"""A slow way to a store: TCP connections to a port of the loopback are passed on at so many bits a second, in all."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_BLOCK_BYTES = 16 << 10


@contextmanager
def throttled(target_port: int, bits_per_s: float) -> Iterator[int]:
    """Pass connections on to a port while the block runs; gives the port that is slow."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    gate = _Gate(bits_per_s / 8)

    async def serve() -> asyncio.Server:
        """Listen."""
        return await asyncio.start_server(lambda r, w: _pass_on(r, w, target_port, gate), "127.0.0.1", 0)

    server = asyncio.run_coroutine_threadsafe(serve(), loop).result(10)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        loop.call_soon_threadsafe(server.close)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)


class _Gate:
    """Lets bytes pass at a rate, for all connections together."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate, self._free_at = bytes_per_s, 0.0

    async def take(self, n_bytes: int) -> None:
        """Wait until so many bytes may have passed."""
        now = asyncio.get_running_loop().time()
        self._free_at = max(now, self._free_at) + n_bytes / self._rate
        await asyncio.sleep(self._free_at - now)


async def _pass_on(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int, gate: _Gate) -> None:
    there_reader, there_writer = await asyncio.open_connection("127.0.0.1", port)
    await asyncio.gather(_copy(reader, there_writer, gate), _copy(there_reader, writer, gate))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, gate: _Gate) -> None:
    try:
        while data := await reader.read(_BLOCK_BYTES):
            await gate.take(len(data))
            writer.write(data)
            await writer.drain()
    except ConnectionError:
        pass  # one side is gone: so is the other
    writer.close()
