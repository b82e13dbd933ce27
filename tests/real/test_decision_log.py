"""Every decision of a real server can be decided again, to the letter."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hodei.runtime.decision_log import closed_segments
from real.house import House, Said

pytestmark = pytest.mark.real

CONFIG = """
[scheduling.retry]
base = "100ms"

[scheduling.profiles.default]
worker_selection = "round_robin"

[scheduling.profiles.turns]
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


def replay(log: Path) -> Said:
    done = subprocess.run(
        [sys.executable, "-m", "hodei.sim.replay", str(log)], capture_output=True, text=True, timeout=60, check=False
    )
    return Said(done.returncode, done.stdout, done.stderr)


def a_busy_life(house: House) -> None:
    """Something of everything, with questions in between: asking must not change what is decided."""
    ids = []
    for number in range(12):
        fields = {"cpu": "700m", "memory": "100Mi", "profile": "turns" if number % 3 else "default"}
        ids.append(house.submit("sh", "-c", f"sleep 0.{number % 4}", project="ab"[number % 2], **fields))
        with house.client() as client:
            client.why(ids[-1])
            client.plan([{"command": ["true"], "cpu": 1}, {"command": ["true"], "cpu": "2", "count": 2}])
    ids.append(house.submit("sh", "-c", "exit 1", retries=2))
    ids.append(house.submit("true", count=3, cpu=1))
    held = house.submit("true", cpu=3)
    house.hodei("hold", str(held))
    house.ok("node", "cordon", "a")
    ids.append(house.submit("true", scheduling_timeout="200ms", node_selector={"zone": "north"}))
    house.ok("node", "taint", "b", "x=y:NoSchedule")
    house.ok("node", "uncordon", "a")
    house.hodei("release", str(held))
    stopped = house.submit("sleep", "600", cpu="100m")
    house.until_state(stopped, "running")
    house.ok("cancel", str(stopped))
    house.ended(*ids, held, stopped)
    house.ok("requeue", str(ids[0]))
    house.ended(ids[0])


def test_the_log_of_a_busy_life_is_decided_again_the_same(house: House) -> None:
    house.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    a_busy_life(house)
    assert house.stop() == 0
    log = house.home / "decisions.jsonl"
    said = replay(log)
    assert (said.code, said.err) == (0, ""), said
    assert said.out.startswith("identical: ")
    print(said.out.strip(), log.stat().st_size, "bytes")
    assert house.ok("replay", str(log)).out == said.out


def test_the_log_of_a_server_with_a_past_is_decided_again_the_same(house: House) -> None:
    house.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    left = [house.submit("sh", "-c", "sleep 0.4; exit 3", cpu="500m", retries=1) for _ in range(8)]
    house.ok("node", "label", "c", "zone=east")
    house.kill()
    house.up("--decision-log", "decisions.jsonl")
    house.ended(*left, house.submit("true", node_selector={"zone": "east"}))
    assert house.stop() == 0
    assert replay(house.home / "decisions.jsonl").code == 0
    assert replay(house.home / "decisions.jsonl.1").code == 0  # of the one that was killed, as far as it got


def test_a_log_that_was_tampered_with_shows_the_first_difference(house: House) -> None:
    house.configure(CONFIG).up("--decision-log", "decisions.jsonl")
    house.ended(*(house.submit("true") for _ in range(4)))
    house.stop()
    log = house.home / "decisions.jsonl"
    lines = log.read_bytes().splitlines()
    numbers = [number for number, line in enumerate(lines) if json.loads(line).get("plan", {}).get("binds")]
    changed = json.loads(lines[numbers[1]])
    was = changed["plan"]["binds"][0]["node"]
    changed["plan"]["binds"][0]["node"] = "elsewhere"
    lines[numbers[1]] = json.dumps(changed, separators=(",", ":")).encode()
    log.write_bytes(b"\n".join(lines) + b"\n")
    said = replay(log)
    assert said.code == 1
    assert f"line {numbers[1] + 1}" in said.out
    assert "elsewhere" in said.out
    assert was in said.out
    log.write_text("not a log\n")
    assert replay(log).code == 2


def test_the_log_is_on_by_default_and_bounded_and_all_that_is_kept_is_decided_again(house: House) -> None:
    house.configure(CONFIG + '\n[server]\ndecision_log_size = "1Mi"\n').up("--instant")
    log, note = house.home / "decisions.jsonl", {"note": "n" * 1000}
    with house.client() as client:
        for _ in range(30):
            ask = {"command": ["true"], "cpu": "100m", "memory": "1Mi", "annotations": note}
            client.wait(client.submit_all([ask] * 50)[-1], 30)
    assert house.stop() == 0
    kept = closed_segments(log)
    assert kept[0].number > 1, "the oldest have gone"
    size = sum(each.stat().st_size for each in house.home.glob("decisions.jsonl*"))
    assert size < (1 << 20) + 400_000, size
    said = house.ok("replay")
    assert said.out.startswith("identical: "), said
    assert said.err == "", "no file is left out"
    print(said.out.strip(), size, "bytes")
    listed = house.ok("replay", "--list", str(log)).lines
    assert len(listed) == len(kept) + 1
    # A server that starts again goes on with the numbers, and what the former one left stays readable.
    house.up("--instant", "--decision-log", "")
    house.stop()
    assert replay(kept[-1].path).code == 0
