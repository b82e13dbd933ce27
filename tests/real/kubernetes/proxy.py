"""For tests: a TCP proxy in front of the API server, whose connections can be cut and refused."""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class Proxy:
    """Carries bytes and looks at none of them. `refusing`: nobody new gets through."""

    def __init__(self, server: str) -> None:
        at = urlsplit(server)
        self._target = (at.hostname or "127.0.0.1", at.port or 443)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.server = f"https://127.0.0.1:{self._listener.getsockname()[1]}"
        self.refusing = False
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """All connections, in the middle of whatever they are at; how many there were."""
        with self._lock:
            mine, self._open = self._open, set()
        for one in mine:
            _close(one)
        return len(mine) // 2

    def close(self) -> None:
        self.refusing = True
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                here, _ = self._listener.accept()
            except OSError:
                return
            if self.refusing:
                here.close()
                continue
            try:
                there = socket.create_connection(self._target)
            except OSError:
                here.close()
                continue
            with self._lock:
                self._open |= {here, there}
            for source, sink in ((here, there), (there, here)):
                threading.Thread(target=self._carry, args=(source, sink), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                sink.sendall(data)
        with self._lock:
            self._open -= {source, sink}
        _close(source)
        _close(sink)


def _close(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
