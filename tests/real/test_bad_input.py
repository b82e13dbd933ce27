"""Bad input at the real server and command line: a clear error at once, and the server continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from real.installation import Installation, Response

pytestmark = pytest.mark.real

JSON, YAML = "application/json", "application/yaml"


def job(**fields: Any) -> bytes:
    return json.dumps({"command": ["true"], **fields}).encode()


def laughs(levels: int) -> bytes:
    """Each anchor has ten aliases of the previous one, so that the small file expands to 10 ** `levels` elements."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, levels)]
    return "\n".join(lines).encode()


# name: (content type, body, status, code, a word that must be in the response)
BAD: dict[str, tuple[str, bytes, int, str, str]] = {
    "malformed YAML": (YAML, b"command: [unclosed\nname: x", 400, "MALFORMED", "line"),
    "malformed JSON": (JSON, b'{"command": [', 400, "MALFORMED", ""),
    "a tab in YAML": (YAML, b"command:\n\t- x", 400, "MALFORMED", "line"),
    "a YAML tag": (YAML, b"!!python/object/apply:os.system ['true']", 400, "MALFORMED", ""),
    "not text": (YAML, b"\xff\xfe\x00\x01", 400, "MALFORMED", ""),
    "nothing": (JSON, b"", 400, "MALFORMED", ""),
    "null": (JSON, b"null", 422, "INVALID", ""),
    "an empty list": (JSON, b"[]", 422, "INVALID", ""),
    "a number": (JSON, b"42", 422, "INVALID", ""),
    "an unknown key": (JSON, job(memroy="1Gi"), 422, "INVALID", "memory"),
    "no command": (JSON, b'{"name": "x"}', 422, "INVALID", "command"),
    "a negative cpu": (JSON, job(cpu="-1"), 422, "INVALID", "negative"),
    "a negative memory": (JSON, job(memory="-1Gi"), 422, "INVALID", "negative"),
    "a huge memory": (JSON, job(memory="1e30"), 422, "INVALID", "larger than any machine"),
    "a huge exponent": (JSON, job(memory="1e999999999"), 422, "INVALID", ""),
    "an invalid quantity": (JSON, job(memory="8GB"), 422, "INVALID", "leave out the B"),
    "NaN as text": (JSON, job(cpu="NaN"), 422, "INVALID", ""),
    "NaN in JSON": (JSON, b'{"command": ["true"], "cpu": NaN}', 400, "MALFORMED", ""),
    "NaN in YAML": (YAML, b"command: [x]\ncpu: .nan", 422, "INVALID", ""),
    "infinity in YAML": (YAML, b"command: [x]\ncpu: .inf", 422, "INVALID", ""),
    "a count of zero": (JSON, job(count=0), 422, "INVALID", "count"),
    "a huge count": (JSON, job(count=10**12), 422, "INVALID", "count"),
    "a negative timeout": (JSON, job(timeout="-5s"), 422, "INVALID", "timeout"),
    "too many retries": (JSON, job(retries=10**9), 422, "INVALID", "retries"),
    "a huge priority": (JSON, job(priority=10**30), 422, "INVALID", "priority"),
    "a name of 10 MB": (JSON, job(name="x" * 10_000_000), 422, "INVALID", "name"),
    "a name of 10 MB in YAML": (YAML, b"command: [x]\nname: " + b"x" * 10_000_000, 413, "TOO_LARGE", ""),
    "a key of 10 MB": (JSON, job(**{"x" * 10_000_000: 1}), 422, "INVALID", ""),
    "100 deep in JSON": (JSON, b"[" * 100 + b"]" * 100, 400, "MALFORMED", "nested"),
    "100,000 deep in JSON": (JSON, b"[" * 100_000 + b"]" * 100_000, 400, "MALFORMED", "nested"),
    "100 deep in YAML": (YAML, b"[" * 100 + b"]" * 100, 400, "MALFORMED", ""),
    "a cycle of anchors": (YAML, b"command: [x]\nenv: &a {b: *a}", 400, "MALFORMED", ""),
    "a billion laughs": (YAML, laughs(9), 400, "MALFORMED", ""),
    "a NUL in the command": (JSON, job(command=["a\0b"]), 422, "INVALID", "command"),
    "a variable with = in its name": (JSON, job(env={"A=B": "1"}), 422, "INVALID", "env"),
    "an unknown profile": (JSON, job(profile="nope"), 422, "UNKNOWN_PROFILE", "default"),
    "larger than every node": (JSON, job(cpu="10000"), 422, "LARGER_THAN_CLUSTER", "largest node"),
    "a gang larger than all nodes": (JSON, job(cpu="1", count=1000), 422, "LARGER_THAN_CLUSTER", "members"),
    "neither JSON nor YAML": ("text/html", b"<p>", 415, "UNKNOWN_MEDIA_TYPE", ""),
}  # fmt: skip


