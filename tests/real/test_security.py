"""Secure defaults: no access without a token, files only for their owner, no unencrypted traffic beyond loopback."""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from hodei.server.auth import add_token
from real.installation import DEADLINE_S, Installation, until

pytestmark = pytest.mark.real


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_files_are_readable_only_by_their_owner(installation: Installation) -> None:
    installation.up("--decision-log", "decisions.jsonl")
    installation.ended(installation.submit("sh", "-c", "echo a secret", env={"PASSWORD": "secret"}))
    assert mode(installation.home) == 0o700
    for name in ("token", "tokens", "server.json", "hodei.db", "hodei.db-wal", "lock", "decisions.jsonl"):
        assert mode(installation.home / name) == 0o600, name
    for path in installation.agent_home.rglob("*"):
        assert mode(path) & 0o077 == 0, path
    assert installation.token not in (installation.home / "tokens").read_text()


@pytest.mark.parametrize("config", [False, True], ids=["empty", "with a configuration"])
def test_a_home_that_others_can_read_is_made_private(installation: Installation, config: bool) -> None:
    installation.home.mkdir()
    installation.home.chmod(0o755)
    if config:
        installation.configure("")
    installation.up()
    assert mode(installation.home) == 0o700


def test_a_directory_with_other_files_keeps_its_mode(installation: Installation) -> None:
    installation.home.mkdir()
    (installation.home / "README").touch()
    installation.home.chmod(0o755)
    installation.up()
    installation.stop()
    installation.up()
    assert mode(installation.home) == 0o755
    assert mode(installation.home / "token") == 0o600


def test_a_home_that_is_a_file_is_refused(installation: Installation) -> None:
    installation.home.touch()
    installation.start()
    assert installation.server is not None
    assert installation.server.wait(DEADLINE_S) == 2
    assert "cannot be used as a home" in installation.server_output()


def test_a_token_file_that_others_can_read_is_refused(installation: Installation) -> None:
    installation.up()
    installation.stop()
    (installation.home / "tokens").chmod(0o644)
    installation.start()
    assert installation.server is not None
    assert installation.server.wait(DEADLINE_S) == 2
    assert "chmod 600" in installation.server_output()


def test_every_route_but_the_public_ones_needs_a_valid_token(installation: Installation) -> None:
    installation.up()
    id = installation.submit("true")
    paths = installation.request("GET", "/api/v1/openapi.json", token="").json["paths"]
    checked, public = 0, set()
    for path, operations in paths.items():
        filled = re.sub(r"{\w+}", str(id), path)
        for method, operation in operations.items():
            if operation["x-policy"] == "public":
                public.add(path)
                continue
            checked += 1
            for token in ("", "wrong", installation.token[:-1], installation.token + "x", installation.token.upper()):
                answer = installation.request(method.upper(), filled, token=token)
                assert (answer.status, answer.json["code"]) == (401, "UNAUTHORIZED"), (method, path, token)
                assert answer.headers["www-authenticate"].startswith("Bearer")
            basic = installation.request(
                method.upper(), filled, token="", headers={"Authorization": f"Basic {installation.token}"}
            )
            assert basic.status == 401
            in_url = installation.request(method.upper(), f"{filled}?token={installation.token}", token="")
            assert in_url.status == 401
    assert checked >= 15
    assert public == {"/", "/livez", "/readyz", "/api/v1/openapi.json", "/api/v1/schema/job"}


def test_a_removed_token_is_revoked(installation: Installation) -> None:
    installation.up()
    assert installation.request("GET", "/api/v1/jobs").status == 200
    (installation.home / "tokens").write_text("")
    until(lambda: installation.request("GET", "/api/v1/jobs").status == 401, "the token is refused")


def test_listening_beyond_loopback_without_tls_needs_insecure(installation: Installation) -> None:
    installation.start("--host", "0.0.0.0")
    assert installation.server is not None
    assert installation.server.wait(DEADLINE_S) == 2
    output = installation.server_output()
    assert "without TLS" in output
    assert "--insecure" in output
    assert not (installation.home / "hodei.db").exists()
    up = installation.hodei("up", "-d", "--host", "0.0.0.0", "--port", "0")
    assert up.code == 1
    assert "without TLS" in up.err


def test_a_second_server_in_a_home_is_refused(installation: Installation) -> None:
    installation.up()
    second = Installation(installation.home)
    second.log = installation.home.parent / "second.log"
    second.start()
    assert second.server is not None
    assert second.server.wait(DEADLINE_S) == 8
    assert "is already running in" in second.server_output()
    again = installation.hodei("up", "-d", "--port", "0")
    assert again.code == 0
    assert "already running" in again.err
    installation.works()


def test_a_port_in_use_is_reported(installation: Installation, tmp_path: Path) -> None:
    installation.up()
    port = int(installation.address.rsplit(":", 1)[1])
    other = Installation(tmp_path / "other")
    other.log = tmp_path / "other.log"
    try:
        other.start(port=port)
        assert other.server is not None
        assert other.server.wait(DEADLINE_S) == 8
        assert "choose another --port" in other.server_output()
    finally:
        other.close()


