"""One run in the agent: its order, its state, its end, and their records in the journal. No system calls here."""

from __future__ import annotations

import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from signal import Signals
from typing import Any

from hodei.agent.limits import Limits
from hodei.agent.probes import BadHealthCheck, FileStat, HealthCheck
from hodei.agent.spawn import CHECKPOINT
from hodei.agent.usage import Usage
from hodei.supervision import HealthCounter, StopPlan, checkpoint_signal, classify_end, oom_reason

LOG_CAP = 64 << 20
GRACE_MS = 10_000
HOOK_TIMEOUT_MS = 30_000
CLAIM_LIMIT = 4096
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INSTALLATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
# File timestamps may lag behind the clock by so much.
STAMP_LAG_MS = 10

Observation = dict[str, Any]
Record = dict[str, Any]
END_STATES = ("succeeded", "failed", "stopped", "lost")


class BadOrder(ValueError):
    """The order can never be carried out; the message says why."""


class BadHook(ValueError):
    """The checkpoint hook cannot be used; the message says why. A stop continues without it."""


@dataclass(frozen=True)
class Hook:
    """How a run saves its work: a signal to it, or a command inside it. `timeout_ms` bounds the wait."""

    signal: str = ""
    command: tuple[str, ...] = ()
    timeout_ms: int = HOOK_TIMEOUT_MS

    @property
    def number(self) -> Signals:
        return Signals[f"SIG{self.signal}"]

    @classmethod
    def from_order(cls, order: Mapping[str, Any] | None) -> Hook | None:
        """None without a signal or command. A timeout of 0 means the default."""
        if not order or not isinstance(order, Mapping):
            return None
        name, command, timeout_ms = order.get("signal") or "", order.get("command") or [], order.get("timeout_ms") or 0
        if not isinstance(timeout_ms, int) or timeout_ms < 0:
            raise BadHook("its timeout must be a whole number from 0")
        if command:
            if not isinstance(command, list) or not all(isinstance(w, str) and "\0" not in w for w in command):
                raise BadHook("its command is not a list of words")
            return cls("", tuple(command), timeout_ms or HOOK_TIMEOUT_MS)
        if not name:
            return None
        try:
            return cls(checkpoint_signal(str(name)), (), timeout_ms or HOOK_TIMEOUT_MS)
        except ValueError as error:
            raise BadHook(str(error)) from None

    def as_order(self) -> dict[str, Any]:
        """What `from_order` reads; also the form in the journal."""
        return {"signal": self.signal, "command": list(self.command), "timeout_ms": self.timeout_ms}