def assert_clear(response: Response, status: int, code: str, word: str = "") -> None:
    problem = response.json
    assert (response.status, problem["code"]) == (status, code), problem
    assert problem["message"]
    assert word in json.dumps(problem)
    assert len(response.body) < 10_000
    assert "Traceback" not in problem["message"]


def test_every_bad_document_is_refused_with_a_clear_error(installation: Installation) -> None:
    installation.up()
    took: dict[str, float] = {}
    without_hint = []
    for what, (kind, body, status, code, word) in BAD.items():
        response = installation.request("POST", "/api/v1/jobs", body, headers={"Content-Type": kind})
        try:
            assert_clear(response, status, code, word)
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error
        if not response.json["hint"] and not response.json.get("problems"):
            without_hint.append((what, response.json["message"]))
        took[what] = response.seconds
    slowest = sorted(took.items(), key=lambda pair: -pair[1])[:5]
    print("slowest:", ", ".join(f"{what} {seconds * 1000:.0f} ms" for what, seconds in slowest))
    assert without_hint == []
    assert installation.ok("jobs", "-a", "-o", "name").out == ""
    installation.works()


def test_a_request_to_a_wrong_path_is_refused_with_a_clear_error(installation: Installation) -> None:
    installation.up()
    port = installation.address.rsplit(":", 1)[1]
    assert_clear(installation.request("GET", "/api/v1/jobs", token="hod_wrong"), 401, "UNAUTHORIZED")
    assert_clear(installation.request("GET", "/api/v1/jobs", headers={"Host": "evil.example"}), 421, "MISDIRECTED")
    assert_clear(
        installation.request("GET", "/api/v1/jobs", headers={"Host": f"evil.example:{port}"}), 421, "MISDIRECTED"
    )
    assert_clear(
        installation.request("POST", "/api/v1/jobs", job(), headers={"Origin": "https://evil.example"}),
        403,
        "CROSS_SITE",
    )
    assert_clear(installation.request("GET", "/api/v1/job"), 404, "NO_SUCH_PATH", "/api/v1/jobs")
    assert_clear(installation.request("DELETE", "/api/v1/jobs"), 405, "METHOD_NOT_ALLOWED", "GET")
    assert_clear(installation.request("GET", "/api/v1/jobs?stat=failed"), 422, "INVALID", "state")
    assert_clear(installation.request("GET", "/api/v1/jobs?limit=-1"), 422, "INVALID", "limit")
    assert_clear(installation.request("GET", "/api/v1/jobs/99"), 404, "NOT_FOUND")
    assert_clear(installation.request("GET", f"/api/v1/jobs/{10**30}"), 422, "INVALID")
    assert_clear(installation.request("GET", "/api/v1/jobs/..%2F..%2Fetc"), 404, "NO_SUCH_PATH")
    assert_clear(installation.request("GET", "/api/v1/nodes/%00"), 422, "INVALID")
    assert_clear(installation.request("GET", "/api/v1/nodes/nowhere"), 404, "NOT_FOUND")
    installation.works()


