"""For tests: the one page of a kubelet that the API server asks for logs, `/containerLogs/NAMESPACE/POD/CONTAINER`.

It proves that logs are asked for as a real API server wants it and come back through it. It does not prove what a kubelet
makes of a log: no files are read or rotated here, `limitBytes` is all that it knows.
"""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

from real.kubernetes.cluster import Cluster
from real.kubernetes.plane import Plane


class LogKubelet:
    """`said` holds the log of each pod by its name; one that is not in it has a container that has not begun."""

    def __init__(self, plane: Plane) -> None:
        self.said: dict[str, bytes] = {}
        said = self.said

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                at = urlsplit(self.path)
                pod = at.path.split("/")[3]
                text = said.get(pod)
                if text is None:
                    self.send_error(400, "the container is waiting to start")
                    return
                limit = int(parse_qs(at.query).get("limitBytes", [str(len(text))])[0])
                self.send_response(200)
                self.end_headers()
                self.wfile.write(text[:limit])

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(plane.folder / "pki" / "server.crt", plane.folder / "pki" / "server.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def serve(self, cluster: Cluster, node: str) -> None:
        """Be the kubelet that the API server asks about pods of `node`."""
        here = {
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._server.server_port}},
        }
        cluster.patch(f"/api/v1/nodes/{node}/status", {"status": here})

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)
