"""`hodei host add` against a real SSH server on the loopback."""

from __future__ import annotations

import getpass
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_host import agent_pid, alive
from ports import free_port
from real.installation import DEADLINE_S, Installation, until
from real.test_joined_hosts import CONFIG, audit, node_state

SSHD = Path("/usr/sbin/sshd")
pytestmark = pytest.mark.real


class SshServer:
    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        folder.mkdir(mode=0o700)
        for key in ("host", "user", "other"):
            subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
        (folder / "authorized").write_text((folder / "user.pub").read_text())
        (folder / "config").write_text(
            f"Port {self.port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
            f"PidFile {folder}/pid\nStrictModes no\nUsePAM no\nPermitRootLogin prohibit-password\n"
        )
        if os.geteuid() == 0:
            Path("/run/sshd").mkdir(exist_ok=True)
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "config"], stdout=log, stderr=log)
        until(lambda: "listening" in (folder / "log").read_text(), "sshd listens")

    def know(self, key: str = "host") -> Path:
        """A file of known hosts with this key."""
        text = (self.folder / f"{key}.pub").read_text()
        known = self.folder / "known_hosts"
        known.write_text(f"[127.0.0.1]:{self.port} {text}")
        return known

    def close(self) -> None:
        self.process.terminate()
        self.process.wait(DEADLINE_S)


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[SshServer]:
    if not SSHD.exists():
        reason = "no sshd: make hosts"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    server = SshServer(tmp_path / "ssh")
    yield server
    server.close()


def test_a_host_is_added_by_ssh_and_its_key_is_checked(
    installation: Installation, sshd: SshServer, tmp_path: Path
) -> None:
    installation.configure(CONFIG.format(lost_after="60s")).up()
    home = tmp_path / "far"
    words = [
        "host", "add", f"{getpass.getuser()}@127.0.0.1", "--backend", "lab", "--url", installation.address,
        "--node", "lab-7", "--port", str(sshd.port), "--identity", str(sshd.folder / "user"), "--home", str(home),
        "--python", sys.executable, "--service", "detached", "--label", "disk=ssd",
    ]  # fmt: skip
    known = sshd.folder / "known_hosts"
    unknown = installation.hodei(*words, "--known-hosts", str(known))
    assert unknown.code != 0
    assert "--accept-new-host-key" in unknown.err
    changed = installation.hodei(*words, "--known-hosts", str(sshd.know("other")), "--accept-new-host-key")
    assert changed.code != 0
    assert not home.exists()
    known.unlink()
    try:
        output = installation.ok(*words, "--known-hosts", str(known), "--accept-new-host-key").out
        assert "node lab-7 joined backend lab; the agent runs detached" in output
        until(lambda: node_state(installation, "lab-7") == "ready", "the host is ready")
        (ended,) = installation.ended(installation.submit("sh", "-c", "exit 9", node_selector={"disk": "ssd"}))
        assert (ended.job.exit_code, ended.runs[0].node) == (9, "lab-7")
        assert "lab-7" in installation.ok("host", "list").out
        assert len(installation.ok("agent", "token", "list", "-o", "json").json) == 1
        assert ("admin", "agent.token", "") in audit(installation)
        assert known.read_text().startswith(f"[127.0.0.1]:{sshd.port} ssh-ed25519 ")
        installation.ok("host", "remove", "lab-7")
        until(lambda: not node_state(installation, "lab-7"), "the host is removed")
    finally:
        if pid := agent_pid(home) if (home / "lock").exists() else 0:
            os.kill(pid, signal.SIGTERM)
            until(lambda: not alive(pid), "the agent has stopped")
