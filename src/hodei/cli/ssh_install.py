"""Installs the agent on a machine by SSH: copies one file, enrols with a token through stdin, starts it.

The token and every other secret travel through stdin, never on a command line. Values reach the remote shell quoted.
"""

from __future__ import annotations

import asyncio
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hodei.agent.bundle import bundle
from hodei.model.errors import HodeiError, InvalidInput

CONNECT_TIMEOUT_S = 20
STEP_TIMEOUT_S = 180
_TARGET = re.compile(r"(?:(?P<user>[A-Za-z0-9_][A-Za-z0-9_.-]{0,63})@)?(?P<machine>[A-Za-z0-9_.:-]{1,253})")
_UNIT = """\
[Unit]
Description=Hodei agent
After=network-online.target
Wants=network-online.target

[Service]
ExecStart={command}
Restart=always
RestartSec=2
KillMode=process

[Install]
WantedBy={target}
"""


class SshFailed(HodeiError):
    """The machine cannot be reached or used by SSH."""

    code = "SSH_FAILED"


@dataclass
class Installation:
    target: str
    url: str
    node: str = ""
    port: int | None = None
    identity: str = ""
    known_hosts: str = ""
    accept_new_host_key: bool = False
    home: str = ".hodei-agent"
    python: str = "python3"
    service: str = "auto"
    ca: str = ""
    insecure: bool = False
    label: tuple[str, ...] = ()
    taint: tuple[str, ...] = ()
    offline_ok: str = ""

    def __post_init__(self) -> None:
        found = _TARGET.fullmatch(self.target)
        if found is None or self.target.startswith("-"):
            raise InvalidInput(f"{self.target[:80]!r} is not USER@MACHINE")
        self.user, self.machine = found["user"], found["machine"]
        self.node = self.node or re.sub(r"[^a-z0-9.-]+", "-", self.machine.lower()).strip("-.")[:63]

    def join_words(self) -> list[str]:
        """Of the agent, without its program."""
        words = ["--home", self.home]
        for label in self.label:
            words += ["--label", label]
        for taint in self.taint:
            words += ["--taint", taint]
        words += ["--offline-ok", self.offline_ok] if self.offline_ok else []
        words += ["--ca", f"{self.home}/server-ca.pem"] if self.ca else []
        return words + (["--insecure"] if self.insecure else [])


def install(plan: Installation, token: str) -> str:
    """How the agent runs there: `under systemd`, `under systemd of the user` or `detached`."""
    try:
        import asyncssh
    except ImportError:
        raise SshFailed("asyncssh is not installed", hint="pip install 'hodei[hosts]'") from None
    try:
        return asyncio.run(_install(asyncssh, plan, token))
    except asyncssh.HostKeyNotVerifiable as error:
        raise SshFailed(
            f"the host key of {plan.machine} is not known: {error}",
            hint="connect once by ssh and compare its fingerprint, or use --accept-new-host-key",
            code="HOST_KEY_UNKNOWN",
        ) from None
    except (asyncssh.Error, OSError, TimeoutError) as error:
        text = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise SshFailed(f"{plan.target}: {text}", hint="try: ssh " + shlex.quote(plan.target)) from None


async def _install(asyncssh: Any, plan: Installation, token: str) -> str:
    options: dict[str, Any] = {"connect_timeout": CONNECT_TIMEOUT_S, "keepalive_interval": 15}
    options |= {"username": plan.user} if plan.user else {}
    options |= {"client_keys": [plan.identity]} if plan.identity else {}
    known = Path(plan.known_hosts or "~/.ssh/known_hosts").expanduser()
    if plan.accept_new_host_key:
        await _add_host_key(asyncssh, plan, known)
    # An empty list trusts nothing; without a file asyncssh would trust its own default, and None would trust everything.
    options["known_hosts"] = str(known) if known.exists() else asyncssh.import_known_hosts("")
    port = {"port": plan.port} if plan.port else {}
    async with asyncssh.connect(plan.machine, **port, **options) as ssh:
        return await _steps(ssh, plan, token)


