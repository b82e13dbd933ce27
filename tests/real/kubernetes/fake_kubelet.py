"""For tests: two endpoints of a kubelet that the API server calls: logs at `/containerLogs/NAMESPACE/POD/CONTAINER`, and
commands at `/exec/NAMESPACE/POD/CONTAINER` by WebSocket (`v5.channel.k8s.io`).

It proves that a real API server accepts the requests for logs and commands, permissions included, and returns the answers. It
does not prove how a kubelet handles logs: it reads and rotates no files, and knows only `limitBytes`. Nor what a container
runtime does: commands are real processes of this machine, with its files and as its user. The test names the process that
stands for the pod's first one (`main`); it replaces each argument `1` of a command. For nodes before 1.36, API servers
translate the WebSocket to SPDY; this node declares that it needs no translation.
"""

from __future__ import annotations

import base64
import hashlib
import json
import ssl
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane

PROTOCOL = "v5.channel.k8s.io"
GUID = "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class FakeKubelet:
    """`logs`: the log of each pod by name; the container of a pod without one has not started. `main`: the first process of
    each pod. `executed`: all commands so far, with their pods."""

    def __init__(self, plane: Plane) -> None:
        self.logs: dict[str, bytes] = {}
        self.main: dict[str, int] = {}
        self.executed: list[tuple[str, list[str]]] = []
        kubelet = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                url = urlsplit(self.path)
                _, page, _, pod, *_ = url.path.split("/")
                query = parse_qs(url.query, keep_blank_values=True)
                if page == "exec":
                    kubelet._execute(self, pod, query)
                    return
                text = kubelet.logs.get(pod)
                if text is None:
                    self.send_error(400, "the container is waiting to start")
                    return
                limit = int(query.get("limitBytes", [str(len(text))])[0])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text[:limit])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self._server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(plane.folder / "pki" / "server.crt", plane.folder / "pki" / "server.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def serve(self, cluster: Cluster, node: str) -> None:
        """Act as the kubelet of `node`."""
        status = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_port}},
            "declaredFeatures": ["ExtendWebSocketsToKubelet"],
        }
        cluster.patch(f"/api/v1/nodes/{node}/status", {"status": status})

    def commands(self, pod: str) -> list[list[str]]:
        return [command for name, command in self.executed if name == pod]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _execute(self, page: BaseHTTPRequestHandler, pod: str, query: dict[str, list[str]]) -> None:
        command, key = query["command"], page.headers.get("Sec-WebSocket-Key", "")
        assert PROTOCOL in page.headers.get("Sec-WebSocket-Protocol", "")
        page.send_response_only(101)
        page.send_header("Upgrade", "websocket")
        page.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1((key + GUID).encode()).digest()).decode()
        page.send_header("Sec-WebSocket-Accept", accept)
        page.send_header("Sec-WebSocket-Protocol", PROTOCOL)
        page.end_headers()
        page.close_connection = True
        self.executed.append((pod, command))
        ran = self._run(pod, command, page)
        page.wfile.write(_frame(3, json.dumps(ran).encode()))
        page.wfile.write(b"\x88\x02\x03\xe8")

    def _run(self, pod: str, command: list[str], page: BaseHTTPRequestHandler) -> dict[str, Any]:
        """Run the command; returns the Status that a kubelet sends last."""
        if "1" in command:
            assert pod in self.main, "a signal would reach the first process of this machine"
            command = [str(self.main[pod]) if word == "1" else word for word in command]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
        except OSError as error:
            what = "executable file not found in $PATH" if isinstance(error, FileNotFoundError) else str(error)
            return {"status": "Failure", "reason": "InternalError", "message": f"error executing command: {what}"}
        lock = threading.Lock()

        def copy(channel: int, stream: Any) -> None:
            while part := stream.read1(65536):
                with lock:
                    page.wfile.write(_frame(channel, part))

        copies = [threading.Thread(target=copy, args=one) for one in ((1, process.stdout), (2, process.stderr))]
        for one in copies:
            one.start()
        for one in copies:
            one.join()
        code = process.wait()
        if code == 0:
            return {"metadata": {}, "status": "Success"}
        exit_code = str(code if code > 0 else 128 - code)
        return {
            "metadata": {},
            "status": "Failure",
            "message": f"command terminated with non-zero exit code: exit status {exit_code}",
            "reason": "NonZeroExitCode",
            "details": {"causes": [{"reason": "ExitCode", "message": exit_code}]},
        }


def _frame(channel: int, data: bytes) -> bytes:
    """An unfragmented binary message of a server."""
    size = len(data) + 1
    if size < 126:
        head = bytes((0x82, size))
    elif size < 65536:
        head = bytes((0x82, 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x82, 127)) + size.to_bytes(8, "big")
    return head + bytes((channel,)) + data
