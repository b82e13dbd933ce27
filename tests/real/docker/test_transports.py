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


async def runs_one(home: Path, daemon: Daemon, **host: object) -> None:
    backend = a_docker(home, daemon, hosts={daemon.name: host})
    await backend.open()
    try:
        desk = ReconnectingRecorder(backend, 60)
        (end,) = await desk.run(an_order(1, *sh("echo here; exit 3"), node=daemon.name))
        assert (end.state, end.exit_code) == ("failed", 3)
        assert await desk.log("1.0.1") == b"here\n"
    finally:
        await backend.close()


async def says_no(home: Path, daemon: Daemon, words: str, **host: object) -> None:
    backend = a_docker(home, daemon, hosts={daemon.name: host})
    try:
        with pytest.raises(BackendError, match=words):
            await backend.open()
    finally:
        await backend.close()


def certificates(place: Path, name: str) -> Path:
    """A new authority in `place`/`name`, a certificate for 127.0.0.1 and one for a client."""
    made = place / name
    made.mkdir()
    run("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", f"/CN=ca {name}",
        "-addext", "keyUsage=critical,keyCertSign,cRLSign",
        "-keyout", "ca-key.pem", "-out", "ca.pem", cwd=made)  # fmt: skip
    for who, usage in (("server", "serverAuth"), ("client", "clientAuth")):
        (made / "ext").write_text(f"subjectAltName=IP:127.0.0.1\nextendedKeyUsage={usage}\n")
        run("openssl", "req", "-newkey", "rsa:2048", "-nodes", "-subj", f"/CN={who}",
            "-keyout", f"{who}-key.pem", "-out", f"{who}.csr", cwd=made)  # fmt: skip
        run("openssl", "x509", "-req", "-in", f"{who}.csr", "-CA", "ca.pem", "-CAkey", "ca-key.pem", "-days", "2",
            "-CAcreateserial", "-extfile", "ext", "-out", f"{who}.pem", cwd=made)  # fmt: skip
    shutil.copy(made / "client.pem", made / "cert.pem")
    shutil.copy(made / "client-key.pem", made / "key.pem")
    return made


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
def test_tls_authenticates_both_sides(dockerd: DockerDaemons, tmp_path: Path):
    good, other, port = certificates(tmp_path, "good"), certificates(tmp_path, "other"), free_port()
    dockerd("h1")  # makes the place
    daemon = dockerd.new("h3")
    daemon.start(
        "--host", f"tcp://127.0.0.1:{port}", "--tlsverify", "--tlscacert", f"{good}/ca.pem",
        "--tlscert", f"{good}/server.pem", "--tlskey", f"{good}/server-key.pem",
    )  # fmt: skip
    daemon.ensure_image()
    url = f"tcp://127.0.0.1:{port}"
    try:
        asyncio.run(runs_one(tmp_path / "a", daemon, url=url, tls=str(good)))
        asyncio.run(says_no(tmp_path / "b", daemon, "h3", url=url, tls=str(other)))
        asyncio.run(says_no(tmp_path / "c", daemon, "h3", url=url))
    finally:
        daemon.stop()


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[tuple[int, Path]]:
    """(port, directory with `key`, `known_hosts` and `no_hosts`) of an sshd that lets in whoever has the key."""
    if not os.access(SSHD, os.X_OK) or shutil.which("ssh") is None:
        if os.environ.get("CI"):
            pytest.fail("no sshd; next: scripts/install-docker.sh")
        pytest.skip("no sshd here; next: scripts/install-docker.sh")
    place, port = tmp_path / "ssh", free_port()
    place.mkdir(mode=0o700)
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / "host"))
    run("ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(place / "key"))
    (place / "authorized").write_text((place / "key.pub").read_text())
    (place / "known_hosts").write_text(f"[127.0.0.1]:{port} {(place / 'host.pub').read_text()}")
    (place / "no_hosts").write_text("")
    (place / "config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {place}/host\nAuthorizedKeysFile {place}/authorized\n"
        f"StrictModes no\nPasswordAuthentication no\nUsePAM no\nPermitRootLogin yes\nPidFile {place}/pid\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    server = subprocess.Popen([SSHD, "-D", "-e", "-f", str(place / "config")], stderr=subprocess.DEVNULL)
    try:
        for _ in range(200):
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.05)
        yield port, place
    finally:
        server.terminate()
        server.wait(10)


def test_ssh_requires_a_known_host_key(dockerd: DockerDaemons, tmp_path: Path, sshd):
    port, place = sshd
    daemon = dockerd("h1")
    url = f"ssh://root@127.0.0.1:{port}{daemon.socket}"
    known = {"url": url, "ssh_key": f"{place}/key", "known_hosts": f"{place}/known_hosts"}
    asyncio.run(runs_one(tmp_path / "a", daemon, **known))
    asyncio.run(says_no(tmp_path / "b", daemon, "[Hh]ost key", **{**known, "known_hosts": f"{place}/no_hosts"}))
    assert (place / "no_hosts").read_text() == ""
    daemon.clear()
