"""Placement on virtual nodes: selectors, taints, node overrides, queues, strategies, plugins, per-node jobs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from agent_host import alive
from real.installation import DEADLINE_S, Installation, pids_in, until
from real.virtual_nodes import THREE, cancel, filler, node_of, nodes, why

pytestmark = pytest.mark.real


def test_jobs_are_placed_by_selectors_affinity_and_tolerations(installation: Installation) -> None:
    installation.configure(THREE).up()
    assert [node["name"] for node in installation.ok("nodes", "-o", "json").json] == ["a", "b", "c"]
    assert node_of(installation, installation.submit(node_selector={"zone": "west"})) == "b"
    assert node_of(installation, installation.submit(affinity={"required": ["disk=ssd"]})) == "a"
    assert (
        node_of(installation, installation.submit(affinity={"preferred": [{"weight": 100, "match": "zone=west"}]}))
        == "b"
    )
    assert node_of(installation, installation.submit(cpu=3, tolerations=["gpu=reserved:NoSchedule"])) == "c"
    assert node_of(installation, installation.submit(gpu=1, gpu_type="t4", tolerations=["gpu"])) == "c"
    run = installation.hodei("run", "--node-selector", "zone=east", "--", "sh", "-c", "echo $HODEI_NODE")
    assert run.out == "a\n"


def test_why_distinguishes_pending_unsatisfiable_and_ended_jobs(installation: Installation) -> None:
    installation.configure(THREE).up()
    running = [filler(installation, cpu=2, node_selector={"zone": zone}) for zone in ("east", "west")]
    waiting = installation.submit(cpu=2)
    answer = why(installation, waiting)
    assert (answer["status"], answer["code"]) == ("waiting", "INSUFFICIENT_CPU")
    by_code = {blocker["code"]: blocker for blocker in answer["blockers"]}
    assert by_code["INSUFFICIENT_CPU"]["nodes"] == ["a", "b"]
    assert "c" in next(b for code, b in by_code.items() if "TAINT" in code)["nodes"]
    assert answer["queue"] == {"position": 1, "pending": 1}
    assert answer["nearest"]["node"] in ("a", "b", "c")
    assert "is waiting" in installation.ok("why", str(waiting)).out
    unsatisfiable = installation.submit(node_selector={"zone": "north"})
    answer = why(installation, unsatisfiable)
    assert (answer["status"], answer["nodes"]) == ("unsatisfiable", 3)
    assert answer["hint"]
    cancel(installation, running[1])
    assert node_of(installation, waiting) == "b"
    answer = why(installation, waiting)
    assert answer["status"] == "ended"
    decision = answer["placements"][0]["decision"]
    assert decision["chosen"]["node"] == "b"
    assert {term["plugin"] for term in decision["chosen"]["terms"]} >= {"resource", "load"}
    assert installation.hodei("why", "999").code == 3


def test_a_plan_changes_nothing(installation: Installation, tmp_path: Path) -> None:
    installation.configure(THREE).up()
    file = tmp_path / "job.yaml"
    file.write_text(f"command: touch {tmp_path}/ran\ncpu: 2\nnode_selector: {{zone: west}}\n")
    before = installation.ok("events", "-o", "json").json
    plan = installation.ok("plan", str(file), "-o", "json").json[0]
    assert plan["status"] == "placed"
    assert [placement["node"] for placement in plan["placements"]] == ["b"]
    assert "would start now on b" in installation.ok("plan", str(file)).out
    assert installation.hodei("plan", "--node-selector", "zone=nowhere", "--", "true").code == 5
    filler(installation, cpu=2, node_selector={"zone": "west"})
    assert installation.hodei("plan", "--detailed-exitcode", str(file)).code == 2
    assert installation.ok("jobs", "-a", "-o", "name").lines == ["1"]
    assert not (tmp_path / "ran").exists()
    after = installation.ok("events", "-o", "json").json
    assert [event for event in after if event["job"] not in (0, 1)] == []
    assert len(after) - len(before) == 3  # those of the filler: submitted, scheduled, started


def test_cordons_taints_and_labels_of_nodes_apply_and_survive_a_restart(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    installation.ok("node", "cordon", "a")
    assert {node_of(installation, installation.submit()) for _ in range(3)} == {"b"}
    installation.ok("node", "taint", "b", "night=yes:NoSchedule")
    pending = installation.submit()
    codes = {blocker["code"]: blocker["nodes"] for blocker in why(installation, pending)["blockers"]}
    assert sorted(codes.values()) == [["a"], ["b"]]
    assert node_of(installation, installation.submit(tolerations=["night=yes:NoSchedule"])) == "b"
    installation.kill()
    installation.up()
    shown = {node["name"]: node for node in installation.ok("nodes", "-o", "json").json}
    assert shown["a"]["state"] == "cordoned"
    assert shown["b"]["taints"][0]["key"] == "night"
    assert installation.state(pending) == "pending"
    installation.ok("node", "uncordon", "a")
    assert node_of(installation, pending) == "a"
    installation.ok("node", "taint", "b", "night-")
    installation.ok("node", "label", "b", "pool=fast", "kubernetes.io/os-")
    assert node_of(installation, installation.submit(node_selector={"pool": "fast"})) == "b"
    assert "kubernetes.io/os" not in installation.ok("node", "show", "b", "-o", "json").json["labels"]
    installation.ok("node", "label", "b", "pool-")
    without_node = installation.submit(node_selector={"pool": "fast"})
    assert why(installation, without_node)["status"] == "unsatisfiable"
    assert installation.hodei("node", "cordon", "nowhere").code == 3


def test_runs_of_a_drained_node_are_moved_to_another_node(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi", "b 1 1Gi")).up()
    id = installation.submit("sh", "-c", "test $HODEI_ATTEMPT = 2 || sleep 600", cpu=1)
    before = installation.until_state(id, "running").runs[0].node
    installation.ok("node", "drain", before)
    (detail,) = installation.ended(id)
    assert (detail.job.state, [run.state for run in detail.runs]) == ("succeeded", ["stopped", "succeeded"])
    assert detail.runs[1].node != before
    assert installation.ok("node", "show", before, "-o", "json").json["state"] in ("cordoned", "draining")


def test_a_job_fails_at_its_scheduling_timeout_with_the_reason(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    filler(installation, cpu=1)
    id = installation.submit(cpu=1, scheduling_timeout="300ms")
    (detail,) = installation.ended(id)
    assert (detail.job.state, detail.job.reason_code, detail.runs) == ("failed", "SCHEDULING_TIMEOUT", [])
    assert "Insufficient cpu" in detail.job.reason


def test_a_scheduling_timeout_continues_while_the_server_is_down(installation: Installation) -> None:
    installation.configure(nodes("a 1 1Gi")).up()
    running = filler(installation, cpu=1)
    id = installation.submit(cpu=1, scheduling_timeout="200ms")
    installation.kill()
    installation.up()
    assert installation.ended(id)[0].job.reason_code == "SCHEDULING_TIMEOUT"
    assert installation.state(running) == "running"


def test_a_fifo_queue_ignores_priorities_and_a_full_queue_refuses_jobs(
    installation: Installation, tmp_path: Path
) -> None:
    installation.configure('[scheduling.profiles.default]\nqueue = "fifo"\nmax_pending = 2\n' + nodes("a 1 1Gi")).up()
    running = filler(installation, cpu=1)
    ids = [
        installation.submit("sh", "-c", f"echo {priority} >>{tmp_path}/order", cpu=1, priority=priority)
        for priority in ("low", "critical")
    ]
    refused = installation.hodei("submit", "--", "true")
    assert refused.code == 1
    assert "[QUEUE_FULL]" in refused.err
    cancel(installation, running)
    installation.ended(*ids)
    assert (tmp_path / "order").read_text().split() == ["low", "critical"]


@pytest.mark.parametrize(
    ("strategy", "expected"),
    [
        # Two running jobs of one cpu, on: big (8 cpu, empty), half (4 cpu, 2 used), small (2 cpu, empty).
        ("least_loaded", ["big", "small"]),
        ("most_free", ["big", "big"]),
        ("bin_packing", ["half", "half"]),
        ("round_robin", ["big", "small"]),
        ("locality_aware", ["small", "small"]),
    ],
)
def test_a_strategy_chooses_the_node(installation: Installation, strategy: str, expected: list[str]) -> None:
    config = f'[scheduling.profiles.default]\nworker_selection = "{strategy}"\n'
    installation.configure(config + nodes("big 8 8Gi", "half 4 4Gi", 'small 2 2Gi region = "eu"; zone = "eu-1"')).up()
    filler(installation, cpu=2, memory="2Gi", node_selector={"kubernetes.io/hostname": "half"})
    near = {"near": {"region": "eu", "zone": "eu-1"}} if strategy == "locality_aware" else {}
    ids = [filler(installation, cpu=1, memory="1Gi", **near) for _ in range(2)]
    assert [installation.job(id).runs[0].node for id in ids] == expected
    terms = why(installation, ids[0])["placements"][0]["decision"]["chosen"]["terms"]
    assert max(terms, key=lambda term: term["weight"])["plugin"] == strategy


PLUGINS = '''
"""Plugins outside of Hodei."""
from hodei.engine.points import PerNode


class LastInTheAlphabet(PerNode):
    name = "last-in-the-alphabet"

    def points(self, member, node, used):
        return {"a": 0, "b": 50, "c": 100}[node.name]


class NotOnC(PerNode):
    name = "not-on-c"

    def refuse(self, member, node, used):
        return "c is kept free" if node.name == "c" else None


class Broken(PerNode):
    name = "broken"

    def refuse(self, member, node, used):
        if "poison" in member.job.labels:
            raise RuntimeError("this plugin is broken")
        return None


class BrokenScore(PerNode):
    name = "broken-score"

    def points(self, member, node, used):
        raise RuntimeError("this plugin is broken")
'''


def with_plugins(installation: Installation, tmp_path: Path, profile: str) -> Installation:
    (tmp_path / "team_plugins.py").write_text(PLUGINS)
    installation.configure(f"[scheduling.profiles.default]\n{profile}\n" + nodes("a 2 2Gi", "b 2 2Gi", "c 2 2Gi"))
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH", ""))))
    return installation.up(env={"PYTHONPATH": path})


def test_a_custom_strategy_is_named_by_its_path(installation: Installation, tmp_path: Path) -> None:
    with_plugins(installation, tmp_path, 'worker_selection = "team_plugins:LastInTheAlphabet"')
    assert node_of(installation, installation.submit()) == "c"


def test_a_custom_filter_refuses_with_its_own_text(installation: Installation, tmp_path: Path) -> None:
    with_plugins(
        installation, tmp_path, 'worker_selection = "team_plugins:LastInTheAlphabet"\nplugins = ["team_plugins:NotOnC"]'
    )
    assert node_of(installation, installation.submit()) == "b"
    refused = installation.submit(node_selector={"kubernetes.io/hostname": "c"})
    texts = {blocker["code"]: blocker["text"] for blocker in why(installation, refused)["blockers"]}
    assert texts["NOT_ON_C"] == "c is kept free"


def test_a_plugin_that_raises_affects_only_its_own_job(installation: Installation, tmp_path: Path) -> None:
    with_plugins(installation, tmp_path, 'plugins = ["team_plugins:Broken", "team_plugins:BrokenScore"]')
    poisoned = installation.submit(labels={"poison": "1"})
    assert node_of(installation, installation.submit()) in "abc"
    answer = why(installation, poisoned)
    assert answer["code"] in ("PLUGIN_FAILED", "BACKOFF")
    assert "this plugin is broken" in answer["summary"]
    events = installation.ok("events", "-o", "json").json
    assert {event["detail"]["plugin"] for event in events if event["kind"] == "plugin.failed"} == {
        "broken",
        "broken-score",
    }
    metrics = installation.request("GET", "/metrics").body.decode()
    assert 'hodei_plugin_errors_total{plugin="broken",point="filter"}' in metrics
    until(lambda: why(installation, poisoned)["attempts"] >= 2, "the job is tried again after its backoff")
    cancel(installation, poisoned)
    installation.works()


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ('[scheduling.profiles.default]\nworker_selection = "bin_paking"\n', "bin_packing"),
        ('[scheduling.profiles.default]\nplugins = ["no_such_module:Thing"]\n', "no_such_module"),
        ('[scheduling.profiles.default]\nqueue = "fairr"\n', "fair"),
        ("[scheduling]\nprofile = {}\n", "profiles"),
        ('[[nodes]]\nname = "a"\ncpu = "-1"\n', "negative"),
        ('[server]\nport = "many"\n', "port"),
        ("[[[\n", "config.toml"),
    ],
)
def test_a_wrong_configuration_is_reported_before_the_start(installation: Installation, config: str, word: str) -> None:
    installation.configure(config).start()
    assert installation.server is not None
    assert installation.server.wait(DEADLINE_S) == 2
    output = installation.server_output()
    assert word in output
    assert "error: " in output
    assert "next: " in output
    assert not (installation.home / "hodei.db").exists()


def test_why_of_the_command_line_is_the_answer_of_the_api(installation: Installation) -> None:
    installation.configure(THREE).up()
    id = installation.submit(node_selector={"zone": "north"})
    by_cli = why(installation, id)
    by_api = installation.request("GET", f"/api/v1/jobs/{id}/why").json
    for key in ("status", "code", "summary", "blockers", "hint"):
        assert by_api[key] == by_cli[key]


def test_a_per_node_job_runs_on_each_node_survives_a_restart_and_is_cancelled_as_one(
    installation: Installation,
) -> None:
    installation.configure(THREE).up()
    command = ("/bin/sh", "-c", "echo here $HODEI_NODE; exec sleep 300")
    id = installation.submit(*command, cpu="100m", memory="16Mi", per_node=True)

    def running() -> dict[str, int]:
        return {run.node: run.member for run in installation.client().job(id).runs if run.state == "running"}

    until(lambda: running().keys() == {"a", "b"}, "a run on a and on b")  # c has a taint
    installation.ok("node", "taint", "c", "gpu-")
    until(lambda: running().keys() == {"a", "b", "c"}, "a run on c, which has no taint now")
    before = running()
    installation.kill()
    installation.up()
    until(lambda: running() == before, "the same runs after a restart")
    assert installation.ok("logs", str(id), "--member", str(before["c"])).out == "here c\n"
    assert why(installation, id)["status"] == "running"
    cancel(installation, id)
    assert {run.state for run in installation.client().job(id).runs} == {"stopped"}
    # A per-node job whose command ends succeeds when it has run on every node.
    done = installation.submit("/bin/true", cpu="100m", memory="16Mi", per_node=True)
    (detail,) = installation.ended(done)
    assert detail.job.state == "succeeded"
    assert sorted(run.node for run in detail.runs) == ["a", "b", "c"]


@pytest.mark.parametrize("way", ["stop", "kill"])
def test_a_restart_does_not_change_the_runs_of_a_per_node_job(
    installation: Installation, tmp_path: Path, way: str
) -> None:
    installation.configure(nodes("a 2 1Gi", "b 2 1Gi", "c 2 1Gi")).up()
    file = tmp_path / "pids"
    id = installation.submit(
        "/bin/sh", "-c", f"echo $$ >> {file}; echo here; exec sleep 787", cpu="100m", memory="16Mi", per_node=True
    )

    def running() -> list[str]:
        return sorted(run.id for run in installation.client().job(id).runs if run.state == "running")

    until(lambda: len(running()) == 3, "a run on each node")
    before, pids = running(), sorted(pids_in(file, 3))
    for _ in range(int(os.environ.get("HODEI_ROUNDS") or 1)):
        getattr(installation, way)()
        installation.up()
        # When a later job has ended, the scheduler has decided everything that the restart triggered.
        installation.ended(installation.submit("/bin/true", cpu="100m", memory="16Mi"))
        until(lambda: running() == before, "the same runs")
        assert len(installation.client().job(id).runs) == 3
        assert sorted(pids_in(file, 3)) == pids
        assert all(map(alive, pids))
        assert installation.rows("SELECT name, reason FROM quarantine") == []
    assert sorted(line.split()[0] for line in installation.ok("logs", str(id)).lines) == [
        "main[0]",
        "main[1]",
        "main[2]",
    ]
    assert "one on each matching node; 3 run" in installation.ok("job", "show", str(id)).out