def test_a_directory_instead_of_a_log_is_a_clear_error(installation: Installation) -> None:
    installation.up()
    id = installation.submit("sh", "-c", "echo hello; exit 0")
    (detail,) = installation.ended(id)
    (log,) = installation.agent_home.glob(f"runs/*/{detail.runs[0].id}/stdout")
    log.unlink()
    log.mkdir()
    response = installation.request("GET", f"/api/v1/jobs/{id}/logs")
    assert response.status in (404, 503)
    assert response.json["message"]
    result = installation.hodei("logs", str(id))
    assert result.code in (1, 3)
    assert result.err.startswith("error: ")
    installation.works()


def test_the_reason_names_a_missing_directory_and_the_exit_code_an_invalid_program(
    installation: Installation, tmp_path: Path
) -> None:
    installation.up()
    (detail,) = installation.ended(installation.submit("true", workdir="/no/such/place"))
    assert detail.job.state == "failed"
    assert "/no/such/place" in detail.job.reason
    file = tmp_path / "file"
    file.write_text("not a program")
    assert installation.ended(installation.submit(str(file)))[0].job.exit_code == 126
    assert installation.ended(installation.submit(str(tmp_path)))[0].job.exit_code == 126
    installation.works()


# name: (text of the file, exit code, a word that must be on stderr)
BAD_FILES: dict[str, tuple[bytes, int, str]] = {
    "malformed YAML": (b"command: [unclosed\nname: x", 1, "job.yaml:2:"),
    "unknown keys": (b"command: [x]\nmemroy: 1Gi\ncpuu: 1", 1, "memory"),
    "negative and huge": (b"command: [x]\ncpu: -1\nmemory: 1e30", 1, "negative"),
    "NaN": (b"command: [x]\ncpu: .nan", 1, "cpu"),
    "a name of 10 MB": (b"command: [x]\nname: " + b"x" * 10_000_000, 1, "name"),
    "100 deep": (b"command: [x]\nlabels: " + b"[" * 100 + b"]" * 100, 1, "levels"),
    "a cycle of anchors": (b"command: [x]\nenv: &a {b: *a}", 1, ""),
    "a billion laughs": (laughs(9), 1, ""),
    "larger than every node": (b"command: [x]\ncpu: 10000", 1, "largest node"),
    "binary": (b"\x7fELF\0\0\0", 2, "text"),
    "empty": (b"", 2, "no job"),
}


def test_every_bad_file_is_refused_by_the_command_line_with_a_clear_error(
    installation: Installation, tmp_path: Path
) -> None:
    installation.up()
    for what, (text, code, word) in BAD_FILES.items():
        file = tmp_path / "job.yaml"
        file.write_bytes(text)
        for command in ("submit", "plan"):
            result = installation.hodei(command, str(file))
            impossible = command == "plan" and what == "larger than every node"
            assert result.code == (5 if impossible else code), (what, command, result)
            assert result.out == ""
            assert result.err.startswith("error: "), what
            assert word in result.err, (what, result.err)
            assert "next: " in result.err, (what, result.err)
            assert result.err.rstrip().endswith("]"), what
            assert len(result.err) < 5000, what
            assert "Traceback" not in result.err
    assert installation.hodei("submit", str(tmp_path)).code == 2  # a directory
    assert "is a directory" in installation.hodei("submit", str(tmp_path)).err
    assert installation.hodei("submit", str(tmp_path / "nowhere.yaml")).code == 2
    assert installation.hodei("jobs", env={"HODEI_TOKEN": "wrong"}).code == 4
    assert installation.hodei("jobs", env={"HODEI_SERVER": "http://127.0.0.1:9"}).code == 7
    assert installation.hodei("jobs", "--frobnicate").code == 2
    assert installation.ok("jobs", "-a", "-o", "name").out == ""
    installation.works()


def test_one_bad_job_in_a_bulk_submission_refuses_all_jobs(installation: Installation) -> None:
    installation.up()
    jobs = [{"command": ["true"], "name": f"n{n}"} for n in range(50)] + [{"command": ["true"], "cpu": "-1"}]
    response = installation.request("POST", "/api/v1/jobs", json.dumps(jobs).encode(), headers={"Content-Type": JSON})
    assert_clear(response, 422, "INVALID", "negative")
    assert installation.ok("jobs", "-a", "-o", "name").out == ""
