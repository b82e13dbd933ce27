"""Several schedulers at once: jobs find their way to the one for them, each decides by its own rules, and one that cannot
help passes its jobs on. And an operator changes them while they work."""

from __future__ import annotations

import json
import signal

import pytest

from real.installation import until
from real.stories.cluster import Cluster, node

pytestmark = pytest.mark.real

GENERAL_AND_GPU = """
[scheduling.profiles.gpu]
worker_selection = "gpu_packing"
nodes = "pool=gpu"
fallback = "default"

[[scheduling.routes]]
when = {gpu = true}
profile = "gpu"
"""
CPU_NODE = node("cpu-1", cpu=4)
GPU_NODE = node("gpu-1", cpu=4, gpu=2, labels={"pool": "gpu"})


def escalation_steps(cluster: Cluster, job: int) -> list[str]:
    return [step.text for step in cluster.why(job).escalation_steps]


def test_scenario_multiple_scheduler_instances(cluster: Cluster) -> None:
    # Given two schedulers: the general one ("default") and "gpu"
    cluster.of(CPU_NODE, GPU_NODE, config=GENERAL_AND_GPU)
    # When jobs with different requirements arrive
    plain, gpu = cluster.run("plain"), cluster.run("train", gpu=1)
    # Then GPU jobs are routed to the scheduler "gpu"
    assert cluster.job(gpu).job.profile == "gpu"
    assert cluster.node_of(gpu) == "gpu-1"
    assert escalation_steps(cluster, gpu) == ["routed to profile gpu by rule 1 (gpu)"]
    # And general jobs to the general one
    assert cluster.job(plain).job.profile == "default"
    assert escalation_steps(cluster, plain) == []
    assert "routed to profile gpu by rule 1 (gpu)" in cluster.ok("why", str(gpu)).out


def test_scenario_scheduler_specialization(cluster: Cluster) -> None:
    # Given the scheduler "gpu" with algorithms made for GPUs
    cluster.of(CPU_NODE, GPU_NODE, config=GENERAL_AND_GPU)
    # When a job that needs a GPU is scheduled
    gpu, plain = cluster.run("train", gpu=1), cluster.run("plain")
    # Then it was the scheduler "gpu" that decided, by its own scores
    assert "gpu_packing" in {term.plugin for term in cluster.decision(gpu).chosen.terms}
    assert "gpu_packing" not in {term.plugin for term in cluster.decision(plain).chosen.terms}


def test_scenario_scheduler_fallback(cluster: Cluster) -> None:
    # Given that the scheduler "gpu" is not available: none of its nodes is there
    somewhere = node("odd-1", cpu=4, gpu=1)
    cluster.of(CPU_NODE, somewhere, config=GENERAL_AND_GPU)
    # When a GPU job arrives
    gpu = cluster.want("train", gpu=1)
    # Then it falls back to the general scheduler
    cluster.until_running(gpu)
    assert (cluster.job(gpu).job.profile, cluster.node_of(gpu)) == ("default", "odd-1")
    assert "job.moved" in cluster.history(gpu)
    assert escalation_steps(cluster, gpu) == [
        "routed to profile gpu by rule 1 (gpu)",
        "moved from profile gpu to default: no node there could take it even when idle",
    ]


def test_scenario_scheduler_fallback_or_it_is_marked_as_unschedulable(cluster: Cluster) -> None:
    without = GENERAL_AND_GPU.replace('fallback = "default"\n', "")
    cluster.of(CPU_NODE, node("odd-1", cpu=4, gpu=1), config=without)
    gpu = cluster.want("train", gpu=1)
    said = cluster.until_refused(gpu)
    assert said.status == "unsatisfiable"
    assert "unschedulable: its profile gpu has no fallback that it could go to" in escalation_steps(cluster, gpu)


def test_a_profile_is_for_its_projects_alone(cluster: Cluster) -> None:
    cluster.of(CPU_NODE, config='[scheduling.profiles.lab]\nprojects = ["lab-*"]\n')
    document = {"name": "x", "command": ["true"], "profile": "lab", "project": "shop"}
    refused = cluster.request("POST", "/api/v1/jobs", json.dumps(document).encode())
    assert (refused.status, refused.json["code"]) == (422, "PROFILE_FORBIDDEN")
    assert "lab-*" in refused.json["hint"]
    cluster.run("mine", profile="lab", project="lab-7")


def test_an_operator_adds_a_scheduler_without_a_restart_and_takes_it_back(cluster: Cluster) -> None:
    cluster.of(CPU_NODE, GPU_NODE)
    running = cluster.run("runs", cpu=4)
    config = cluster.home / "config.toml"
    nodes = config.read_text()

    # First a look at what it would do: nothing is changed
    config.write_text(GENERAL_AND_GPU + nodes)
    dry = cluster.ok("reload", "--dry-run").out
    assert '+ scheduling.profiles.gpu.nodes = "pool=gpu"' in dry
    assert "its effect now:" in dry
    assert cluster.ok("config", "show").out.count("gpu") == 0

    # Then for real; what runs does not notice
    said = cluster.ok("reload").out
    assert "configuration 2 is active" in said
    assert cluster.untouched(running)
    gpu = cluster.run("train", gpu=1)
    assert cluster.job(gpu).job.profile == "gpu"

    # And back again: whoever waits for a scheduler that is gone is held, nothing is lost
    waits = cluster.want("too-much", gpu=2)
    until(lambda: cluster.job(waits).job.reason_code, "it was looked at")
    assert "configuration 3 is active" in cluster.ok("config", "undo").out
    assert (cluster.state(waits), cluster.job(waits).job.reason_code) == ("held", "UNKNOWN_PROFILE")
    assert cluster.untouched(running, gpu)
    history = cluster.ok("config", "history").out.splitlines()
    assert [line.split()[0] for line in history[1:]] == ["3", "2", "1"]