class Run:
    """States: claimed, running (`pid`), ended (`end`). `key` is unique over all installations.

    `boot`: the boot of the host in which it was claimed or started, "" if unknown. `claim`: its claim as it is in the
    journal, until it starts.
    `checkpoint_file` is probed regularly if `checkpoint_watched`; `checkpoint_stat` is the last result. `stop`: the stop under
    way, in ms of the boot clock; `hook`: how it saves its work first; `hook_started`, `hook_before` (the checkpoint file at
    that time). `save_hook`: for checkpoints between. `health_check` with `health_state`, `health_counter` and
    `heartbeat_stat`; `idle_ms`: how long it may be idle. `usage`: the largest amounts measured while it runs.
    """

    __slots__ = (
        "argv", "boot", "cgroups", "checkpoint_file", "checkpoint_ms", "checkpoint_stat", "checkpoint_watched", "claim",
        "claimed_ms", "directory", "end", "env", "grace_ms", "health_check", "health_counter", "health_state",
        "heartbeat_stat", "hook", "hook_before", "hook_started", "idle_ms", "installation", "key", "limits", "log_cap", "name",
        "pid", "save_every_ms", "save_hook", "started_boot_ms", "started_ms", "stop", "timeout_ms", "timers", "usage",
        "workdir",
    )  # fmt: skip

    def __init__(self, installation: str, name: str, directory: str) -> None:
        self.installation, self.name, self.directory = installation, name, directory
        self.key = f"{installation}/{name}"
        self.argv: tuple[str, ...] = ()
        self.env: dict[str, str] = {}
        self.workdir = "/"
        self.limits = Limits()
        self.cgroups: tuple[str, ...] = ()
        self.timeout_ms, self.grace_ms, self.log_cap = 0, GRACE_MS, LOG_CAP
        self.claimed_ms = self.started_ms = self.started_boot_ms = 0
        self.boot = self.claim = ""
        self.pid = 0
        self.stop: StopPlan | None = None
        self.hook: Hook | None = None
        self.hook_started = False
        self.hook_before: FileStat | None = None
        self.checkpoint_file, self.checkpoint_watched = f"{directory}/{CHECKPOINT}", False
        self.checkpoint_ms = 0
        self.checkpoint_stat: FileStat | None = None
        self.save_hook: Hook | None = None
        self.save_every_ms = self.idle_ms = 0
        self.health_check: HealthCheck | None = None
        self.health_counter, self.health_state = HealthCounter(), ""
        self.heartbeat_stat: FileStat | None = None
        self.timers: list[Any] = []
        self.usage: Usage = {}
        self.end: Observation | None = None

    @property
    def live(self) -> bool:
        return self.pid != 0 and self.end is None

    def observation(self) -> Observation:
        """Its state as the server gets it."""
        if self.end is not None:
            return self.end
        if self.pid:
            seen: Observation = {"run": self.name, "state": "running", "at_ms": self.started_ms}
            if self.health_state:
                seen["health"] = self.health_state
            return self._with_checkpoint(seen)
        return {"run": self.name, "state": "placed", "at_ms": self.claimed_ms}

    def _with_checkpoint(self, observation: Observation) -> Observation:
        if self.checkpoint_ms:
            observation["checkpoint_ms"] = self.checkpoint_ms
        return observation

    def update_checkpoint(self, seen: FileStat | None, now_ms: int) -> bool:
        """Whether a probe of the file shows a new checkpoint. A file that is older than the run is not its work."""
        if seen is None or seen == self.checkpoint_stat:
            return False
        self.checkpoint_stat = seen
        at_ms = min(seen[0] // 1_000_000, now_ms)
        if at_ms < self.claimed_ms - STAMP_LAG_MS or at_ms <= self.checkpoint_ms:
            return False
        self.checkpoint_ms = at_ms
        return True

    def apply_order(self, order: Mapping[str, Any], base_env: Mapping[str, str]) -> None:
        """Fill in what the server orders. BadOrder if that can never work."""
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
        file = order.get("checkpoint_file")
        if file is not None:
            if not isinstance(file, str) or "\0" in file:
                raise BadOrder("the checkpoint file is not a valid path")
            self.checkpoint_watched = True
            self.checkpoint_file = posixpath.join(self.workdir, file) if file else self.checkpoint_file
        self.env["HODEI_CHECKPOINT_FILE"] = self.checkpoint_file
        try:
            self.save_hook = Hook.from_order(order.get("save"))
            self.health_check = HealthCheck.from_order(order.get("health"))
        except (BadHook, BadHealthCheck) as error:
            raise BadOrder(str(error)) from None
        self.save_every_ms, self.idle_ms = _number(order, "save_every_ms"), _number(order, "idle_ms")
        self.limits = Limits(
            cpu_milli=_number(order, "cpu_milli"),
            memory_bytes=_number(order, "memory_bytes"),
            cpus=tuple(order.get("cpus") or ()),
            cpu_shares=_number(order, "cpu_shares"),
            oom_score_adj=_oom_score_adj(order),
        )
        self.timeout_ms = _number(order, "timeout_ms")
        self.grace_ms = _number(order, "grace_ms", GRACE_MS)
        self.log_cap = max(4096, _number(order, "log_cap", LOG_CAP))

    def describe_end(
        self, *, code: int | None, error: str, oom: bool, at_ms: int, usage: Usage | None = None
    ) -> Observation:
        """The last observation of the run. `error`: why its command was not started."""
        observation: Observation = {"run": self.name, "state": "failed", "at_ms": at_ms}
        if self.started_ms:
            observation["started_ms"] = self.started_ms
        if error:
            return self._with_checkpoint(observation | {"reason_code": "error", "reason": error})
        if usage:
            observation["usage"] = usage
        if code is not None:
            observation["exit_code"] = code
        end = classify_end(code, self.stop, oom=oom_reason(self.limits.memory_bytes) if oom else "")
        observation["state"] = end.state
        if end.reason_code:
            observation["reason_code"] = end.reason_code
        if end.reason:
            observation["reason"] = end.reason
        return self._with_checkpoint(observation)

    def claimed_record(self) -> Record:
        record: Record = {"step": "claimed", "run": self.key, "at": self.claimed_ms, "grace": self.grace_ms}
        if self.boot:
            record["boot"] = self.boot
        if self.timeout_ms:
            record["timeout"] = self.timeout_ms
        if self.log_cap != LOG_CAP:
            record["cap"] = self.log_cap
        if self.cgroups:
            record |= {"cgroups": self.cgroups, "memory": self.limits.memory_bytes}
        if self.workdir != "/":
            record["workdir"] = self.workdir
        if self.checkpoint_watched:
            record["checkpoint_file"] = self.checkpoint_file
        if self.save_hook is not None:
            record |= {"save": self.save_hook.as_order(), "save_every": self.save_every_ms}
        if self.health_check is not None:
            record["health"] = self.health_check.as_order()
        if self.idle_ms:
            record["idle"] = self.idle_ms
        return record

    def wrapper_claim(self) -> str:
        """The claim for the wrapper's command line, from which a live run can be recovered without the journal; without
        checkpoints and health check if it would be too long."""
        if len(self.claim) <= CLAIM_LIMIT:
            return self.claim
        dropped = ("save", "health")
        text = json.dumps({name: value for name, value in self.claimed_record().items() if name not in dropped})
        return text if len(text) <= CLAIM_LIMIT else ""

    def started_record(self) -> Record:
        return {
            "step": "started", "run": self.key, "at": self.started_ms, "pid": self.pid,
            "up": self.started_boot_ms, "boot": self.boot,
        }  # fmt: skip

    def checkpoint_record(self) -> Record:
        return {"step": "saved", "run": self.key, "at": self.checkpoint_ms}

    def stop_record(self, stop: StopPlan) -> Record:
        record: Record = {
            "step": "stopping", "run": self.key, "code": stop.code or "stop", "reason": stop.reason,
            "kill_at": stop.kill_at, "grace": stop.grace,
        }  # fmt: skip
        if self.hook is not None:
            record |= {"hook": self.hook.as_order(), "begun": self.hook_started, "until": stop.save_until}
            record["before"] = self.hook_before
        if stop.note:
            record["note"] = stop.note
        return record

    def end_record(self) -> Record:
        return {"step": "done", "run": self.key, "end": self.end}

    def replay(self, record: Mapping[str, Any]) -> None:
        """Restore the state that a record of the journal describes."""
        match record["step"]:
            case "claimed":
                self.claimed_ms, self.grace_ms = record["at"], record["grace"]
                self.boot = record.get("boot", "")
                self.timeout_ms, self.log_cap = record.get("timeout", 0), record.get("cap", LOG_CAP)
                self.cgroups = tuple(record.get("cgroups", ()))
                self.limits = Limits(memory_bytes=record.get("memory", 0))
                self.workdir = record.get("workdir", "/")
                if "checkpoint_file" in record:
                    self.checkpoint_file, self.checkpoint_watched = record["checkpoint_file"], True
                self.save_hook, self.save_every_ms = Hook.from_order(record.get("save")), record.get("save_every", 0)
                self.idle_ms = record.get("idle", 0)
                try:
                    self.health_check = HealthCheck.from_order(record.get("health"))
                except BadHealthCheck:
                    self.health_check = None  # the address no longer belongs to this host
            case "started":
                self.started_ms, self.pid = record["at"], record["pid"]
                self.started_boot_ms, self.boot = record["up"], record["boot"]
            case "stopping":
                code = record["code"] if record["code"] != "stop" else ""
                self.stop = StopPlan(code, record["reason"], record["kill_at"], record.get("until", 0))
                self.stop.grace, self.stop.note = record.get("grace", 0), record.get("note", "")
                self.hook, self.hook_started = Hook.from_order(record.get("hook")), record.get("begun", False)
                self.stop.saving = self.hook is not None
                before = record.get("before")
                self.hook_before = (before[0], before[1], before[2]) if before else None
            case "saved":
                self.checkpoint_ms = record["at"]
            case "done":
                self.end = _checked_end(self.name, record["end"])


def _checked_end(name: str, end: Observation) -> Observation:
    """ValueError or KeyError if it is damaged: older journals have no checksums."""
    code = end.get("exit_code")
    sound = end["run"] == name and end["state"] in END_STATES and isinstance(end["at_ms"], int)
    if not sound or not (code is None or isinstance(code, int)):
        raise ValueError("not the end of a run")
    return end


def check_installation(name: object) -> str:
    if not isinstance(name, str) or not _INSTALLATION.fullmatch(name):
        raise BadOrder("an installation's id must consist of letters, digits, - and _")
    return name


def check_run_name(name: object) -> str:
    if not isinstance(name, str) or not _RUN_NAME.fullmatch(name):
        raise BadOrder("a run's id must consist of letters, digits, dots, - and _")
    return name


def _number(order: Mapping[str, Any], name: str, default: int = 0) -> int:
    value = order.get(name)
    if value is None:
        return default
    if not isinstance(value, int) or value < 0:
        raise BadOrder(f"{name} must be a whole number from 0")
    return value


def _oom_score_adj(order: Mapping[str, Any]) -> int | None:
    value = order.get("oom_score_adj")
    if value is not None and (not isinstance(value, int) or not -1000 <= value <= 1000):
        raise BadOrder("oom_score_adj must be a whole number from -1000 to 1000")
    return value
