"""A whole server with a cluster as its backend: a job's file becomes a pod, and the pod's end the job's. Real processes, a real
API server, kwok in the place of the kubelets (no container runs: a pod ends as its annotations say)."""

from __future__ import annotations

from typing import Any

import pytest

from real.installation import Installation, until
from real.kubernetes.cluster import Cluster
from real.kubernetes.log_kubelet import LogKubelet

pytestmark = pytest.mark.real
JOB = """
name: greet
image: busybox
command: [echo, hello]
env: {{GREETING: hello}}
labels: {{team: ml}}
cpu: 100m
memory: 16Mi
annotations:
  hodei.test/runs-for: {runs_for}
  hodei.test/exit-code: "{code}"
"""


@pytest.fixture
def server(installation: Installation, cluster: Cluster) -> Installation:
    name = cluster.make_node(f"{cluster.namespace}-0", "4", "16Gi", labels={"pool": cluster.namespace})
    here = [{"type": "InternalIP", "address": "127.0.0.1"}]
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"addresses": here}})
    installation.configure(f"""
[scheduling.admission]
oversized = "wait"

[backends.local]
kind = "local"
enabled = false

[backends.prod]
kind = "kubernetes"
kubeconfig = "{cluster.plane.kubeconfig("admin")}"
namespace = "{cluster.namespace}"
node_selector = {{pool = "{cluster.namespace}"}}
allow_annotations = ["hodei.test/"]
region = "eu"
""")
    return installation.up()


def submit(installation: Installation, runs_for: str = "1ms", code: int = 0) -> int:
    file = installation.home.parent / "job.yaml"
    file.write_text(JOB.format(runs_for=runs_for, code=code))
    return int(installation.ok("submit", str(file), "-q").out)


def the_pod(cluster: Cluster, job: int) -> dict[str, Any]:
    (pod,) = until(lambda: cluster.pods(labelSelector=f"hodei.io/job={job}"), f"job {job} is a pod")
    return pod


def test_a_job_file_runs_as_a_pod_to_its_end(server: Installation, cluster: Cluster):
    fine, bad = submit(server), submit(server, code=7)
    good, failed = server.ended(fine, bad)
    assert (good.job.state, good.job.exit_code) == ("succeeded", 0)
    assert (failed.job.state, failed.job.exit_code, failed.job.reason_code) == ("failed", 7, "EXIT_CODE")
    assert good.runs[0].node == f"{cluster.namespace}-0"
    assert "7" in server.ok("why", str(bad)).out
    until(lambda: not cluster.pods(), "the pods are gone once their ends are stored")
    shown = server.ok("backend", "show", "prod").out
    assert "kubernetes" in shown


def test_a_pod_continues_while_the_server_is_down_and_its_end_is_found(server: Installation, cluster: Cluster):
    job = submit(server, runs_for="3s", code=7)
    server.until_state(job, "running")
    pod = the_pod(cluster, job)
    server.kill()
    cluster.until_phase(pod["metadata"]["name"], "Failed")
    server.up()
    (end,) = server.ended(job)
    assert (end.job.exit_code, len(end.runs)) == (7, 1)


def test_a_cancelled_job_takes_its_pod_with_it(server: Installation, cluster: Cluster):
    job = submit(server, runs_for="1h")
    server.until_state(job, "running")
    server.ok("cancel", str(job))
    (end,) = server.ended(job)
    assert (end.job.state, end.runs[0].exit_code) == ("cancelled", 143)
    until(lambda: not cluster.pods(), "its pod is gone")


def test_a_job_waits_while_other_pods_hold_the_capacity_with_a_reason(server: Installation, cluster: Cluster):
    cluster.make_pod("other", "3950m", "1Gi", nodeName=f"{cluster.namespace}-0")
    until(lambda: _free(server) < 100, "the room that the other pod takes is known")
    job = submit(server)
    said = server.ok("why", str(job)).out
    assert "cpu" in said
    cluster.delete_pod("other")
    assert server.ended(job)[0].job.state == "succeeded"


def _free(server: Installation) -> int:
    """Thousandths of a core that the one node offers."""
    (node,) = server.ok("nodes", "-o", "json").json
    cpu = str(node["capacity"]["cpu"])
    return int(cpu.removesuffix("m")) if cpu.endswith("m") else int(cpu) * 1000


def test_a_cluster_without_metrics_has_a_hint(server: Installation):
    answer = server.request("GET", "/api/v1/backends/prod/usage")
    assert (answer.status, answer.json["code"]) == (501, "BACKEND_CANNOT")
    assert "metrics-server" in answer.json["hint"]


def test_commands_and_saved_work_reach_the_pod_from_the_terminal(server: Installation, cluster: Cluster):
    """The commands are processes of this machine, see log_kubelet."""
    kubelet = LogKubelet(cluster.plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")
    file, saved = server.home.parent / "saves.yaml", server.home.parent / "saved"
    try:
        file.write_text(JOB.format(runs_for="1h", code=0) + f"checkpoint: {{command: [touch, {saved}]}}\n")
        job = int(server.ok("submit", str(file), "-q").out)
        server.until_state(job, "running")
        said = server.hodei("exec", str(job), "--", "sh", "-c", "echo hello; exit 7")
        assert (said.code, said.out) == (7, "hello\n")
        server.ok("checkpoint", str(job))
        until(saved.exists, "its work is saved")
        saved.unlink()
        server.ok("suspend", str(job))
        server.until_state(job, "held")
        assert saved.exists()  # before it was stopped
    finally:
        kubelet.close()
