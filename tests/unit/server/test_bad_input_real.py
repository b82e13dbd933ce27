"""Bad input gets a clear Problem, quickly, and the server continues."""

from __future__ import annotations

import json

import pytest

pytestmark = pytest.mark.real
YAML = {"Content-Type": "application/yaml"}
JSON = {"Content-Type": "application/json"}

CASES = {
    "malformed yaml": (b"name: [a\n  b: }", YAML, 400),
    "malformed json": (b'{"name": ', JSON, 400),
    "not utf-8": (b'{"name": "\xff\xfe"}', JSON, 400),
    "empty": (b"", JSON, 400),
    "an unknown key": (b'{"name": "a", "command": ["x"], "cpuu": 1}', JSON, 422),
    "an unknown key in yaml": (b"name: a\ncommand: [x]\ncpuu: 1\n", YAML, 422),
    "NaN": (b'{"name": "a", "command": ["x"], "cpu": NaN}', JSON, 400),
    "nan in yaml": (b"name: a\ncommand: [x]\ncpu: .nan\n", YAML, 422),
    "a negative amount": (b'{"name": "a", "command": ["x"], "cpu": -1}', JSON, 422),
    "a name of 10 MB": (b'{"name": "' + b"x" * 10_000_000 + b'", "command": ["x"]}', JSON, 422),
    "a name of 10 MB in yaml": (b"name: " + b"x" * 10_000_000, YAML, 413),
    "100 deep": (b'{"name": ' + b"[" * 100 + b"]" * 100 + b"}", JSON, 400),
    "100 deep in yaml": (b"name: " + b"[" * 100 + b"]" * 100, YAML, (400, 422)),
    "a million deep": (b"[" * 1_000_000, JSON, 400),
    "a cycle of anchors": (b"a: &a [*a]\n", YAML, (400, 422)),
    "nested anchors that expand exponentially": (
        b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(b"%c: &%c [%b]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in b"bcdefghi"),
        YAML,
        (400, 422),
    ),
    "a python object": (b"!!python/object/apply:os.system ['true']", YAML, (400, 422)),
    "a number": (b"42", JSON, (400, 422)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_bad_input_is_answered_clearly_and_changes_nothing(served, service, case):
    body, headers, status = CASES[case]
    assert served.call("GET", "/livez").status == 200  # warm
    response = served.call("POST", "/api/v1/jobs", body=body, headers=headers)
    assert response.status in (status if isinstance(status, tuple) else (status,)), response.body[:300]
    assert response.code in ("MALFORMED", "INVALID", "TOO_LARGE", "UNKNOWN_FIELD")
    assert len(response.body) < 20_000, "the response repeats the input"
    assert not service.submitted
    assert served.call("GET", "/livez").status == 200


def test_bad_input_to_a_plan_is_refused_too(served, service):
    response = served.call("POST", "/api/v1/plan", body=b'{"name": "a", "command": ["x"], "cpuu": 1}')
    assert response.status == 422
    assert "cpu" in json.dumps(response.json)


def test_a_wrong_token_and_a_foreign_host_are_answered(served):
    for headers, status in (({"Authorization": "Bearer wrong"}, 401), ({"Host": "evil.example"}, 421)):
        assert served.call("GET", "/api/v1/jobs", headers=headers).status == status