def test_a_configuration_with_mistakes_changes_nothing_and_names_them_all(cluster: Cluster) -> None:
    cluster.of(CPU_NODE, config=GENERAL_AND_GPU)
    wrong = """
[scheduling.profiles.gpu]
queue = "fast"
fallback = "nowhere"
[[scheduling.routes]]
when = {priority_at_least = "urgent"}
profile = "gpu"
[scheduling.retry]
base = "soon"
"""
    said = cluster.hodei("config", "set", "-", input=wrong)
    assert said.code != 0
    for path in ("profiles.gpu", "profiles.gpu.fallback", "routes[0].when.priority_at_least", "retry.base"):
        assert f"scheduling.{path}" in said.err
    misspelt = cluster.hodei("config", "set", "-", input="[scheduling.profiles.gpu]\nfalback = 'default'\n")
    assert "did you mean 'fallback'?" in misspelt.err
    assert cluster.ok("config", "show", "-o", "json").json["number"] == 1


def test_nobody_makes_the_server_load_code_that_its_file_does_not_name(cluster: Cluster) -> None:
    cluster.of(CPU_NODE)
    marker = cluster.home / "made"
    code = f"""
[scheduling.profiles.default]
plugins = ["subprocess:Popen"]
[scheduling.profiles.default.options."subprocess:Popen"]
args = ["touch", "{marker}"]
"""
    for more in ((), ("--dry-run",)):
        said = cluster.hodei("config", "set", "-", *more, input=code)
        assert "is code that the server's configuration file does not name" in said.err
    assert not marker.exists()


def test_what_was_set_outlives_a_restart_until_the_file_says_something_else(cluster: Cluster) -> None:
    cluster.of(CPU_NODE)
    cluster.ok("config", "set", "-", input='[scheduling.profiles.extra]\nqueue = "fifo"\n')
    first = cluster.run("stays", profile="extra")
    waits = cluster.want("waits", profile="extra", cpu=4)
    cluster.kill()
    cluster.up()
    cluster.until_running(first)
    assert 'queue = "fifo"' in cluster.ok("config", "show").out
    assert cluster.state(waits) == "pending"
    config = cluster.home / "config.toml"
    config.write_text('[scheduling.profiles.extra]\nqueue = "fair"\n' + config.read_text())
    cluster.stop()
    cluster.up()
    assert 'queue = "fair"' in cluster.ok("config", "show").out


def test_the_signal_hup_reads_the_file_again_and_names_what_needs_a_restart(cluster: Cluster) -> None:
    cluster.of(CPU_NODE)
    config = cluster.home / "config.toml"
    config.write_text('[server]\nretention = "7d"\n' + GENERAL_AND_GPU + CPU_NODE)
    assert cluster.server is not None
    cluster.server.send_signal(signal.SIGHUP)
    until(lambda: "configuration 2 (reload by SIGHUP) is active" in cluster.server_output(), "it has reloaded")
    assert "server.retention has changed, which needs a restart" in cluster.server_output()
    again = cluster.ok("reload").out
    assert "no scheduling setting is different" in again
    assert 'server.retention = "30d" -> "7d"' in again


def test_only_administrators_see_and_change_it(cluster: Cluster) -> None:
    cluster.of(CPU_NODE)
    for method, path in (("GET", "config"), ("PUT", "config"), ("POST", "config/reload"), ("POST", "config/undo")):
        assert cluster.request(method, f"/api/v1/{path}", b"{}", token="").status == 401
    assert cluster.request("GET", "/api/v1/config").json["how"] == "start"
    as_json = json.dumps({"profiles": {"extra": {"queue": "fifo"}}}).encode()
    assert cluster.request("PUT", "/api/v1/config?dry_run=1", as_json).json["applied"] is False
    toml = b'[scheduling.profiles.extra]\nqueue = "fifo"\n'
    put = cluster.request("PUT", "/api/v1/config", toml, headers={"Content-Type": "application/toml"})
    assert (put.json["applied"], put.json["number"]) == (True, 2)


def test_a_decision_log_with_a_change_of_configuration_is_replayed_to_the_same_plans(cluster: Cluster) -> None:
    cluster.configure(CPU_NODE + GPU_NODE).up("--decision-log=decisions.jsonl")
    cluster.run("before", cpu=2)
    cluster.ok("config", "set", "-", input=GENERAL_AND_GPU)
    cluster.run("after", gpu=1)
    cluster.stop()
    replayed = cluster.ok("replay", str(cluster.home / "decisions.jsonl")).out
    assert replayed.startswith("identical")
