"""Several profiles in one server: routes, fallbacks, and changes of the configuration while the server runs."""

from __future__ import annotations

import json
import signal

import pytest

from real.acceptance.cluster import Cluster, node, weights
from real.installation import until

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


def test_a_route_sends_gpu_jobs_to_the_gpu_profile_which_scores_by_its_own_plugins(cluster: Cluster) -> None:
    # Given two profiles: "default" and "gpu"
    cluster.up_with(CPU_NODE, GPU_NODE, config=GENERAL_AND_GPU)
    # When jobs with and without a GPU request are submitted
    plain, gpu = cluster.run_job("plain"), cluster.run_job("train", gpu=1)
    # Then the GPU job is routed to the profile "gpu"
    assert cluster.job(gpu).job.profile == "gpu"
    assert cluster.node_of(gpu) == "gpu-1"
    assert escalation_steps(cluster, gpu) == ["routed to profile gpu by rule 1 (gpu)"]
    assert "routed to profile gpu by rule 1 (gpu)" in cluster.ok("why", str(gpu)).out
    # And the other job to the default profile
    assert cluster.job(plain).job.profile == "default"
    assert escalation_steps(cluster, plain) == []
    # And each is scored by the plugins of its profile
    assert "gpu_packing" in weights(cluster.decision(gpu).chosen)
    assert "gpu_packing" not in weights(cluster.decision(plain).chosen)


def test_a_job_falls_back_to_another_profile_if_no_node_of_its_own_could_ever_take_it(cluster: Cluster) -> None:
    # Given that the profile "gpu" has no nodes
    unlabelled = node("odd-1", cpu=4, gpu=1)
    cluster.up_with(CPU_NODE, unlabelled, config=GENERAL_AND_GPU)
    # When a GPU job is submitted
    gpu = cluster.submit_job("train", gpu=1)
    # Then it falls back to the default profile
    cluster.until_running(gpu)
    assert (cluster.job(gpu).job.profile, cluster.node_of(gpu)) == ("default", "odd-1")
    assert "job.moved" in cluster.history(gpu)
    assert escalation_steps(cluster, gpu) == [
        "routed to profile gpu by rule 1 (gpu)",
        "moved from profile gpu to default: no node there could take it even when idle",
    ]


def test_a_job_is_unsatisfiable_if_its_profile_has_neither_nodes_nor_a_fallback(cluster: Cluster) -> None:
    without_fallback = GENERAL_AND_GPU.replace('fallback = "default"\n', "")
    cluster.up_with(CPU_NODE, node("odd-1", cpu=4, gpu=1), config=without_fallback)
    gpu = cluster.submit_job("train", gpu=1)
    assert cluster.until_refused(gpu).status == "unsatisfiable"
    assert "unschedulable: its profile gpu has no fallback that it could go to" in escalation_steps(cluster, gpu)


def test_a_profile_accepts_only_its_own_projects(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE, config='[scheduling.profiles.lab]\nprojects = ["lab-*"]\n')
    document = {"name": "x", "command": ["true"], "profile": "lab", "project": "shop"}
    refused = cluster.request("POST", "/api/v1/jobs", json.dumps(document).encode())
    assert (refused.status, refused.json["code"]) == (422, "PROFILE_FORBIDDEN")
    assert "lab-*" in refused.json["hint"]
    cluster.run_job("mine", profile="lab", project="lab-7")


def test_a_profile_is_added_by_a_reload_and_removed_by_an_undo(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE, GPU_NODE)
    running = cluster.run_job("runs", cpu=4)
    config = cluster.home / "config.toml"
    nodes = config.read_text()

    # A dry run changes nothing
    config.write_text(GENERAL_AND_GPU + nodes)
    dry_run = cluster.ok("reload", "--dry-run").out
    assert '+ scheduling.profiles.gpu.nodes = "pool=gpu"' in dry_run
    assert "its effect now:" in dry_run
    assert cluster.ok("config", "show").out.count("gpu") == 0

    # The reload does not disturb running jobs
    assert "configuration 2 is active" in cluster.ok("reload").out
    assert cluster.undisturbed(running)
    gpu = cluster.run_job("train", gpu=1)
    assert cluster.job(gpu).job.profile == "gpu"

    # After the undo, pending jobs of the removed profile are held
    pending = cluster.submit_job("too-much", gpu=2)
    until(lambda: cluster.job(pending).job.reason_code, "the job was tried")
    assert "configuration 3 is active" in cluster.ok("config", "undo").out
    assert (cluster.state(pending), cluster.job(pending).job.reason_code) == ("held", "UNKNOWN_PROFILE")
    assert cluster.undisturbed(running, gpu)
    history = cluster.ok("config", "history").out.splitlines()
    assert [line.split()[0] for line in history[1:]] == ["3", "2", "1"]


