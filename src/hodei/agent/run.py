"""One run as the agent sees it: what was asked for, where it stands, how it ended. No system calls here."""

from __future__ import annotations

import re
import signal
from collections.abc import Mapping
from typing import Any

from hodei.agent.limits import Limits

LOG_CAP = 64 << 20
GRACE_MS = 10_000
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INSTALLATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

Observation = dict[str, Any]


class BadOrder(ValueError):
    """The order can never be carried out; the message says why."""


def check_installation(name: object) -> str:
    if not isinstance(name, str) or not _INSTALLATION.fullmatch(name):
        raise BadOrder("the installation's id must be letters, digits, - and _")
    return name


class Run:
    """`state`: claimed, running, or one of the ends in `observation`. `key` is unique over all installations."""

    __slots__ = (
        "argv", "cgroups", "claimed_ms", "directory", "end", "env", "grace_ms", "installation", "key",
        "kill_at_boot_ms", "limits", "log_cap", "name", "pid", "started_boot_ms", "started_ms", "stop_code",
        "stop_reason", "timeout_ms", "timers", "workdir",
    )  # fmt: skip

    def __init__(self, installation: str, name: str, directory: str) -> None:
        self.installation, self.name, self.directory = installation, name, directory
        self.key = f"{installation}/{name}"
        self.argv: tuple[str, ...] = ()
        self.env: Mapping[str, str] = {}
        self.workdir = "/"
        self.limits = Limits()
        self.cgroups: tuple[str, ...] = ()
        self.timeout_ms, self.grace_ms, self.log_cap = 0, GRACE_MS, LOG_CAP
        self.claimed_ms = self.started_ms = self.started_boot_ms = 0
        self.pid = 0
        self.stop_code = self.stop_reason = ""
        self.kill_at_boot_ms = 0
        self.timers: list[Any] = []
        self.end: Observation | None = None

    @property
    def live(self) -> bool:
        """It has been given birth to, and its end has not been seen."""
        return self.pid != 0 and self.end is None

    def observation(self) -> Observation:
        """How it stands, in the words of the server."""
        if self.end is not None:
            return self.end
        if self.pid:
            return {"run": self.name, "state": "running", "at_ms": self.started_ms}
        return {"run": self.name, "state": "placed", "at_ms": self.claimed_ms}

    def take_orders(self, order: Mapping[str, Any], base_env: Mapping[str, str]) -> None:
        """Fill in what the server asks for. BadOrder if that can never work."""
        argv, env = order.get("argv"), order.get("env") or {}
        if not isinstance(argv, list) or not argv or not all(isinstance(word, str) for word in argv):
            raise BadOrder("the command is empty")
        if any("\0" in word for word in argv):
            raise BadOrder("the command holds a NUL character")
        for name, value in env.items():
            if not name or "=" in name or "\0" in name or not isinstance(value, str) or "\0" in value:
                raise BadOrder(f"the environment variable {name[:80]!r} cannot be set")
        self.argv = tuple(argv)
        self.env = {**base_env, **env}
        workdir = order.get("workdir") or base_env.get("HOME") or "/"
        self.workdir = workdir if workdir.startswith("/") else f"{base_env.get('HOME') or '/'}/{workdir}"
        if "\0" in self.workdir:
            raise BadOrder("the working directory holds a NUL character")
        self.limits = Limits(
            cpu_milli=_whole(order, "cpu_milli"),
            memory_bytes=_whole(order, "memory_bytes"),
            cpus=tuple(order.get("cpus") or ()),
        )
        self.timeout_ms = _whole(order, "timeout_ms")
        self.grace_ms = _whole(order, "grace_ms", GRACE_MS)
        self.log_cap = max(4096, _whole(order, "log_cap", LOG_CAP))

    def ended(self, *, code: int | None, error: str, oom: bool, at_ms: int) -> Observation:
        """The end in the server's words: our own doing first, then the system's, then the command's."""
        end: Observation = {"run": self.name, "state": "failed", "at_ms": at_ms}
        if code is not None:
            end["exit_code"] = code
        if error:
            end |= {"reason_code": "error", "reason": error}
            end.pop("exit_code", None)
        elif self.stop_code == "stop":
            end |= {"state": "stopped", "reason": self.stop_reason}
        elif self.stop_code == "timeout":
            end |= {"reason_code": "timeout", "reason": self.stop_reason}
        elif code is None:
            end |= {"state": "lost", "reason_code": "lost", "reason": "it is gone, and its exit code with it"}
        elif oom and code != 0:
            end |= {
                "reason_code": "oom",
                "reason": f"it went over its memory limit of {self.limits.memory_bytes} bytes",
            }
        elif code == 0:
            end["state"] = "succeeded"
        elif name := _signal_name(code - 128):
            end |= {"reason_code": "killed", "reason": f"it was ended by {name}"}
        else:
            end["reason"] = f"exit code {code}"
        return end

    # ------------------------------------------------------------------------------------------- journal

    def claimed_step(self) -> dict[str, Any]:
        step: dict[str, Any] = {"step": "claimed", "run": self.key, "at": self.claimed_ms, "grace": self.grace_ms}
        if self.timeout_ms:
            step["timeout"] = self.timeout_ms
        if self.log_cap != LOG_CAP:
            step["cap"] = self.log_cap
        if self.cgroups:
            step |= {"cgroups": self.cgroups, "memory": self.limits.memory_bytes}
        if self.workdir != "/":
            step["workdir"] = self.workdir
        return step

    def started_step(self, boot: str) -> dict[str, Any]:
        return {
            "step": "started", "run": self.key, "at": self.started_ms, "pid": self.pid,
            "up": self.started_boot_ms, "boot": boot,
        }  # fmt: skip

    def stopping_step(self) -> dict[str, Any]:
        return {
            "step": "stopping", "run": self.key, "code": self.stop_code, "reason": self.stop_reason,
            "kill_at": self.kill_at_boot_ms,
        }  # fmt: skip

    def done_step(self) -> dict[str, Any]:
        return {"step": "done", "run": self.key, "end": self.end}

    def recall(self, step: Mapping[str, Any]) -> None:
        """Take over what a step in the journal says."""
        match step["step"]:
            case "claimed":
                self.claimed_ms, self.grace_ms = step["at"], step["grace"]
                self.timeout_ms, self.log_cap = step.get("timeout", 0), step.get("cap", LOG_CAP)
                self.cgroups = tuple(step.get("cgroups", ()))
                self.limits = Limits(memory_bytes=step.get("memory", 0))
                self.workdir = step.get("workdir", "/")
            case "started":
                self.started_ms, self.pid = step["at"], step["pid"]
                self.started_boot_ms = step["up"]
            case "stopping":
                self.stop_code, self.stop_reason = step["code"], step["reason"]
                self.kill_at_boot_ms = step["kill_at"]
            case "done":
                self.end = step["end"]


def check_run_name(name: object) -> str:
    if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
        raise BadOrder("a run's id must be letters, digits, dots, - and _")
    return name


def _whole(order: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = order.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or value < 0:
        raise BadOrder(f"{name} must be a whole number from 0 on")
    return value


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
