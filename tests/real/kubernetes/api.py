"""For tests: a small JSON client of a Kubernetes API. It knows nothing of Hodei, so it can bear witness against it."""

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
    """The API said no; or could not be reached at all: status 0."""

    def __init__(self, status: int, said: str) -> None:
        super().__init__(f"{status}: {said}")
        self.status = status


def wait(predicate: Callable[[], T | None], what: str, timeout: float = DEADLINE_S) -> T:
    """What `predicate` says once that is no longer nothing; an API that is away meanwhile counts as nothing yet."""
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
    """Each thread has a connection of its own, kept open."""

    def __init__(self, server: str, tls: ssl.SSLContext, token: str = "") -> None:
        self.server = server
        self._tls = tls
        self._headers = {"Authorization": f"Bearer {token}"} if token else {}
        self._mine = threading.local()
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
        """`grace` in seconds; None leaves it to the object."""
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
        """Server-side apply of YAML documents or objects; their paths."""
        documents = list(yaml.safe_load_all(textwrap.dedent(objects))) if isinstance(objects, str) else objects
        paths = []
        for document in documents:
            if document:
                path = self.path_of(document, namespace)
                self.patch(path, document, "apply", fieldManager="test", force="true")
                paths.append(path)
        return paths

    def is_gone(self, path: str) -> bool:
        try:
            self.get(path)
        except ApiFailed as failed:
            if failed.status != 404:
                raise
            return True
        return False

    def forget_kinds(self) -> None:
        """Which kinds there are is asked anew."""
        self._resources.clear()

    def path_of(self, document: dict[str, Any], namespace: str = "default") -> str:
        """Where the object is or will be; `namespace` if it names none and its kind has one."""
        version, kind, about = document["apiVersion"], document["kind"], document["metadata"]
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

        resource = wait(served, f"{version} {kind} is served", 10)  # a kind that was just defined takes a moment
        where = f"/namespaces/{about.get('namespace') or namespace}" if resource["namespaced"] else ""
        return f"{root}{where}/{resource['name']}/{about['name']}"

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: dict[str, Any] | None = None,
        content_type: str = "application/json",
    ) -> Any:
        """JSON as values, all else as text."""
        target = f"{path}?{urlencode(params)}" if params else path
        data = None if body is None else json.dumps(body).encode()
        headers = {**self._headers, "Content-Type": content_type, "Accept": "application/json"}
        status, answered = self._send(method, target, data, headers)
        if status >= 400:
            raise ApiFailed(status, answered.decode(errors="replace"))
        try:
            return json.loads(answered)
        except ValueError:
            return answered.decode(errors="replace")

    def _send(self, method: str, target: str, data: bytes | None, headers: dict[str, str]) -> tuple[int, bytes]:
        connection: http.client.HTTPSConnection | None = getattr(self._mine, "connection", None)
        kept = connection is not None
        if connection is None:
            at = urlsplit(self.server)
            connection = http.client.HTTPSConnection(at.hostname or "", at.port, timeout=DEADLINE_S, context=self._tls)
            self._mine.connection = connection
        try:
            connection.request(method, target, data, headers)
            answer = connection.getresponse()
            return answer.status, answer.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            del self._mine.connection
            # A kept connection may have been closed since, as by a restart. A read may be asked again without harm.
            if kept and (
                method == "GET" or isinstance(error, http.client.RemoteDisconnected | BrokenPipeError | ssl.SSLEOFError)
            ):
                return self._send(method, target, data, headers)
            raise ApiFailed(0, f"{method} {self.server}{target}: {error!r}") from error
