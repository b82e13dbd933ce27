"""One run as the agent sees it: what was asked for, where it stands, how it ended. No system calls here."""

from __future__ import annotations

import json
import posixpath
import re
import signal
from collections.abc import Mapping
from typing import Any

from hodei.agent.health import BadHealth, Health
from hodei.agent.journal import MARK
from hodei.agent.limits import Limits
from hodei.agent.probes import Seen
from hodei.agent.spawn import BadHook, Hook
from hodei.supervision import HealthCounter

LOG_CAP = 64 << 20
GRACE_MS = 10_000
CLAIM_LIMIT = 4096
_RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_INSTALLATION = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")

# Files are stamped by a clock that may lag behind ours by so much.
STAMP_LAG_MS = 10

Observation = dict[str, Any]
ENDS = ("succeeded", "failed", "stopped", "lost")


class BadOrder(ValueError):
    """The order can never be carried out; the message says why."""


def check_installation(name: object) -> str:
    if not isinstance(name, str) or not _INSTALLATION.fullmatch(name):
        raise BadOrder("the installation's id must be letters, digits, - and _")
    return name


class Run:
    """`state`: claimed, running, or one of the ends in `observation`. `key` is unique over all installations.

    `boot`: in which boot of the host it was claimed or started, "" if that is not known. `claim`: its claim as it is in the
    journal, until it is born.
    `checkpoint_file` is looked at now and then if `watched`; `seen` is what was there last. While a stop waits for the
    work to be saved, `hook` is set; `hook_begun` when that is on its way (`hook_before`: how the file stood then),
    `hook_note` when it went wrong. `save_hook` is for saving in between, `health` says how to look whether it is well
    (`health_state`, `health_counter`, `heartbeat` as last seen), `idle_ms` how long it may do nothing.
    """

    __slots__ = (
        "argv", "boot", "cgroups", "checkpoint_file", "checkpoint_ms", "claim", "claimed_ms", "directory", "end", "env", "grace_ms",
        "health", "health_counter", "health_state", "heartbeat", "hook", "hook_before", "hook_begun", "hook_note",
        "hook_until_boot_ms", "idle_ms", "installation", "key", "kill_at_boot_ms", "limits", "log_cap", "name", "pid",
        "save_every_ms", "save_hook", "seen", "started_boot_ms", "started_ms", "stop_code", "stop_grace_ms", "stop_reason",
        "timeout_ms", "timers", "watched", "workdir",
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
        self.stop_code = self.stop_reason = ""
        self.kill_at_boot_ms = self.stop_grace_ms = 0
        self.hook: Hook | None = None
        self.hook_begun, self.hook_note, self.hook_until_boot_ms = False, "", 0
        self.checkpoint_file, self.watched, self.checkpoint_ms = f"{directory}/{MARK}", False, 0
        self.seen: Seen | None = None
        self.hook_before: Seen | None = None
        self.save_hook: Hook | None = None
        self.save_every_ms = self.idle_ms = 0
        self.health_counter = HealthCounter()
        self.health: Health | None = None
        self.health_state = ""
        self.heartbeat: Seen | None = None
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
            seen: Observation = {"run": self.name, "state": "running", "at_ms": self.started_ms}
            if self.health_state:
                seen["health"] = self.health_state
            return self._with_checkpoint(seen)
        return {"run": self.name, "state": "placed", "at_ms": self.claimed_ms}

    def _with_checkpoint(self, observation: Observation) -> Observation:
        if self.checkpoint_ms:
            observation["checkpoint_ms"] = self.checkpoint_ms
        return observation

    def saved(self, seen: Seen | None, now_ms: int) -> bool:
        """The checkpoint file stands like this. True if it says that work was saved since we last knew.
        What was there before the run says nothing about the run's own work."""
        if seen is None or seen == self.seen:
            return False
        self.seen = seen
        at_ms = min(seen[0] // 1_000_000, now_ms)
        if at_ms < self.claimed_ms - STAMP_LAG_MS or at_ms <= self.checkpoint_ms:
            return False
        self.checkpoint_ms = at_ms
        return True

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
        file = order.get("checkpoint_file")
        if file is not None:
            if not isinstance(file, str) or "\0" in file:
                raise BadOrder("the checkpoint's file can not be a file's name")
            self.watched = True
            self.checkpoint_file = posixpath.join(self.workdir, file) if file else self.checkpoint_file
        self.env["HODEI_CHECKPOINT_FILE"] = self.checkpoint_file
        self._take_care(order)
        self.limits = Limits(
            cpu_milli=_whole(order, "cpu_milli"),
            memory_bytes=_whole(order, "memory_bytes"),
            cpus=tuple(order.get("cpus") or ()),
            cpu_shares=_whole(order, "cpu_shares"),
            oom_score_adj=_oom_score_adj(order),
        )
        self.timeout_ms = _whole(order, "timeout_ms")
        self.grace_ms = _whole(order, "grace_ms", GRACE_MS)
        self.log_cap = max(4096, _whole(order, "log_cap", LOG_CAP))

    def _take_care(self, order: Mapping[str, Any]) -> None:
        """What is to be done beside it while it runs."""
        try:
            self.save_hook, self.health = Hook.from_order(order.get("save")), Health.from_order(order.get("health"))
        except (BadHook, BadHealth) as error:
            raise BadOrder(str(error)) from None
        self.save_every_ms, self.idle_ms = _whole(order, "save_every_ms"), _whole(order, "idle_ms")

    def ended(self, *, code: int | None, error: str, oom: bool, at_ms: int) -> Observation:
        """The end in the server's words: our own doing first, then the system's, then the command's."""
        end: Observation = {"run": self.name, "state": "failed", "at_ms": at_ms}
        if self.started_ms:
            end["started_ms"] = self.started_ms
        if code is not None:
            end["exit_code"] = code
        if error:
            end |= {"reason_code": "error", "reason": error}
            end.pop("exit_code", None)
        elif self.hook is not None and code == 0:
            end["state"] = "succeeded"  # it was asked to save its work, not to end: that is its own doing
        elif self.stop_code == "stop":
            end |= {"state": "stopped", "reason": self._stopped_because}
        elif self.stop_code:
            end |= {"reason_code": self.stop_code, "reason": self._stopped_because}
        elif code is None:
            end |= {"state": "lost", "reason_code": "lost", "reason": "it is gone, and its exit code with it"}
        elif oom and code != 0:
            end |= {
                "reason_code": "oom",
                "reason": f"it went over its memory limit of {self.limits.memory_bytes} bytes",
            }
        elif code == 0:
            end["state"] = "succeeded"
        elif name := signal_name(code - 128):
            end |= {"reason_code": "killed", "reason": f"it was ended by {name}"}
        else:
            end["reason"] = f"exit code {code}"
        return self._with_checkpoint(end)

    @property
    def _stopped_because(self) -> str:
        return "; ".join(text for text in (self.stop_reason, self.hook_note) if text)

    # ------------------------------------------------------------------------------------------- journal

    def claimed_step(self) -> dict[str, Any]:
        step: dict[str, Any] = {"step": "claimed", "run": self.key, "at": self.claimed_ms, "grace": self.grace_ms}
        if self.boot:
            step["boot"] = self.boot
        if self.timeout_ms:
            step["timeout"] = self.timeout_ms
        if self.log_cap != LOG_CAP:
            step["cap"] = self.log_cap
        if self.cgroups:
            step |= {"cgroups": self.cgroups, "memory": self.limits.memory_bytes}
        if self.workdir != "/":
            step["workdir"] = self.workdir
        if self.watched:
            step["checkpoint_file"] = self.checkpoint_file
        if self.save_hook is not None:
            step |= {"save": self.save_hook.as_order(), "save_every": self.save_every_ms}
        if self.health is not None:
            step["health"] = self.health.as_order()
        if self.idle_ms:
            step["idle"] = self.idle_ms
        return step

    def carried_claim(self) -> str:
        """What the wrapper carries, so that a living run can be taken over from it alone: the claim as it is in the journal,
        without what is done beside the run if that makes it too long."""
        if len(self.claim) <= CLAIM_LIMIT:
            return self.claim
        left_out = ("save", "health")
        text = json.dumps({name: value for name, value in self.claimed_step().items() if name not in left_out})
        return text if len(text) <= CLAIM_LIMIT else ""

    def started_step(self) -> dict[str, Any]:
        return {
            "step": "started", "run": self.key, "at": self.started_ms, "pid": self.pid,
            "up": self.started_boot_ms, "boot": self.boot,
        }  # fmt: skip

    def saved_step(self) -> dict[str, Any]:
        return {"step": "saved", "run": self.key, "at": self.checkpoint_ms}

    def stopping_step(self) -> dict[str, Any]:
        step: dict[str, Any] = {
            "step": "stopping", "run": self.key, "code": self.stop_code, "reason": self.stop_reason,
            "kill_at": self.kill_at_boot_ms, "grace": self.stop_grace_ms,
        }  # fmt: skip
        if self.hook is not None:
            step |= {"hook": self.hook.as_order(), "begun": self.hook_begun, "until": self.hook_until_boot_ms}
            step["before"] = self.hook_before
        if self.hook_note:
            step["note"] = self.hook_note
        return step

    def done_step(self) -> dict[str, Any]:
        return {"step": "done", "run": self.key, "end": self.end}

    def recall(self, step: Mapping[str, Any]) -> None:
        """Take over what a step in the journal says."""
        match step["step"]:
            case "claimed":
                self.claimed_ms, self.grace_ms = step["at"], step["grace"]
                self.boot = step.get("boot", "")
                self.timeout_ms, self.log_cap = step.get("timeout", 0), step.get("cap", LOG_CAP)
                self.cgroups = tuple(step.get("cgroups", ()))
                self.limits = Limits(memory_bytes=step.get("memory", 0))
                self.workdir = step.get("workdir", "/")
                if "checkpoint_file" in step:
                    self.checkpoint_file, self.watched = step["checkpoint_file"], True
                self.save_hook, self.save_every_ms = Hook.from_order(step.get("save")), step.get("save_every", 0)
                self.idle_ms = step.get("idle", 0)
                try:
                    self.health = Health.from_order(step.get("health"))
                except BadHealth:
                    self.health = None  # this host has lost the address that it was to be asked at
            case "started":
                self.started_ms, self.pid = step["at"], step["pid"]
                self.started_boot_ms, self.boot = step["up"], step["boot"]
            case "stopping":
                self.stop_code, self.stop_reason = step["code"], step["reason"]
                self.kill_at_boot_ms, self.stop_grace_ms = step["kill_at"], step.get("grace", 0)
                self.hook, self.hook_begun = Hook.from_order(step.get("hook")), step.get("begun", False)
                before = step.get("before")
                self.hook_before = (before[0], before[1], before[2]) if before else None
                self.hook_until_boot_ms, self.hook_note = step.get("until", 0), step.get("note", "")
            case "saved":
                self.checkpoint_ms = step["at"]
            case "done":
                self.end = _checked_end(self.name, step["end"])


def _checked_end(name: str, end: Observation) -> Observation:
    """ValueError or KeyError if it is none: older journals have no checksums."""
    code = end.get("exit_code")
    sound = end["run"] == name and end["state"] in ENDS and isinstance(end["at_ms"], int)
    if not sound or not (code is None or isinstance(code, int)):
        raise ValueError("not the end of a run")
    return end


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


def _oom_score_adj(order: Mapping[str, Any]) -> int | None:
    value = order.get("oom_score_adj")
    if value is not None and (not isinstance(value, int) or not -1000 <= value <= 1000):
        raise BadOrder("oom_score_adj must be a whole number from -1000 to 1000")
    return value


def signal_name(number: int) -> str:
    """ "" if there is no such signal."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return ""
