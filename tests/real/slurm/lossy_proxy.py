"""A proxy that loses responses: it forwards a request, waits for the response, and closes the connection without forwarding
it. The request was carried out, and its outcome is unknown to the client."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Self


class LossyProxy:
    """`to`: a socket path, or a port of the loopback. `loses(request)`: whether the response is lost; called while `on`."""

    def __init__(self, to: str | int, loses: Callable[[bytes], bool], path: Path | None = None) -> None:
        self._to, self._loses = to, loses
        self.on = False
        self.lost = 0
        self._listener = socket.socket(socket.AF_UNIX if path else socket.AF_INET)
        self._listener.bind(str(path) if path else ("127.0.0.1", 0))
        self._listener.listen(64)
        self.address = f"unix:{path}" if path else self._listener.getsockname()[1]

    def __enter__(self) -> Self:
        threading.Thread(target=self._serve, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(client,), daemon=True).start()

    def _connect(self, client: socket.socket) -> None:
        server = socket.socket(socket.AF_UNIX if isinstance(self._to, str) else socket.AF_INET)
        received = bytearray()
        try:
            server.connect(self._to if isinstance(self._to, str) else ("127.0.0.1", self._to))
            threading.Thread(target=self._forward, args=(client, server, received), daemon=True).start()
            while data := server.recv(1 << 16):
                if self.on and self._loses(bytes(received)):
                    self.lost += 1
                    return
                received.clear()
                client.sendall(data)
        except OSError:
            pass
        finally:
            for end in (client, server):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _forward(self, client: socket.socket, server: socket.socket, received: bytearray) -> None:
        with contextlib.suppress(OSError):
            while data := client.recv(1 << 16):
                received += data
                server.sendall(data)
            server.shutdown(socket.SHUT_WR)