def test_an_invalid_configuration_is_refused_with_all_its_errors(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE, config=GENERAL_AND_GPU)
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
    refused = cluster.hodei("config", "set", "-", input=wrong)
    assert refused.code != 0
    for path in ("profiles.gpu", "profiles.gpu.fallback", "routes[0].when.priority_at_least", "retry.base"):
        assert f"scheduling.{path}" in refused.err
    misspelt = cluster.hodei("config", "set", "-", input="[scheduling.profiles.gpu]\nfalback = 'default'\n")
    assert "did you mean 'fallback'?" in misspelt.err
    assert cluster.ok("config", "show", "-o", "json").json["number"] == 1


def test_a_changed_configuration_cannot_load_code_that_the_file_does_not_name(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE)
    marker = cluster.home / "executed"
    code = f"""
[scheduling.profiles.default]
plugins = ["subprocess:Popen"]
[scheduling.profiles.default.options."subprocess:Popen"]
args = ["touch", "{marker}"]
"""
    for more in ((), ("--dry-run",)):
        refused = cluster.hodei("config", "set", "-", *more, input=code)
        assert "is code that the server's configuration file does not name" in refused.err
    assert not marker.exists()


def test_a_changed_configuration_survives_a_restart_until_the_file_is_changed(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE)
    cluster.ok("config", "set", "-", input='[scheduling.profiles.extra]\nqueue = "fifo"\n')
    running = cluster.run_job("running", profile="extra")
    pending = cluster.submit_job("pending", profile="extra", cpu=4)
    cluster.kill()
    cluster.up()
    cluster.until_running(running)
    assert 'queue = "fifo"' in cluster.ok("config", "show").out
    assert cluster.state(pending) == "pending"
    config = cluster.home / "config.toml"
    config.write_text('[scheduling.profiles.extra]\nqueue = "fair"\n' + config.read_text())
    cluster.stop()
    cluster.up()
    assert 'queue = "fair"' in cluster.ok("config", "show").out


def test_sighup_reloads_the_file_and_names_changes_that_need_a_restart(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE)
    config = cluster.home / "config.toml"
    config.write_text('[server]\nretention = "7d"\n' + GENERAL_AND_GPU + CPU_NODE)
    assert cluster.server is not None
    cluster.server.send_signal(signal.SIGHUP)
    until(lambda: "configuration 2 (reload by SIGHUP) is active" in cluster.server_output(), "the file is reloaded")
    assert "server.retention has changed, which needs a restart" in cluster.server_output()
    second = cluster.ok("reload").out
    assert "no scheduling setting is different" in second
    assert 'server.retention = "30d" -> "7d"' in second


def test_the_configuration_is_read_and_changed_only_with_a_token(cluster: Cluster) -> None:
    cluster.up_with(CPU_NODE)
    for method, path in (("GET", "config"), ("PUT", "config"), ("POST", "config/reload"), ("POST", "config/undo")):
        assert cluster.request(method, f"/api/v1/{path}", b"{}", token="").status == 401
    assert cluster.request("GET", "/api/v1/config").json["how"] == "start"
    as_json = json.dumps({"profiles": {"extra": {"queue": "fifo"}}}).encode()
    assert cluster.request("PUT", "/api/v1/config?dry_run=1", as_json).json["applied"] is False
    toml = b'[scheduling.profiles.extra]\nqueue = "fifo"\n'
    put = cluster.request("PUT", "/api/v1/config", toml, headers={"Content-Type": "application/toml"})
    assert (put.json["applied"], put.json["number"]) == (True, 2)


def test_a_decision_log_with_a_change_of_configuration_replays_identically(cluster: Cluster) -> None:
    cluster.configure(CPU_NODE + GPU_NODE).up("--decision-log=decisions.jsonl")
    cluster.run_job("before", cpu=2)
    cluster.ok("config", "set", "-", input=GENERAL_AND_GPU)
    cluster.run_job("after", gpu=1)
    cluster.stop()
    replayed = cluster.ok("replay", str(cluster.home / "decisions.jsonl")).out
    assert replayed.startswith("identical")