async def _add_host_key(asyncssh: Any, plan: Installation, known: Path) -> None:
    """Only for a machine without any key so far: a changed key is refused by the connection."""
    text = known.read_text() if known.exists() else ""
    port = plan.port or 22
    matched = asyncssh.import_known_hosts(text).match(plan.machine, "", port)
    if any(matched[:2]):
        return
    async with asyncio.timeout(CONNECT_TIMEOUT_S):
        key = await asyncssh.get_server_host_key(plan.machine, port)
    if key is None:
        raise SshFailed(f"{plan.machine} shows no host key")
    name = plan.machine if port == 22 else f"[{plan.machine}]:{port}"
    known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with known.open("a") as file:
        file.write(
            f"{'' if text.endswith(chr(10)) or not text else chr(10)}{name} {key.export_public_key().decode().strip()}\n"
        )


async def _steps(ssh: Any, plan: Installation, token: str) -> str:
    home, quote = plan.home, shlex.quote
    await _run(ssh, f"{quote(plan.python)} -c 'import sys; sys.exit(sys.version_info < (3, 11))'",
               f"{plan.python} of version 3.11 or newer is missing there")  # fmt: skip
    full = (await _run(ssh, f"umask 077; mkdir -p {quote(home)} && cd {quote(home)} && pwd", "no home")).strip()
    plan.home = full
    await _write(ssh, f"{full}/hodei-agent.pyz", bundle())
    if plan.ca:
        await _write(ssh, f"{full}/server-ca.pem", Path(plan.ca).read_bytes())
    program = [plan.python, f"{full}/hodei-agent.pyz", "join"]
    enrol = [*program, plan.url, *plan.join_words(), "--node", plan.node, "--token-file", "-", "--enrol-only"]
    await _run(ssh, shlex.join(enrol), "the machine could not join", token + "\n")
    return await _start(ssh, plan, [*program, *plan.join_words()])


async def _start(ssh: Any, plan: Installation, program: list[str]) -> str:
    root = (await _run(ssh, "id -u", "no id")).strip() == "0"
    if plan.service != "detached":
        check = "systemctl show-environment" if root else "systemctl --user show-environment"
        if (await ssh.run(f"{check} >/dev/null 2>&1", timeout=STEP_TIMEOUT_S)).exit_status == 0:
            return await _start_by_systemd(ssh, plan, program, root=root)
        if plan.service == "systemd":
            raise SshFailed(f"systemd does not run on {plan.machine}", hint="use --service detached")
    log = shlex.quote(f"{plan.home}/agent.log")
    await _run(ssh, f"setsid -f {shlex.join(program)} >>{log} 2>&1 </dev/null", "the agent does not start")
    return "detached"


async def _start_by_systemd(ssh: Any, plan: Installation, program: list[str], *, root: bool) -> str:
    python = (await _run(ssh, f"command -v {shlex.quote(plan.python)}", f"there is no {plan.python}")).strip()
    words = " ".join('"' + word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$") + '"'
                     for word in [python, *program[1:]])  # fmt: skip
    unit = _UNIT.format(command=words, target="multi-user.target" if root else "default.target").encode()
    if root:
        await _write(ssh, "/etc/systemd/system/hodei-agent.service", unit)
        await _run(
            ssh, "systemctl daemon-reload && systemctl enable --now hodei-agent", "systemd does not start the agent"
        )
        return "under systemd"
    folder = (await _run(ssh, "mkdir -p ~/.config/systemd/user && cd ~/.config/systemd/user && pwd", "no home")).strip()
    await _write(ssh, f"{folder}/hodei-agent.service", unit)
    await ssh.run("loginctl enable-linger", timeout=STEP_TIMEOUT_S)  # else it ends with the last login; may be refused
    await _run(ssh, "systemctl --user daemon-reload && systemctl --user enable --now hodei-agent",
               "systemd does not start the agent")  # fmt: skip
    return "under systemd of the user"


async def _write(ssh: Any, path: str, data: bytes) -> None:
    """Replaces the file; works without SFTP too."""
    quoted = shlex.quote(path)
    done = await ssh.run(
        f"umask 077; cat >{quoted}.new && mv {quoted}.new {quoted}", input=data, encoding=None, timeout=STEP_TIMEOUT_S
    )
    if done.exit_status != 0:
        raise SshFailed(f"{path} cannot be written: {bytes(done.stderr).decode(errors='replace').strip()[:300]}")


async def _run(ssh: Any, command: str, problem: str, input: str = "") -> str:
    done = await ssh.run(command, input=input, timeout=STEP_TIMEOUT_S)
    if done.exit_status != 0:
        text = str(done.stderr).strip().splitlines()
        raise SshFailed(f"{problem}{': ' + text[-1][:300] if text else ''}")
    return str(done.stdout)
