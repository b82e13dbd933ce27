"""Real Docker daemons, each with its own containerd, directories and socket, and one small image made of busybox.

Nothing is shared with the machine's own daemon, and nothing is pulled. The daemons are stopped by pid after the tests.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

IMAGE = "busybox:local"
BUSYBOX = "/bin/busybox"
UP_S = 60.0


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=60)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(60)
        self.sock.connect(self._path)


class Daemon:
    """One dockerd. After `kill` (kill -9) its containers continue only if it has live restore."""

    def __init__(self, folder: Path, name: str) -> None:
        self.name, self._folder = name, folder / name
        self.live_restore = False
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def socket(self) -> str:
        return f"{self._folder}/docker.sock"

    @property
    def url(self) -> str:
        return f"unix://{self.socket}"

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def up(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *more: str) -> None:
        if self.up:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / "docker.pid").unlink(missing_ok=True)  # stale after a kill
        # Without its own key every daemon of this machine would have the same identity.
        (self._folder / "daemon.json").write_text(json.dumps({"deprecated-key-path": f"{self._folder}/key.json"}))
        command = [
            "dockerd", "--config-file", f"{self._folder}/daemon.json", "--host", self.url,
            "--data-root", f"{self._folder}/data", "--exec-root", f"{self._folder}/exec",
            "--pidfile", f"{self._folder}/docker.pid", "--iptables=false", "--ip6tables=false", "--bridge=none",
            "--storage-driver", "overlay2", "--exec-opt", "native.cgroupdriver=cgroupfs",
            "--cgroup-parent", self._cgroup, "--label", f"host={self.name}", "--log-level", "warn", *more,
        ]  # fmt: skip
        if self.live_restore:
            command.append("--live-restore")
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        deadline = time.monotonic() + UP_S
        while time.monotonic() < deadline and self.up:
            with contextlib.suppress(OSError, http.client.HTTPException):
                self.request("GET", "/_ping")
                return
            time.sleep(0.05)
        raise AssertionError(f"dockerd did not come up: {(self._folder / 'log').read_text()[-2000:]}")

    @property
    def _cgroup(self) -> str:
        return f"/hodei-test-{self._folder.parent.name}-{self.name}"

    def request(self, method: str, path: str, body: bytes | None = None, kind: str = "application/json") -> Any:
        connection = _UnixConnection(self.socket)
        try:
            connection.request(method, path, body, {"Content-Type": kind})
            answer = connection.getresponse()
            data = answer.read()
        finally:
            connection.close()
        if answer.status >= 400:
            raise AssertionError(f"{method} {path}: {answer.status} {data!r}")
        try:
            return json.loads(data)
        except ValueError:
            return data

    def ensure_image(self) -> None:
        if any(IMAGE in (image["RepoTags"] or ()) for image in self.request("GET", "/images/json")):
            return
        query = "fromSrc=-&repo=busybox&tag=local&changes=ENV%20PATH%3D/bin&changes=CMD%20%5B%22/bin/sh%22%5D"
        output = self.request("POST", f"/images/create?{query}", _busybox_tar(), "application/x-tar")
        assert b"error" not in (output if isinstance(output, bytes) else json.dumps(output).encode()), output

    def containers(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.request("GET", "/containers/json?all=1")
        return found

    def clear(self) -> None:
        for container in self.containers():
            with contextlib.suppress(AssertionError):
                self.request("DELETE", f"/containers/{container['Id']}?force=1&v=1")

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait(30)
        Path(self.socket).unlink(missing_ok=True)
        self._await_containerd_exit()

    def _await_containerd_exit(self) -> None:
        """It exits with its dockerd, but the next dockerd would mistake a zombie for a live process."""
        file = self._folder / "exec/containerd/containerd.pid"
        deadline = time.monotonic() + 10
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(file.read_text())
            while time.monotonic() < deadline:
                if Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] in "ZX":
                    break
                time.sleep(0.02)
            else:
                return
        file.unlink(missing_ok=True)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self.thaw()
            with contextlib.suppress(Exception):
                self.clear()
            self._process.terminate()
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait(30)
        self._end_containerd()
        for _ in range(3):
            mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
            for mount in sorted((mount for mount in mounts if mount.startswith(f"{self._folder}/")), reverse=True):
                subprocess.run(["umount", "-l", mount], check=False, stderr=subprocess.DEVNULL)
        shutil.rmtree(self._folder, ignore_errors=True)
        for group in sorted(Path("/sys/fs/cgroup").glob(f"*{self._cgroup}"), reverse=True):
            with contextlib.suppress(OSError):
                group.rmdir()

    def _end_containerd(self) -> None:
        """A killed dockerd leaves it running."""
        try:
            pid = int((self._folder / "exec/containerd/containerd.pid").read_text())
            if str(self._folder).encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGTERM)
                for _ in range(100):
                    if not Path(f"/proc/{pid}").exists():
                        break
                    time.sleep(0.05)
        except (OSError, ValueError):
            pass


class DockerDaemons:
    """Daemons by name, started on first use."""

    def __init__(self) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="hdock", dir="/tmp"))
        self._daemons: dict[str, Daemon] = {}

    def __call__(self, name: str = "h1", *, live_restore: bool = False) -> Daemon:
        daemon = self._daemons.setdefault(name, Daemon(self._folder, name))
        if not daemon.up:
            daemon.live_restore = live_restore
        daemon.start()
        daemon.ensure_image()
        return daemon

    def new(self, name: str) -> Daemon:
        """A daemon that is not started yet; `close` stops it too."""
        return self._daemons.setdefault(name, Daemon(self._folder, name))

    def close(self) -> None:
        for daemon in self._daemons.values():
            daemon.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _busybox_tar() -> bytes:
    """A root file system with every applet in /bin, and /usr/bin as a link to it."""
    packed = io.BytesIO()
    applets = subprocess.run([BUSYBOX, "--list"], check=True, capture_output=True, text=True).stdout.split()
    with tarfile.open(fileobj=packed, mode="w") as tar:

        def add(
            name: str, *, mode: int = 0o755, kind: bytes = tarfile.DIRTYPE, link: str = "", data: bytes = b""
        ) -> None:
            entry = tarfile.TarInfo(name)
            entry.mode, entry.type, entry.linkname, entry.size = mode, kind, link, len(data)
            tar.addfile(entry, io.BytesIO(data))

        for name in ("bin", "usr", "etc", "proc", "sys", "dev", "root", "run"):
            add(name)
        add("tmp", mode=0o1777)
        add("usr/bin", kind=tarfile.SYMTYPE, link="../bin")
        add("bin/busybox", kind=tarfile.REGTYPE, data=Path(BUSYBOX).read_bytes())
        for applet in applets:
            if applet != "busybox":  # that would be a link to itself
                add(f"bin/{applet}", kind=tarfile.SYMTYPE, link="busybox")
        add("etc/passwd", mode=0o644, kind=tarfile.REGTYPE,
            data=b"root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/sh\n")  # fmt: skip
        add("etc/group", mode=0o644, kind=tarfile.REGTYPE, data=b"root:x:0:\nnogroup:x:65534:\n")
    return packed.getvalue()


def missing_requirement() -> str:
    """Why a Docker daemon cannot be started here, or ""."""
    missing = [name for name in ("dockerd", "containerd", "runc", "docker-init") if shutil.which(name) is None]
    if not os.access(BUSYBOX, os.X_OK):
        missing.append(BUSYBOX)
    if missing:
        return f"{', '.join(missing)} not found; next: scripts/install-docker.sh"
    return "" if os.geteuid() == 0 else "a Docker daemon can only be started by root"


@pytest.fixture(scope="session")
def dockerd() -> Iterator[DockerDaemons]:
    """Docker daemons for the whole session; `dockerd()` returns the first one."""
    if problem := missing_requirement():
        if os.environ.get("CI"):
            pytest.fail(problem)
        pytest.skip(problem)
    daemons = DockerDaemons()
    try:
        yield daemons
    finally:
        daemons.close()
