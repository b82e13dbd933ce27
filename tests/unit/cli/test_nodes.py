from __future__ import annotations

import pytest

from hodei.cli.errors import UsageProblem
from hodei.cli.nodes import parse_taint
from unit.cli.stub import node

PATH = "/api/v1/nodes/laptop"


@pytest.fixture
def patched(hodei, stub):
    """Run a command on node `laptop`; the patch that was sent, without defaults."""
    stub.on("GET", PATH, node(labels={"old": "1"}))
    stub.on("PATCH", PATH, node())

    def call(*args: str) -> dict[str, object]:
        result = hodei("node", *args)
        assert result.exit_code == 0, result.stderr
        return {key: value for key, value in stub.requests[-1].json().items() if value not in (None, {}, [], False)}

    return call


def test_node_commands_send_patches(patched):
    assert patched("cordon", "laptop") == {"cordon": True}
    assert patched("drain", "laptop") == {"cordon": True, "drain": True}
    assert patched("label", "laptop", "zone=b", "old-") == {"labels": {"zone": "b", "old": None}}
    taint = {"key": "gpu", "value": "a", "effect": "NoSchedule"}
    assert patched("taint", "laptop", "gpu=a:NoSchedule") == {"add_taints": [taint]}


def test_uncordon_sends_false(hodei, stub):
    stub.on("PATCH", PATH, node())
    assert hodei("node", "uncordon", "laptop").stdout == "node laptop uncordoned\n"
    assert stub.requests[-1].json()["cordon"] is False


@pytest.mark.parametrize("text", ["disk:NoSchedule-", "disk-", "disk=slow:NoSchedule-"])
def test_a_minus_removes_an_existing_taint(patched, text: str):
    existing = {"key": "disk", "value": "slow", "effect": "NoSchedule"}
    assert patched("taint", "laptop", text) == {"remove_taints": [existing]}


def test_removing_a_missing_taint_is_not_found(hodei, stub):
    stub.on("GET", PATH, node())
    assert hodei("node", "taint", "laptop", "absent-").exit_code == 3


def test_removing_a_missing_label_is_not_found(hodei, stub):
    stub.on("GET", PATH, node(labels={"old": "1"}))
    stub.on("PATCH", PATH, node())
    refused = hodei("node", "label", "laptop", "nope-")
    assert (refused.exit_code, refused.stderr.splitlines()[0]) == (3, "error: node laptop has no label nope")
    assert stub.sent("PATCH", PATH) == []
    assert hodei("node", "label", "laptop", "old-").stdout == "node laptop unlabeled\n"


@pytest.mark.parametrize(
    ("runs", "output"), [(0, "drained"), (1, "draining: 1 run left"), (2, "draining: 2 runs left")]
)
def test_a_drain_counts_the_remaining_runs(hodei, stub, runs: int, output: str):
    stub.on("PATCH", PATH, node(runs=runs))
    assert hodei("node", "drain", "laptop").stdout == f"node laptop {output}\n"


@pytest.mark.parametrize("text", ["", "key", "key=value", "key:Sometimes", ":NoSchedule", "a b:NoSchedule"])
def test_invalid_taints_are_usage_errors(text: str):
    with pytest.raises(UsageProblem):
        parse_taint(text)


@pytest.mark.parametrize("text", ["", "zone", "=x", "-"])
def test_invalid_labels_are_usage_errors(hodei, stub, text: str):
    assert hodei("node", "label", "laptop", text).exit_code == 2
