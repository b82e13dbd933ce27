"""Every decision of a real server can be replayed exactly."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hodei.runtime.decision_log import closed_segments
from real.installation import DEADLINE_S, CommandResult, Installation

pytestmark = pytest.mark.real

CONFIG = """
[scheduling.retry]
base = "100ms"

[scheduling.profiles.default]
worker_selection = "round_robin"

[scheduling.profiles.weighted]
queue = "fair"
weights = {b = 3}
worker_selection = "bin_packing"

[[nodes]]
name = "a"
cpu = "2"
memory = "2Gi"

[[nodes]]
name = "b"
cpu = "1"
memory = "1Gi"
labels = {zone = "west"}

[[nodes]]
name = "c"
cpu = "3"
memory = "1Gi"
"""


def replay(log: Path) -> CommandResult:
    done = subprocess.run(
        [sys.executable, "-m", "hodei.sim.replay", str(log)], capture_output=True, text=True, timeout=60, check=False
    )
    return CommandResult(done.returncode, done.stdout, done.stderr)


def use_every_feature(installation: Installation) -> None:
    """Jobs, retries, gangs, holds, cordons, taints, cancels and requeues, with queries in between: `why` and `plan` must
    not change decisions."""
    ids = []
    for number in range(12):
        fields = {"cpu": "700m", "memory": "100Mi", "profile": "weighted" if number % 3 else "default"}
        ids.append(installation.submit("sh", "-c", f"sleep 0.{number % 4}", project="ab"[number % 2], **fields))
        with installation.client() as client:
            client.why(ids[-1])
            client.plan([{"command": ["true"], "cpu": 1}, {"command": ["true"], "cpu": "2", "count": 2}])
    ids.append(installation.submit("sh", "-c", "exit 1", retries=2))
    ids.append(installation.submit("true", count=3, cpu=1))
    held = installation.submit("true", cpu=3)
    installation.hodei("hold", str(held))
    installation.ok("node", "cordon", "a")
    ids.append(installation.submit("true", scheduling_timeout="200ms", node_selector={"zone": "north"}))
    installation.ok("node", "taint", "b", "x=y:NoSchedule")
    installation.ok("node", "uncordon", "a")
    installation.hodei("release", str(held))
    stopped = installation.submit("sleep", "600", cpu="100m")
    installation.until_state(stopped, "running")
    installation.ok("cancel", str(stopped))
    installation.ended(*ids, held, stopped)
    installation.ok("requeue", str(ids[0]))
    installation.ended(ids[0])


def test_the_decision_log_of_a_busy_server_replays_identically(installation: Installation) -> None:
    installation.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    use_every_feature(installation)
    assert installation.stop() == 0
    log = installation.home / "decisions.jsonl"
    result = replay(log)
    assert (result.code, result.err) == (0, ""), result
    assert result.out.startswith("identical: ")
    print(result.out.strip(), log.stat().st_size, "bytes")
    assert installation.ok("replay", str(log)).out == result.out


def test_the_decision_log_of_a_restarted_server_replays_identically(installation: Installation) -> None:
    installation.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    unfinished = [installation.submit("sh", "-c", "sleep 0.4; exit 3", cpu="500m", retries=1) for _ in range(8)]
    installation.ok("node", "label", "c", "zone=east")
    installation.kill()
    installation.up("--decision-log", "decisions.jsonl")
    installation.ended(*unfinished, installation.submit("true", node_selector={"zone": "east"}))
    assert installation.stop() == 0
    assert replay(installation.home / "decisions.jsonl").code == 0
    assert replay(installation.home / "decisions.jsonl.1").code == 0  # of the killed server, up to the kill


def test_the_replay_of_a_changed_log_shows_the_first_difference(installation: Installation) -> None:
    installation.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    installation.ended(*(installation.submit("true") for _ in range(4)))
    installation.stop()
    log = installation.home / "decisions.jsonl"
    lines = log.read_bytes().splitlines()
    numbers = [number for number, line in enumerate(lines) if json.loads(line).get("plan", {}).get("binds")]
    changed = json.loads(lines[numbers[1]])
    was = changed["plan"]["binds"][0]["node"]
    changed["plan"]["binds"][0]["node"] = "elsewhere"
    lines[numbers[1]] = json.dumps(changed, separators=(",", ":")).encode()
    log.write_bytes(b"\n".join(lines) + b"\n")
    result = replay(log)
    assert result.code == 1
    assert f"line {numbers[1] + 1}" in result.out
    assert "elsewhere" in result.out
    assert was in result.out
    log.write_text("not a log\n")
    assert replay(log).code == 2


def test_the_decision_log_is_on_by_default_bounded_and_replays(installation: Installation) -> None:
    installation.configure(CONFIG + '\n[server]\ndecision_log_size = "1Mi"\n').up("--instant")
    log, note = installation.home / "decisions.jsonl", {"note": "n" * 1000}
    with installation.client() as client:
        for _ in range(30):
            job = {"command": ["true"], "cpu": "100m", "memory": "1Mi", "annotations": note}
            client.wait(client.submit_all([job] * 50)[-1], DEADLINE_S)
    assert installation.stop() == 0
    kept = closed_segments(log)
    assert kept[0].number > 1, "the oldest segments are deleted"
    size = sum(each.stat().st_size for each in installation.home.glob("decisions.jsonl*"))
    assert size < (1 << 20) + 400_000, size
    result = installation.ok("replay")
    assert result.out.startswith("identical: "), result
    assert result.err == "", "no segment is skipped"
    print(result.out.strip(), size, "bytes")
    listed = installation.ok("replay", "--list", str(log), "-o", "json").json
    assert len(listed) == len(kept) + 1
    # A restarted server continues the numbers, and the earlier segments stay readable.
    installation.up("--instant", "--decision-log", "")
    installation.stop()
    assert replay(kept[-1].path).code == 0