def test_jobs_do_not_see_the_token_or_the_servers_files(installation: Installation) -> None:
    installation.up()
    id = installation.submit("sh", "-c", "env; ls -l /proc/self/fd")
    installation.ended(id)
    output = installation.log_of(id)
    assert installation.token not in output
    assert "HODEI_HOME" not in output
    assert "hodei.db" not in output
    assert "status" not in output
    assert os.environ.get("HODEI_TOKEN", "hod_") not in output


CANARY = "c4n4ry-in-a-coal-mine"


def submit_with_canaries(installation: Installation, ana: str) -> list[int]:
    """Submit jobs of every kind for ana, with canaries in their variables, and jobs that are refused."""
    env = {"DATABASE_URL": f"postgres://ana:{CANARY}@db/x", "GITHUB_PAT": CANARY, "MODE": CANARY, "A_PASSWORD": CANARY}
    valid: dict[str, Any] = {"name": "plain", "command": ["true"], "cpu": "10m", "memory": "1Mi", "env": env}
    tasks = [{"name": name, "command": ["true"], "env": env} for name in "ab"]
    gang = {"apiVersion": "hodei/v1", "kind": "Job", "metadata": {"name": "gang"}, "spec": {"tasks": tasks}}
    waits = {**valid, "name": "waits", "node_selector": {"no": "such-node"}, "priority": "low"}
    ids = []
    for document in (
        valid, gang, waits, {**valid, "name": "array", "array": 3}, {**valid, "name": "fails", "command": ["false"]},
        {**valid, "name": "absent", "command": ["/no/such/program"]}, {**valid, "name": "nowhere", "workdir": "/no/such"},
    ):  # fmt: skip
        answer = installation.request("POST", "/api/v1/jobs", json.dumps(document).encode(), token=ana)
        assert answer.status == 201, answer.body
        ids += answer.json["ids"]
    cron = {"name": "nightly", "schedule": "0 0 1 1 *", "job": valid}
    assert installation.request("POST", "/api/v1/periodic", json.dumps(cron).encode(), token=ana).status == 201
    ids += installation.request("POST", "/api/v1/periodic/nightly/run", token=ana).json["ids"]
    for wrong in (
        {**valid, "priority": "critical"}, {**valid, "env": {"A=B": CANARY}}, {**valid, "env": {"A": f"{CANARY}\0"}},
        {**valid, "env": {"A": [CANARY]}}, {**valid, "cpu": 100_000}, {**valid, "profile": "none"}, {**valid, "env": CANARY},
    ):  # fmt: skip
        assert installation.request("POST", "/api/v1/jobs", json.dumps(wrong).encode(), token=ana).status in (
            400,
            403,
            422,
        )
    return ids


def read_by(installation: Installation, token: str, ids: list[int]) -> dict[str, bytes]:
    """Everything this token can read: every GET route for every job, `plan`, `whatif` and the event stream."""
    found = {}
    paths = installation.request("GET", "/api/v1/openapi.json", token="").json["paths"]
    names = {"/periodic/": ["nightly"], "/nodes/": [installation.client().nodes()[0].name], "/backends/": ["local"]}
    queries = {"/api/v1/jobs": ["", "?arrays=fold"], "/api/v1/jobs/{id}": ["", "?secrets=show"]}
    queries |= {f"/api/v1/{things}/{{id}}/wait": ["?timeout_s=0"] for things in ("jobs", "arrays")}
    for path in (path for path, operations in paths.items() if "get" in operations and not path.endswith("/stream")):
        values = next((values for part, values in names.items() if part in path), ["x"])
        for value in [str(id) for id in ids] if "{id}" in path else values:
            for query in queries.get(path, [""]):
                filled = re.sub(r"{\w+}", value, path) + query
                answer = installation.request("GET", filled, token=token)
                found[filled] = answer.body + repr(answer.headers).encode()
                assert answer.status in (200, 403, 404, 409), (filled, answer.body)
    job = {"name": "mine", "command": ["true"], "cpu": "10m", "memory": "1Mi"}
    for path, document in (("/plan", job), ("/whatif", {"jobs": [job]})):
        answer = installation.request("POST", f"/api/v1{path}", json.dumps(document).encode(), token=token)
        assert answer.status == 200, answer.body
        found[path] = answer.body
    with installation.client(token=token) as client:
        last = max(event.seq for event in client.events())
        for event in client.stream(0):
            found[f"stream {event.seq}"] = repr(event).encode()
            if event.seq >= last:
                break
    return found


