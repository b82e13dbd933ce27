"""For tests: an admission webhook that delays the bindings of Hodei, so that a test can act between a decision and its
binding."""

from __future__ import annotations

import base64
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from real.kubernetes.cluster import Cluster

_TIMEOUT_S = 20


class BindingGate:
    """Delays bindings in the namespace of the cluster until `open` is called. `waiting`: the pods of the delayed bindings."""

    def __init__(self, cluster: Cluster, pki: Path, user: str = "hodei") -> None:
        self.waiting: list[str] = []
        self._cluster, self._opened = cluster, threading.Event()
        gate = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                review = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                gate.waiting.append(review["request"]["name"])
                gate._opened.wait(_TIMEOUT_S)
                review["response"] = {"uid": review["request"]["uid"], "allowed": True}
                answer = json.dumps(review).encode()
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, format: str, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        tls.load_cert_chain(pki / "server.crt", pki / "server.key")
        self._server.socket = tls.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        authority = base64.b64encode((pki / "ca.crt").read_bytes()).decode()
        self._paths = cluster.apply([{
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingWebhookConfiguration",
            "metadata": {"name": f"gate-{cluster.namespace}"},
            "webhooks": [{
                "name": "gate.hodei.test", "admissionReviewVersions": ["v1"], "sideEffects": "None", "timeoutSeconds": 25,
                "clientConfig": {"url": f"https://127.0.0.1:{self._server.server_port}/", "caBundle": authority},
                "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": cluster.namespace}},
                "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods/binding"]}],
                "matchConditions": [{"name": "of-hodei", "expression": f"request.userInfo.username == '{user}'"}],
            }],
        }])  # fmt: skip

    def until_waiting(self, *names: str) -> None:
        self._cluster.wait(lambda: set(names) <= set(self.waiting), f"the bindings of {', '.join(names)} are delayed")

    def open(self) -> None:
        self._opened.set()

    def close(self) -> None:
        """Remove the webhook."""
        self.open()
        for path in self._paths:
            self._cluster.delete(path, missing_ok=True)
        self._server.shutdown()
        self._server.server_close()
