"""A Docker host behind ssh: one ssh process forwards a socket in a private directory to the socket over there.

Arguments only, no shell on this side and no command on the other. The host's key must be known beforehand: a key that is
new or other than before ends the attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from urllib.parse import unquote, urlsplit

from hodei.backends.docker.settings import Host
from hodei.model.errors import BackendError

FAR_SOCKET = "/var/run/docker.sock"
CONNECT_S = 8


def ssh_command(host: Host, near: Path) -> list[str]:
    url = urlsplit(host.url)
    far = unquote(url.path) if len(url.path) > 1 else FAR_SOCKET
    options = {
        "BatchMode": "yes",
        "StrictHostKeyChecking": "yes",
        "ConnectTimeout": str(CONNECT_S),
        "ExitOnForwardFailure": "yes",
        "StreamLocalBindMask": "0177",
        "StreamLocalBindUnlink": "yes",
        "ServerAliveInterval": "5",
        "ServerAliveCountMax": "3",
        "ControlMaster": "no",
        "ControlPath": "none",
        "PermitLocalCommand": "no",
        "ForwardAgent": "no",
    }
    if host.known_hosts:
        options |= {"UserKnownHostsFile": host.known_hosts, "GlobalKnownHostsFile": "/dev/null"}
    if host.ssh_key:
        options |= {"IdentityFile": host.ssh_key, "IdentitiesOnly": "yes"}
    command = ["ssh", "-N", "-T"]
    for name, value in options.items():
        command += ["-o", f"{name}={value}"]
    command += ["-L", f"{near}:{far}"]
    if url.port:
        command += ["-p", str(url.port)]
    if url.username:
        command += ["-l", unquote(url.username)]
    return [*command, "--", url.hostname or ""]


class Tunnel:
    """`open` makes the near end; an ssh that has died is started again by the next `open`."""

    def __init__(self, host: Host) -> None:
        self._host = host
        self._place = ""
        self._ssh: asyncio.subprocess.Process | None = None

    @property
    def socket(self) -> Path:
        if not self._place:
            self._place = tempfile.mkdtemp(prefix="hodei-ssh-")  # 0700, ours alone
        return Path(self._place) / "docker.sock"

    async def open(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            return
        near = self.socket
        with contextlib.suppress(FileNotFoundError):
            near.unlink()
        try:
            self._ssh = await asyncio.create_subprocess_exec(
                *ssh_command(self._host, near),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except OSError as error:
            raise BackendError(f"ssh cannot be started: {error.strerror}", hint="install openssh-client") from None
        for _ in range(CONNECT_S * 20 + 20):
            if near.exists():
                return
            if self._ssh.returncode is not None:
                break
            await asyncio.sleep(0.05)
        words = await self._last_words()
        await self._end()
        raise BackendError(
            f"ssh to {self._host.name} failed: {words or 'no answer'}",
            hint=f"see what `ssh {urlsplit(self._host.url).hostname}` says; its host key must be in known_hosts",
        )

    async def _last_words(self) -> str:
        if self._ssh is None or self._ssh.stderr is None or self._ssh.returncode is None:
            return ""
        said = (await self._ssh.stderr.read(4096)).decode(errors="replace").strip().splitlines()
        return "; ".join(said[-2:])[:300]

    async def _end(self) -> None:
        if self._ssh is not None and self._ssh.returncode is None:
            self._ssh.kill()
            await self._ssh.wait()
        self._ssh = None

    async def close(self) -> None:
        await self._end()
        if self._place:
            shutil.rmtree(self._place, ignore_errors=True)
            self._place = ""
