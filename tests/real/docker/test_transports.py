"""Connections to a daemon: mutual TLS, and ssh with a known host key; with real servers."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import ReconnectingRecorder
from docker_backends import a_docker
from docker_hosts import Daemon, DockerDaemons
from hodei.model.errors import BackendError
from ports import free_port
from real.docker.test_runs import an_order, sh

pytestmark = pytest.mark.real
SSHD = "/usr/sbin/sshd"


def run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, capture_output=True, cwd=cwd)


async def check_run(home: Path, daemon: Daemon, **host: object) -> None:
    backend = a_docker(home, daemon, hosts={daemon.name: host})
    await backend.open()
    try:
        recorder = ReconnectingRecorder(backend, 60)
        (end,) = await recorder.run(an_order(1, *sh("echo ran; exit 3"), node=daemon.name))
        assert (end.state, end.exit_code) == ("failed", 3)
        assert await recorder.log("1.0.1") == b"ran\n"
    finally:
        await backend.close()


async def check_refused(home: Path, daemon: Daemon, message: str, **host: object) -> None:
    backend = a_docker(home, daemon, hosts={daemon.name: host})
    try:
        with pytest.raises(BackendError, match=message):
            await backend.open()
    finally:
        await backend.close()


def certificates(parent: Path, name: str) -> Path:
    """A new authority in `parent`/`name`, a certificate for 127.0.0.1 and one for a client."""
    folder = parent / name
    folder.mkdir()
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN=ca {name}",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", "ca-key.pem", "-out", "ca.pem", cwd=folder)  # fmt: skip
    for party, usage in (("server", "serverAuth"), ("client", "clientAuth")):
        (folder / "ext").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={party}",
            "-keyout", f"{party}-key.pem", "-out", f"{party}.csr", cwd=folder)  # fmt: skip
        run("openssl", "x509", "-req", "-in", f"{party}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-days", "2",
            "-CAcreateserial", "-extfile", "ext", "-out", f"{party}.pem", cwd=folder)  # fmt: skip
    shutil.copy(folder / "client.pem", folder / "cert.pem")
    shutil.copy(folder / "client-key.pem", folder / "key.pem")
    return folder


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_authenticates_both_sides(dockerd: DockerDaemons, tmp_path: Path):
    good, other, port = certificates(tmp_path, "good"), certificates(tmp_path, "other"), free_port()
    dockerd("h1")  # creates the directory of the daemons
    daemon = dockerd.new("h3")
    daemon.start(
        "--host", f"tcp://127.0.0.1:{port}", "--tlsverify", "--tlscacert", f"{good}/ca.pem",
        "--tlscert", f"{good}/server.pem", "--tlskey", f"{good}/server-key.pem",
    )  # fmt: skip
    daemon.ensure_image()
    url = f"tcp://127.0.0.1:{port}"
    try:
        asyncio.run(check_run(tmp_path / "a", daemon, url=url, tls=str(good)))
        asyncio.run(check_refused(tmp_path / "b", daemon, "h3", url=url, tls=str(other)))
        asyncio.run(check_refused(tmp_path / "c", daemon, "h3", url=url))
    finally:
        daemon.stop()


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """(port, directory with `key`, `known_hosts` and `no_hosts`) of an sshd that accepts the key."""
    if not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None:
        if os.environ.get("CI"):
            pytest.fail("no sshd; next: scripts/install-docker.sh")
        pytest.skip("no sshd here; next: scripts/install-docker.sh")
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "host"))
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / "key"))
    (folder / "authorized").write_text((folder / "key.pub").read_text())
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    (folder / "no_hosts").write_text("")
    (folder / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"StrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\nPidFile {folder}/pid\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(folder / "config")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield port, folder
    finally:
        server.terminate()
        server.wait(10)


def test_ssh_requires_a_known_host_key(dockerd: DockerDaemons, tmp_path: Path, sshd):
    port, folder = sshd
    daemon = dockerd("h1")
    url = f"ssh://root@127.0.0.1:{port}{daemon.socket}"
    options = {"url": url, "ssh_key": f"{folder}/key", "known_hosts": f"{folder}/known_hosts"}
    asyncio.run(check_run(tmp_path / "a", daemon, **options))
    asyncio.run(
        check_refused(tmp_path / "b", daemon, "[Hh]ost key", **{**options, "known_hosts": f"{folder}/no_hosts"})
    )
    assert (folder / "no_hosts").read_text() == ""
    daemon.clear()
