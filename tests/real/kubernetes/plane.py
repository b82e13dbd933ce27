"""A real Kubernetes control plane for tests: kube-apiserver and etcd as processes on loopback and free ports, and on request
the controllers, kwok (which simulates the kubelets) and kube-scheduler.

RBAC is on. Users: `admin` has all permissions, `hodei` those that deploy/kubernetes/rbac.yaml grants the scheduler,
`unprivileged` none. Each process is stopped by its pid; the logs stay in the folder.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import ssl
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from ports import free_port
from real.kubernetes import binaries
from real.kubernetes.api import Api, ApiFailed, wait
from real.kubernetes.certificates import make_certificates
from real.kubernetes.processes import folder_in_memory, spawn

HERE = Path(__file__).parent
RBAC = HERE.parents[2] / "deploy" / "kubernetes" / "rbac.yaml"
USERS = {
    "admin": "/O=system:masters/CN=admin",
    "scheduler": "/CN=system:kube-scheduler",
    "hodei": "/CN=hodei",
    "unprivileged": "/CN=unprivileged",
}
# The gangs of Kubernetes itself are off by default in this version.
GATES = "--feature-gates=GenericWorkload=true,GangScheduling=true"
_GROUPS = "--runtime-config=scheduling.k8s.io/v1alpha2=true"
_TIMEOUT_S = 60.0
HODEI = {"kind": "User", "name": "hodei", "apiGroup": "rbac.authorization.k8s.io"}


class Plane:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = binaries.folder()
        self.server = f"https://127.0.0.1:{free_port()}"
        self._etcd = f"http://127.0.0.1:{free_port()}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._data: Path | None = None
        self._pki = folder / "pki"
        self._clients: dict[tuple[str, str], Api] = {}

    def start(self) -> Plane:
        """Start etcd and kube-apiserver and wait until they are ready."""
        self.folder.mkdir(parents=True, exist_ok=True)
        make_certificates(self._pki, USERS)
        groups = {"admin": "system:masters"}
        lines = [f'{self.token(user)},{_name(user)},{user},"{groups.get(user, "")}"\n' for user in USERS]
        (self.folder / "tokens.csv").write_text("".join(lines))
        self._data = folder_in_memory()
        peers = f"http://127.0.0.1:{free_port()}"
        self.run("etcd", [
            f"--data-dir={self._data}", "--unsafe-no-fsync", "--quota-backend-bytes=8589934592", "--log-level=warn",
            "--warning-unary-request-duration=300ms",  # else it logs every request
            f"--listen-client-urls={self._etcd}", f"--advertise-client-urls={self._etcd}",
            f"--listen-peer-urls={peers}", f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
        ])  # fmt: skip
        self.start_apiserver()
        self.allow_hodei()
        return self

    def start_apiserver(self) -> None:
        pki, port = self._pki, self.server.rsplit(":", 1)[1]
        self.run("kube-apiserver", [
            f"--etcd-servers={self._etcd}", "--bind-address=127.0.0.1", "--advertise-address=127.0.0.1",
            f"--secure-port={port}", f"--tls-cert-file={pki}/server.crt", f"--tls-private-key-file={pki}/server.key",
            f"--client-ca-file={pki}/ca.crt", f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC", "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={pki}/sa.key", f"--service-account-signing-key-file={pki}/sa.key",
            "--disable-admission-plugins=ServiceAccount",  # pods need no service account
            "--service-cluster-ip-range=10.0.0.0/24", "--endpoint-reconciler-type=none",
            "--max-requests-inflight=2000", "--max-mutating-requests-inflight=1000", "--profiling=false",
            "--shutdown-delay-duration=0s", GATES, _GROUPS, *self._audit(),
        ])  # fmt: skip
        self._until("kube-apiserver", lambda: self.api.get("/readyz") == "ok")

    def _audit(self) -> list[str]:
        """With $HODEI_KUBE_AUDIT, requests of the user `hodei` are logged to that file, one per line (`permissions.py`)."""
        log = os.environ.get("HODEI_KUBE_AUDIT", "")
        if not log:
            return []
        policy = self.folder / "audit.yaml"
        rules = [{"level": "Metadata", "users": ["hodei"]}, {"level": "None"}]
        head = {"apiVersion": "audit.k8s.io/v1", "kind": "Policy", "omitStages": ["RequestReceived"]}
        policy.write_text(json.dumps({**head, "rules": rules}))
        return [f"--audit-policy-file={policy}", f"--audit-log-path={log}"]

    def stop_apiserver(self, sig: signal.Signals = signal.SIGKILL) -> None:
        self.end("kube-apiserver", sig)

    def restart_apiserver(self, sig: signal.Signals = signal.SIGKILL) -> None:
        """Restart it with the same address and data; all watches are cut."""
        self.stop_apiserver(sig)
        self.start_apiserver()

    def revive_apiserver(self) -> None:
        """Start it again if a failed test has left it stopped, so that the next test does not fail too."""
        running = self._processes.get("kube-apiserver")
        if running is None or running.poll() is not None:
            self._processes.pop("kube-apiserver", None)
            self.start_apiserver()

    def controllers(self, ready: bool = True) -> None:
        """Start kube-controller-manager: workloads, taints of nodes, volumes, budgets, namespaces, garbage collection."""
        port = free_port()
        admin = self.kubeconfig("admin")
        self.run("kube-controller-manager", [
            f"--kubeconfig={admin}", f"--authentication-kubeconfig={admin}", f"--authorization-kubeconfig={admin}",
            "--authorization-always-allow-paths=/healthz", "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--service-account-private-key-file={self._pki}/sa.key", f"--root-ca-file={self._pki}/ca.crt",
            "--leader-elect=false", "--kube-api-qps=1000", "--kube-api-burst=2000", "--pvclaimbinder-sync-period=1s",
            "--node-monitor-grace-period=24h",  # no kubelet renews leases; tests set the Ready condition
            f"--cert-dir={self.folder}/kcm", "--profiling=false", GATES,
        ])  # fmt: skip
        if ready:
            self._until("kube-controller-manager", lambda: _healthy(f"https://127.0.0.1:{port}"))

    def kwok(self, ready: bool = True) -> None:
        """Start kwok, which simulates the kubelets of all nodes as kwok.yaml describes."""
        address = f"127.0.0.1:{free_port()}"
        shutil.copy(HERE / "kwok.yaml", self.folder / "kwok.yaml")
        self.run("kwok", [
            f"--kubeconfig={self.kubeconfig('admin')}", f"--config={self.folder}/kwok.yaml", "--manage-all-nodes=true",
            f"--server-address={address}", "--node-ip=127.0.0.1", "--cidr=10.64.0.0/10",
            "--node-lease-duration-seconds=0",  # so that a deleted node can join again at once; see `controllers`
        ])  # fmt: skip
        if ready:
            self._until("kwok", lambda: _healthy(f"http://{address}"))

    def kube_scheduler(self, name: str = "default-scheduler", **config: Any) -> str:
        """Start kube-scheduler for pods of `name`; returns its address. `config` extends its KubeSchedulerConfiguration."""
        port = free_port()
        admin = self.kubeconfig("admin")
        process = f"kube-scheduler-{name}"
        file = self.folder / f"{process}.json"
        connection = {"kubeconfig": str(self.kubeconfig("scheduler")), "qps": 5000, "burst": 5000}
        configuration = {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "clientConnection": connection,
            "leaderElection": {"leaderElect": False},
            "profiles": [{"schedulerName": name}],
            **config,
        }
        file.write_text(json.dumps(configuration))
        self.run(process, [
            f"--config={file}", "--bind-address=127.0.0.1", f"--secure-port={port}",
            f"--authentication-kubeconfig={admin}", f"--authorization-kubeconfig={admin}",
            "--authorization-always-allow-paths=/healthz,/readyz,/livez,/metrics",
            f"--cert-dir={self.folder}/scheduler", GATES,
        ], program="kube-scheduler")  # fmt: skip
        self._until(process, lambda: _healthy(f"https://127.0.0.1:{port}"))
        return f"https://127.0.0.1:{port}"

    def stop_kube_scheduler(self, name: str = "default-scheduler") -> None:
        self.end(f"kube-scheduler-{name}")

    @property
    def api(self) -> Api:
        return self.api_of("admin")

    def api_of(self, user: str, by: str = "certificate") -> Api:
        if (user, by) not in self._clients:
            tls = ssl.create_default_context(cafile=str(self._pki / "ca.crt"))
            if by == "certificate":
                tls.load_cert_chain(self._pki / f"{user}.crt", self._pki / f"{user}.key")
            self._clients[user, by] = Api(self.server, tls, "" if by == "certificate" else self.token(user))
        return self._clients[user, by]

    def token(self, user: str) -> str:
        return f"{user}-token"

    def kubeconfig(self, user: str = "admin", by: str = "certificate", server: str = "") -> Path:
        """A kubeconfig for `user`, `by` "certificate" or "token"; `server` replaces the address, as with a proxy."""
        credentials: dict[str, str] = {
            "client-certificate": f"{self._pki}/{user}.crt",
            "client-key": f"{self._pki}/{user}.key",
        }
        if by == "token":
            credentials = {"token": self.token(user)}
        cluster = {"server": server or self.server, "certificate-authority": f"{self._pki}/ca.crt"}
        document = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": user}}],
            "current-context": "test",
        }
        suffix = "-" + server.rsplit(":", 1)[1] if server else ""
        path = self.folder / f"{user}-{by}{suffix}.kubeconfig"
        text = yaml.safe_dump(document)
        if not path.exists() or path.read_text() != text:  # another process may be reading it
            path.write_text(text)
        return path

    def kubectl(self, *arguments: str, user: str = "admin", input: str = "") -> str:
        """The output of kubectl, which must succeed."""
        done = subprocess.run(
            [self.bin / "kubectl", f"--kubeconfig={self.kubeconfig(user)}", *arguments],
            input=input, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"kubectl {' '.join(arguments)} ended with {done.returncode}: {done.stderr}"
        return done.stdout

    def allow_hodei(self) -> None:
        """Bind the shipped roles to the user `hodei`, so that a missing permission fails a test."""
        if RBAC.exists():
            self.allow(RBAC)
        else:
            self.api.apply([_binding("system:kube-scheduler"), _binding("system:volume-scheduler")])

    def allow(self, roles: Path) -> list[str]:
        """Apply the roles and bindings of a file and add the user `hodei` to the bindings; returns the paths."""
        shipped = [document for document in yaml.safe_load_all(roles.read_text()) if document]
        for document in shipped:
            if document["kind"].endswith("Binding"):
                document["subjects"] = [*document.get("subjects", []), HODEI]
        named = {document["metadata"].get("namespace") for document in shipped} - {None, "default", "kube-system"}
        namespaces = [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}} for name in sorted(named)]
        self.api.apply(namespaces)
        return self.api.apply(shipped)

    def run(self, name: str, arguments: Sequence[str], program: str = "") -> subprocess.Popen[bytes]:
        """Start a program of the control plane; its output goes to `name`.log."""
        assert name not in self._processes, f"{name} is running already"
        command = [self.bin / (program or name), *arguments]
        self._processes[name] = spawn(command, self.folder / f"{name}.log", cwd=self.folder)
        return self._processes[name]

    def end(self, name: str, sig: signal.Signals = signal.SIGTERM) -> None:
        """Stop a process and wait for its exit; kill it after 10 s."""
        process = self._processes.pop(name, None)
        if process is None:
            return
        process.send_signal(sig)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)

    def pid(self, name: str) -> int:
        return self._processes[name].pid

    def stop(self) -> None:
        last = ("kube-apiserver", "etcd")
        for name in [*(name for name in self._processes if name not in last), *last]:
            # The data is thrown away, so a clean shutdown is not needed.
            self.end(name, signal.SIGKILL)
        if self._data:
            shutil.rmtree(self._data, ignore_errors=True)

    def output(self, name: str, lines: int = 20) -> str:
        """The last lines of a log."""
        log = self.folder / f"{name}.log"
        return "\n".join(log.read_text(errors="replace").splitlines()[-lines:]) if log.exists() else ""

    def logs(self) -> list[Path]:
        return sorted(self.folder.glob("*.log"))

    def _until(self, name: str, ready: Any) -> None:
        def is_ready() -> bool:
            code = self._processes[name].poll()
            assert code is None, f"{name} ended with {code}:\n{self.output(name)}"
            try:
                return bool(ready())
            except (OSError, ApiFailed):  # still starting
                return False

        try:
            wait(is_ready, f"{name} is ready", _TIMEOUT_S)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.output(name)}\n(logs: {self.folder})") from None


def _name(user: str) -> str:
    """The user name in the API."""
    return USERS[user].rsplit("CN=", 1)[1]


def _binding(role: str) -> dict[str, Any]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": f"test-{role.replace(':', '-')}"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [HODEI],
    }


def _healthy(address: str) -> bool:
    """Its certificate is self-signed and not verified: this is loopback."""
    tls = ssl.create_default_context()
    tls.check_hostname, tls.verify_mode = False, ssl.CERT_NONE
    with urllib.request.urlopen(f"{address}/healthz", timeout=5, context=tls) as answer:
        return bool(answer.status == 200)


if __name__ == "__main__":  # python -m real.kubernetes.plane, in tests/
    began = time.monotonic()
    plane = Plane(Path(tempfile.mkdtemp(prefix="hodei-plane-")) / "plane")
    try:
        plane.start()
        print(f"kube-apiserver after {time.monotonic() - began:.1f} s")
        plane.controllers(ready=False)
        plane.kwok()
        print(f"all after {time.monotonic() - began:.1f} s\nexport KUBECONFIG={plane.kubeconfig()}", flush=True)
        signal.sigwait([signal.SIGINT, signal.SIGTERM])
    finally:
        plane.stop()
