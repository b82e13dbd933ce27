"""A proxy that loses answers: it hands on what it is sent, waits until the other side has answered, and then breaks the
connection instead of handing that on. So the other side has done what it was asked for, and nobody hears of it."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self


class Cutter:
    """`to`: a path, or a port of the loopback. `cuts(request)`: whether the answer to this is lost; asked while `on`."""

    def __init__(self, to: str | int, cuts: Callable[[bytes], bool], path: Path | None = None) -> None:
        self._to, self._cuts = to, cuts
        self.on = False
        self.lost = 0
        self._listening = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listening.bind(str(path) if path else ("127.0.0.1", 0))
        self._listening.listen(64)
        self.address = f"unix:{path}" if path else self._listening.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            threading.Thread(target=self._between, args=(client,), daemon=True).start()

    def _between(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX if isinstance(self._to, str) else socket.AF_INET)
        heard = bytearray()
        try:
            server.connect(self._to if isinstance(self._to, str) else ("127.0.0.1", self._to))
            threading.Thread(target=self._forth, args=(client, server, heard), daemon=True).start()
            while data := server.recv(1 << 16):
                if self.on and self._cuts(bytes(heard)):
                    self.lost += 1
                    return
                heard.clear()
                client.sendall(data)
        except OSError:
            pass
        finally:
            for end in (client, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _forth(self, client: socket.socket, server: socket.socket, heard: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                heard += data
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