def test_values_of_variables_are_read_by_their_owner_and_administrators_only(installation: Installation) -> None:
    installation.up("--decision-log", "decisions.jsonl")
    tokens = installation.home / "tokens"
    ana, bo, vera = (
        add_token(tokens, name, role) for name, role in (("ana", "user"), ("bo", "user"), ("vera", "viewer"))
    )
    until(lambda: installation.request("GET", "/api/v1/jobs", token=vera).status == 200, "the new tokens are known")
    ids = submit_with_canaries(installation, ana)
    for id in ids:
        if installation.state(id) != "pending":
            installation.ended(id)
    for token in (bo, vera):
        found = read_by(installation, token, ids)
        assert len(found) > 60
        assert {url for url, body in found.items() if CANARY.encode() in body} == set()
        assert any(b"GITHUB_PAT" in body for body in found.values())  # names of variables are not secret
        exported = installation.hodei("job", "export", str(ids[0]), "--scenario", env={"HODEI_TOKEN": token})
        assert exported.code == 0
        assert CANARY not in exported.out + exported.err
    for name in ("/api/v1/audit?limit=1000", "/metrics"):
        assert CANARY.encode() not in installation.request("GET", name).body
    installation.stop()
    assert CANARY not in installation.server_output()
    assert CANARY not in (installation.home / "decisions.jsonl").read_text()
    installation.up()
    for token in (ana, installation.token):
        shown = installation.request("GET", f"/api/v1/jobs/{ids[0]}", token=token).body.decode()
        assert shown.count(CANARY) == 3  # values that look secret need `secrets=show`
        with_secrets = installation.request("GET", f"/api/v1/jobs/{ids[0]}?secrets=show", token=token).body.decode()
        assert with_secrets.count(CANARY) == 4
        assert CANARY in installation.request("GET", "/api/v1/periodic/nightly", token=token).body.decode()


def test_a_caller_that_floods_the_server_does_not_lock_out_others(installation: Installation) -> None:
    """With the default limits: slow bodies with one token, idle connections from one address."""
    installation.up()
    tokens = installation.home / "tokens"
    ana, bo = (add_token(tokens, name, "user") for name in ("ana", "bo"))
    until(lambda: installation.request("GET", "/api/v1/jobs", token=bo).status == 200, "the new tokens are known")
    port = int(installation.address.rsplit(":", 1)[1])
    connections = []

    def connect(text: str) -> None:
        connection = socket.create_connection(("127.0.0.1", port), timeout=30, source_address=("127.0.0.2", 0))
        connection.sendall(text.encode())
        connections.append(connection)

    slow = (
        f"POST /api/v1/jobs HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {ana}\r\nContent-Length: 9\r\n\r\n{{"
    )
    try:
        for _ in range(300):
            connect(slow)
        for number in range(600):
            connect("" if number % 2 else "GET / HTTP/1.1\r\nHost: loc")
        until(
            lambda: installation.request("GET", "/api/v1/jobs", token=ana).status == 429,
            "the limit of ana's token is reached",
        )
        for _ in range(5):
            assert installation.request("GET", "/api/v1/jobs", token=bo).status == 200
        body = b'{"name": "x", "command": ["true"], "cpu": "10m", "memory": "1Mi"}'
        assert installation.request("POST", "/api/v1/jobs", body, token=bo).status == 201
        installation.works()
        refused = installation.request("GET", "/api/v1/jobs", token=ana)
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json["code"] == "TOO_MANY_REQUESTS"
    finally:
        for connection in connections:
            connection.close()
    until(
        lambda: installation.request("GET", "/api/v1/jobs", token=ana).status == 200,
        "requests with ana's token are served again",
    )


def test_64_clients_with_one_token_at_once_are_served(installation: Installation) -> None:
    installation.up()

    def submit(_: int) -> int:
        return installation.submit("true")

    with ThreadPoolExecutor(64) as pool:
        ids = list(pool.map(submit, range(128)))
    assert len(set(ids)) == 128
    installation.ended(*ids)


def test_a_rotated_token_ends_its_streams_and_wrong_tokens_are_audited(installation: Installation) -> None:
    installation.up()
    old = add_token(installation.home / "tokens", "ana", "viewer")
    until(lambda: installation.request("GET", "/api/v1/jobs", token=old).status == 200, "the token is known")
    connection = http.client.HTTPConnection(
        *installation.address.removeprefix("http://").split(":"), timeout=DEADLINE_S
    )
    connection.request("GET", "/api/v1/events/stream", headers={"Authorization": f"Bearer {old}"})
    stream = connection.getresponse()
    assert stream.status == 200
    add_token(installation.home / "tokens", "ana", "viewer")
    stream.read()  # until the server ends the stream, at most 5 s later on an idle machine
    connection.close()

    def refused() -> float:
        text = installation.request("GET", "/metrics").body.decode()
        found = re.search(r'^hodei_auth_failures_total{reason="unknown"} (.+)$', text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    before = refused()
    for _ in range(50):
        assert installation.request("GET", "/api/v1/jobs", token=old).status == 401
    assert refused() == before + 50

    def rows() -> list[Any]:
        found: list[Any] = installation.request("GET", "/api/v1/audit?what=login").json["entries"]
        return found

    until(rows, "the failed login is audited")
    assert len(rows()) <= 5
    assert rows()[0]["remote"] == "127.0.0.1"
    assert old not in json.dumps(rows())
    assert old not in installation.server_output()
