"""An installation with a Kubernetes backend: a job file becomes a pod, and the end of the pod that of the job. Real processes and a
real API server; kwok simulates the kubelets (no container runs: a pod ends as its annotations say)."""

from __future__ import annotations

from typing import Any

import pytest

from real.installation import Installation, until
from real.kubernetes.cluster import Cluster
from real.kubernetes.fake_kubelet import FakeKubelet

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
    addresses = [{"type": "InternalIP", "address": "127.0.0.1"}]
    cluster.patch(f"/api/v1/nodes/{name}/status", {"status": {"addresses": addresses}})
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


def pod_of(cluster: Cluster, job: int) -> dict[str, Any]:
    (pod,) = until(lambda: cluster.pods(labelSelector=f"hodei.io/job={job}"), f"job {job} has a pod")
    return pod


def test_a_job_file_runs_as_a_pod_to_its_end(server: Installation, cluster: Cluster):
    fine, bad = submit(server), submit(server, code=7)
    good, failed = server.ended(fine, bad)
    assert (good.job.state, good.job.exit_code) == ("succeeded", 0)
    assert (failed.job.state, failed.job.exit_code, failed.job.reason_code) == ("failed", 7, "EXIT_CODE")
    assert good.runs[0].node == f"{cluster.namespace}-0"
    assert "7" in server.ok("why", str(bad)).out
    until(lambda: not cluster.pods(), "the pods are deleted after their ends are stored")
    shown = server.ok("backend", "show", "prod").out
    assert "kubernetes" in shown


def test_a_pod_continues_while_the_server_is_down_and_its_end_is_reported(server: Installation, cluster: Cluster):
    job = submit(server, runs_for="3s", code=7)
    server.until_state(job, "running")
    pod = pod_of(cluster, job)
    server.kill()
    cluster.until_phase(pod["metadata"]["name"], "Failed")
    server.up()
    (end,) = server.ended(job)
    assert (end.job.exit_code, len(end.runs)) == (7, 1)


def test_cancelling_a_job_deletes_its_pod(server: Installation, cluster: Cluster):
    job = submit(server, runs_for="1h")
    server.until_state(job, "running")
    server.ok("cancel", str(job))
    (end,) = server.ended(job)
    assert (end.job.state, end.runs[0].exit_code) == ("cancelled", 143)
    until(lambda: not cluster.pods(), "its pod is deleted")


def test_a_job_waits_while_other_pods_hold_the_capacity_with_a_reason(server: Installation, cluster: Cluster):
    cluster.make_pod("other", "3950m", "1Gi", nodeName=f"{cluster.namespace}-0")
    until(lambda: _free(server) < 100, "the request of the other pod is known")
    job = submit(server)
    assert "cpu" in server.ok("why", str(job)).out
    cluster.delete_pod("other")
    assert server.ended(job)[0].job.state == "succeeded"


def _free(server: Installation) -> int:
    """The capacity of the only node, in thousandths of a core."""
    (node,) = server.ok("nodes", "-o", "json").json
    cpu = str(node["capacity"]["cpu"])
    return int(cpu.removesuffix("m")) if cpu.endswith("m") else int(cpu) * 1000


def test_a_cluster_without_metrics_has_a_hint(server: Installation):
    answer = server.request("GET", "/api/v1/backends/prod/usage")
    assert (answer.status, answer.json["code"]) == (501, "BACKEND_CANNOT")
    assert "metrics-server" in answer.json["hint"]


def test_exec_and_checkpoint_reach_the_pod(server: Installation, cluster: Cluster):
    """The commands are processes of this machine, see fake_kubelet."""
    kubelet = FakeKubelet(cluster.plane)
    kubelet.serve(cluster, f"{cluster.namespace}-0")
    file, saved = server.home.parent / "checkpoints.yaml", server.home.parent / "saved"
    try:
        file.write_text(JOB.format(runs_for="1h", code=0) + f"checkpoint: {{command: [touch, {saved}]}}\n")
        job = int(server.ok("submit", str(file), "-q").out)
        server.until_state(job, "running")
        done = server.hodei("exec", str(job), "--", "sh", "-c", "echo hello; exit 7")
        assert (done.code, done.out) == (7, "hello\n")
        server.ok("checkpoint", str(job))
        until(saved.exists, "the checkpoint is taken")
        saved.unlink()
        server.ok("suspend", str(job))
        server.until_state(job, "held")
        assert saved.exists()  # the checkpoint precedes the stop
    finally:
        kubelet.close()
