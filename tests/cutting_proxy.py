"""For tests: a TCP proxy on the loopback that cuts each connection after a short random time, or all of them at once."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from typing import Any

from ports import free_port


class CuttingProxy:
    """Forwards to `target` in a thread of its own. `cut_s`: the shortest and longest life of a connection; None cuts none.
    `down` refuses connections and cuts those that exist."""

    def __init__(self, target: int, cut_s: tuple[float, float] | None = None, seed: int = 0) -> None:
        self.port, self.cut_s, self.cuts = free_port(), cut_s, 0
        self._target, self._down = target, False
        self._random = random.Random(seed)
        self._writers: set[asyncio.StreamWriter] = set()
        self._loop = asyncio.new_event_loop()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=self._run, name="cutting proxy")
        self._thread.start()
        assert self._listening.wait(30)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(asyncio.start_server(self._serve, "127.0.0.1", self.port))
        self._listening.set()
        self._loop.run_forever()
        server.close()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.run_until_complete(server.wait_closed())
        self._loop.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._down:
            writer.transport.abort()
            return
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target)
        except OSError:
            self._writers.discard(writer)
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        pumps = [
            asyncio.ensure_future(self._pump(reader, there_writer)),
            asyncio.ensure_future(self._pump(there_reader, writer)),
        ]
        life_s = self._random.uniform(*self.cut_s) if self.cut_s else None
        try:
            await asyncio.wait(pumps, timeout=life_s, return_when=asyncio.FIRST_COMPLETED)
            self.cuts += not any(pump.done() for pump in pumps)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            for end in (writer, there_writer):
                self._writers.discard(end)
                end.transport.abort()

    @staticmethod
    async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()

    def set_down(self, down: bool) -> None:
        self._call(self._set_down, down)

    def _set_down(self, down: bool) -> None:
        self._down = down
        for writer in list(self._writers) if down else ():
            writer.transport.abort()

    def _call(self, function: Any, *args: Any) -> None:
        done = threading.Event()
        self._loop.call_soon_threadsafe(lambda: (function(*args), done.set()))
        assert done.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(30)
