"""For tests: a small JSON client of a Kubernetes API. It shares no code with Hodei, so that it can check Hodei independently."""

from __future__ import annotations

import http.client
import json
import ssl
import textwrap
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlencode, urlsplit

import yaml

T = TypeVar("T")
DEADLINE_S = 30.0
_POLL_S = 0.03
PATCHES = {
    "merge": "application/merge-patch+json",
    "strategic": "application/strategic-merge-patch+json",
    "json": "application/json-patch+json",
    "apply": "application/apply-patch+yaml",
}


class ApiFailed(Exception):
    """The API refused the request, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


def wait(predicate: Callable[[], T | None], what: str, timeout: float = DEADLINE_S) -> T:
    """The first truthy result of `predicate`. While the API cannot be reached, the predicate counts as false."""
    ends = time.monotonic() + timeout
    while True:
        try:
            if found := predicate():
                return found
        except ApiFailed as failed:
            if failed.status != 0:
                raise
        if time.monotonic() > ends:
            raise AssertionError(f"{what}: not within {timeout:g} s")
        time.sleep(_POLL_S)


class Api:
    """Each thread has its own connection, which is kept open."""

    def __init__(self, server: str, tls: ssl.SSLContext, token: str = "") -> None:
        self.server = server
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._local = threading.local()
        self._resources: dict[str, list[dict[str, Any]]] = {}

    def get(self, path: str, **params: Any) -> Any:
        return self.request("GET", path, params=params)

    def items(self, path: str, **params: Any) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.get(path, **params)["items"]
        return found

    def post(self, path: str, body: Any) -> Any:
        return self.request("POST", path, body)

    def put(self, path: str, body: Any) -> Any:
        return self.request("PUT", path, body)

    def patch(self, path: str, body: Any, kind: str = "merge", **params: Any) -> Any:
        """`kind` is one of merge, strategic, json, apply."""
        return self.request("PATCH", path, body, params=params, content_type=PATCHES[kind])

    def delete(self, path: str, grace: int | None = None, missing_ok: bool = False, **params: Any) -> Any:
        """`grace` in seconds; None takes the grace period of the object."""
        body = None if grace is None else {"gracePeriodSeconds": grace}
        try:
            return self.request("DELETE", path, body, params=params)
        except ApiFailed as failed:
            if failed.status != 404 or not missing_ok:
                raise
            return None

    def exists(self, path: str) -> bool:
        try:
            self.get(path)
        except ApiFailed as failed:
            if failed.status != 404:
                raise
            return False
        return True

    def apply(self, objects: str | list[dict[str, Any]], namespace: str = "default") -> list[str]:
        """Apply YAML documents or objects server-side; returns their paths."""
        documents = list(yaml.safe_load_all(textwrap.dedent(objects))) if isinstance(objects, str) else objects
        paths = []
        for document in documents:
            if document:
                path = self.path_of(document, namespace)
                self.patch(path, document, "apply", fieldManager="test", force="true")
                paths.append(path)
        return paths

    def forget_kinds(self) -> None:
        """Discover the served kinds again at the next use."""
        self._resources.clear()

    def path_of(self, document: dict[str, Any], namespace: str = "default") -> str:
        """The path of the object, which need not exist yet. `namespace` is for namespaced objects that name none."""
        version, kind, metadata = document["apiVersion"], document["kind"], document["metadata"]
        root = f"/apis/{version}" if "/" in version else f"/api/{version}"

        def served() -> dict[str, Any] | None:
            known = next((r for r in self._resources.get(root, []) if r["kind"] == kind and "/" not in r["name"]), None)
            if known is None:
                try:
                    self._resources[root] = self.get(root)["resources"]
                except ApiFailed as failed:
                    if failed.status != 404:
                        raise
            return known

        resource = wait(served, f"{version} {kind} is served", 10)  # a new kind is served a moment later
        where = f"/namespaces/{metadata.get('namespace') or namespace}" if resource["namespaced"] else ""
        return f"{root}{where}/{resource['name']}/{metadata['name']}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: dict[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """The decoded answer if it is JSON, else its text."""
        target = f"{path}?{urlencode(params)}" if params else path
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": content_type, "Accept": "application/json"}
        status, body_bytes = self._send(method, target, data, headers)
        if status >= 400:
            raise ApiFailed(status, body_bytes.decode(errors="replace"))
        try:
            return json.loads(body_bytes)
        except ValueError:
            return body_bytes.decode(errors="replace")

    def _send(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection: http.client.HTTPSConnection | None = getattr(self._local, "connection", None)
        reused = connection is not None
        if connection is None:
            url = urlsplit(self.server)
            connection = http.client.HTTPSConnection(
                url.hostname or "", url.port, timeout=DEADLINE_S, context=self._tls
            )
            self._local.connection = connection
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            del self._local.connection
            # The server may have closed a reused connection, for example by a restart. A read can be repeated safely.
            if reused and (
                method == "GET" or isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ssl.SSLEOFError)
            ):
                return self._send(method, target, data, headers)
            raise ApiFailed(0, f"{method} {self.server}{target}: {error!r}") from error
