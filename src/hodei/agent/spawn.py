"""Starts a run: one `posix_spawn` of a small shell, the wrapper, that limits itself, runs the command and records its exit.

The shell's script is fixed; everything else reaches it as arguments, so no value can be read as code. The shell costs
a fraction of an interpreter, and because the wrapper waits, the exit status and the CPU time reach the disk even when the
agent is killed. It writes with builtins only, to descriptor 9, which the command never sees; `read_status` reads it.

The wrapper writes its first line before it starts the command: a run without that line, and without a process that holds
the file, never started. A child inherits the agent's lock until it executes the shell, with the status file open: the next
holder of the lock finds every child either holding its file or dead (see `journal.recover`).
"""

from __future__ import annotations

import binascii
import fcntl
import os
import re
import shutil
import signal
import stat as modes
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from hodei.agent import logs
from hodei.agent.limits import SpawnLimits

STATUS_FD = 9
# Exit code of the wrapper when it did not start the command; the status file has the reason.
NOT_TRIED = 125
SHELL = next((path for path in ("/bin/dash", "/usr/bin/dash") if os.access(path, os.X_OK)), "/bin/sh")

# One line, so that the shell's own messages read "hodei: 1: ...". Arguments: the run, workdir, address space in KiB
# or 0 and after a colon the OOM score adjustment (only root may lower it; else it stays as it is), the claim (`recover`
# reads it from the process), groups to join, "--", the command. A TERM for the whole group must not keep the wrapper from
# recording, hence the traps; the shell resets them in the child.
SCRIPT = (
    '_hodei_run=$1; echo "$1 pid $$ $$" >&9 || exit 125; '
    "trap : HUP INT QUIT TERM USR1 USR2 ALRM VTALRM; "
    'cd -- "$2" || { echo "$1 error workdir" >&9; exit 125; }; unset OLDPWD; '
    'if [ "${3%:*}" != 0 ]; then ulimit -v "${3%:*}" || { echo "$1 error memory" >&9; exit 125; }; fi; '
    'if [ "${3#*:}" ]; then { echo "${3#*:}" >/proc/self/oom_score_adj; } 2>/dev/null; fi; '
    "shift 4; "
    'while [ "$1" != -- ]; do '
    'echo 0 >"$1" || { echo "$_hodei_run error group" >&9; exit 125; }; shift; done; shift; '
    '"$@" 9>&-; _hodei_exit=$?; times >&9; echo "$_hodei_run exit $_hodei_exit $_hodei_exit" >&9; exit $_hodei_exit'
)
# A command named like a shell builtin (echo, test, ...) means the program of that name. `exec` in a subshell always
# means a program; it costs a full fork, so other commands do without.
SCRIPT_FOR_BUILTINS = SCRIPT.replace('"$@" 9>&-;', '(exec "$@" 9>&-);')
_BUILTINS = frozenset((
    ".", ":", "[", "alias", "bg", "break", "cd", "chdir", "command", "continue", "echo", "eval", "exec", "exit",
    "export", "false", "fg", "fc", "getopts", "hash", "jobs", "kill", "let", "local", "printf", "pwd", "read",
    "readonly", "return", "set", "shift", "source", "test", "times", "trap", "true", "type", "typeset", "ulimit",
    "umask", "unalias", "unset", "wait",
))  # fmt: skip
_RESET = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# Variables that a shell sets or changes itself.
_SHELL_NAMES = frozenset((
    "PWD", "OLDPWD", "IFS", "OPTIND", "OPTARG", "PPID", "LINENO", "PS1", "PS2", "PS4", "ENV", "_hodei_run", "_hodei_exit",
))  # fmt: skip
# An environment that a shell would change passes it in these variables, in base64. A small program unpacks it and then
# becomes the command; if that fails, it prints what the shell would print.
_PACKED = "_hodei_env_"
_PART = 64 << 10
_UNPACK = (
    "import binascii,os,sys,_signal as s\n"
    "for n in (s.SIGPIPE,s.SIGXFSZ): s.signal(n,s.SIG_DFL)\n"
    f"p=[];e=os.environ\nwhile '{_PACKED}%d'%len(p) in e: p.append(e['{_PACKED}%d'%len(p)])\n"
    "pairs=filter(None,binascii.a2b_base64(''.join(p)).split(b'\\0'))\n"
    "env=dict(pair.split(b'=',1) for pair in pairs)\n"
    "try: os.execvpe(sys.argv[1],sys.argv[1:],env)\n"
    "except PermissionError: c,w=126,'Permission denied'\n"
    "except (FileNotFoundError,NotADirectoryError): c,w=127,'not found'\n"
    "except OSError as x: c,w=126,x.strerror\n"
    "os.write(2,b'hodei: 1: '+os.fsencode(sys.argv[1])+b': '+w.encode()+b'\\n');os._exit(c)"
)
_PRESERVES_ENV = os.path.basename(SHELL) == "dash"


def spawn(
    name: str,
    directory: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    limits: SpawnLimits,
    status: str = "status",
    streams: tuple[str, str] = ("stdout", "stderr"),
    claim: str = "",
) -> int:
    """The wrapper's pid, which is also its session and process group. OSError or ValueError: nothing was started.
    `status` is the file in `directory` that the wrapper holds open and writes to, `streams` those for the output."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, f"{directory}/{streams[0]}", _LOG_FLAGS, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, f"{directory}/{streams[1]}", _LOG_FLAGS, 0o600),
        (os.POSIX_SPAWN_OPEN, STATUS_FD, f"{directory}/{status}", _LOG_FLAGS, 0o600),
    ]
    if _PRESERVES_ENV and _is_shell_safe(env):
        command, shell_env = list(argv), env
    else:
        command, shell_env = [sys.executable, "-IS", "-c", _UNPACK, *argv], _pack({"PWD": workdir, **env})
    script = SCRIPT_FOR_BUILTINS if command[0] in _BUILTINS else SCRIPT
    oom_score_adj = "" if limits.oom_score_adj is None else limits.oom_score_adj
    header = (name, workdir, f"{limits.address_space_kib}:{oom_score_adj}", claim)
    args = ["hodei", "-c", script, "hodei", *header, *limits.join, "--", *command]
    # Children inherit the affinity: set it for the moment of the spawn, so that no descendant runs on other cores.
    own = os.sched_getaffinity(0) if limits.cpus else set[int]()
    if limits.cpus:
        os.sched_setaffinity(0, limits.cpus)
    try:
        return os.posix_spawn(
            SHELL, args, shell_env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        )
    finally:
        if limits.cpus:
            os.sched_setaffinity(0, own)


class Wrapper(NamedTuple):
    """The parts of a wrapper's command line; `claim` may be empty."""

    run: str
    workdir: str
    groups: tuple[str, ...]
    claim: str


def parse_wrapper(words: Sequence[str]) -> Wrapper | None:
    """None if this is not the command line of a wrapper."""
    if len(words) < 8 or words[0] != "hodei" or words[1] != "-c" or words[3] != "hodei":
        return None
    rest = list(words[7:])
    claim = rest.pop(0) if rest[0] == "" or rest[0].startswith("{") else ""
    joins = rest[: rest.index("--")] if "--" in rest else []
    return Wrapper(words[4], words[5], tuple(os.path.dirname(join) for join in joins), claim)


def read_env(wrapper: int) -> dict[str, str]:
    """The environment of a live wrapper's command. OSError if the wrapper has exited.

    Read from /proc instead of stored: it works for runs of an earlier agent, and no secret reaches the disk.
    """
    with open(f"/proc/{wrapper}/environ", "rb") as file:
        pairs = file.read().split(b"\0")
    if pairs[0].startswith(f"{_PACKED}0=".encode()):
        packed = (pair.partition(b"=")[2] for pair in pairs if pair.startswith(_PACKED.encode()))
        pairs = binascii.a2b_base64(b"".join(packed)).split(b"\0")
    env = {}
    for pair in pairs:
        name, is_pair, value = pair.partition(b"=")
        if is_pair:
            env[os.fsdecode(name)] = os.fsdecode(value)
    return env


def base_env() -> dict[str, str]:
    """The default environment of a run: only these few variables of the agent's own."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ") if name in os.environ}
    env.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    env.setdefault("HOME", "/")
    return env


def _is_shell_safe(env: Mapping[str, str]) -> bool:
    return _SHELL_NAMES.isdisjoint(env) and all(name.isascii() and name.isidentifier() for name in env)


def _pack(env: Mapping[str, str]) -> dict[str, str]:
    """In variables that every shell leaves unchanged. Not in arguments, which every user of the host can read."""
    pairs = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items())
    packed = binascii.b2a_base64(pairs, newline=False).decode()
    parts = [packed[first : first + _PART] for first in range(0, len(packed), _PART)] or [""]
    return {f"{_PACKED}{number}": part for number, part in enumerate(parts)}


READ_LIMIT = 65_536
MAX_PID = 1 << 22
MAX_CODE = 255

ERRORS = {
    "workdir": "the working directory {workdir} cannot be entered",
    "memory": "the memory limit cannot be set",
    "group": "the control group cannot be joined",
    "status": "its status file cannot be written",
}
_LINE = re.compile(rb"([A-Za-z0-9._-]{1,100}) (pid|exit|error) ([0-9]{1,7}|[a-z]{1,20})(?: ([0-9]{1,7}))?")
# `times` of a shell: user and system time, in one line of its own and one of its children.
_TIMES = re.compile(rb"([0-9]{1,9})m([0-9]{1,2})[.,]([0-9]{1,9})s ([0-9]{1,9})m([0-9]{1,2})[.,]([0-9]{1,9})s")


class Status(NamedTuple):
    """`pid`: the wrapper's, 0 if it wrote none. `code`: the exit code, None if it wrote none. `error`: a key of ERRORS, or
    "". `exists`: there is such a file. `sound`: it consists of complete lines of wrappers. `lines`: how many. `written_ms`:
    when the last one was written. `cpu_ms`: CPU time of an ended command, None if it wrote none."""

    pid: int = 0
    code: int | None = None
    error: str = ""
    exists: bool = False
    sound: bool = True
    lines: int = 0
    written_ms: int = 0
    cpu_ms: int | None = None


def read_status(name: str, directory: str, status: str = "status") -> Status:
    """What the wrapper of run `name` wrote."""
    try:
        # O_NONBLOCK: a job may have put a pipe there.
        fd = os.open(f"{directory}/{status}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        return Status()
    except OSError:
        return Status(exists=True, sound=False)
    try:
        found = os.fstat(fd)
        if not modes.S_ISREG(found.st_mode):
            return Status(exists=True, sound=False)
        data = os.read(fd, READ_LIMIT)
    except OSError:
        return Status(exists=True, sound=False)
    finally:
        os.close(fd)
    return _parse(name.encode(), data)._replace(written_ms=found.st_mtime_ns // 1_000_000)


def _parse(name: bytes, data: bytes) -> Status:
    lines = data.split(b"\n")
    sound = not lines.pop()  # a last line without its end is torn
    pids, codes, errors = set[int](), set[int](), set[str]()
    single = False  # wrappers of older agents wrote each number once
    times, cpu_ms = list[int](), None
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            if (found := _TIMES.fullmatch(line)) is not None:
                times.append(_cpu_ms(*found.groups()))
            else:
                sound = False
            continue
        run, kind, first, second = match.groups()
        measured, times = times, []
        if run == name and kind == b"exit" and len(measured) == 2:
            cpu_ms = sum(measured)
        if run != name:
            # A directory is reused only after an end: a `pid` in the last line is ours, with a damaged name.
            sound = sound and not (kind == b"pid" and line is lines[-1])
            continue
        if kind == b"error":
            errors.add(first.decode())
            sound = sound and first.decode() in ERRORS and second is None
            continue
        if not first.isdigit() or second not in (None, first) or int(first) > (MAX_PID if kind == b"pid" else MAX_CODE):
            sound = False
            continue
        if kind == b"pid":
            pids.add(int(first))
            single = second is None
        elif second is not None or single:
            codes.add(int(first))
        else:
            sound = False
    errors &= ERRORS.keys()
    # Contradictory lines: none of them counts.
    if len(pids) > 1 or len(codes) > 1 or len(errors) > 1 or (codes and errors):
        return Status(exists=True, sound=False, lines=len(lines))
    return Status(
        pid=min(pids, default=0),
        code=min(codes, default=None),
        error=min(errors, default=""),
        exists=True,
        sound=sound,
        lines=len(lines),
        cpu_ms=cpu_ms if codes else None,
    )


def _cpu_ms(*parts: bytes) -> int:
    """Of minutes, seconds and their fraction, twice."""
    return sum(
        int(minutes) * 60_000 + int(seconds) * 1000 + int(fraction[:3].ljust(3, b"0"))
        for minutes, seconds, fraction in (parts[:3], parts[3:])
    )


SPARES_KEPT = 1000
# Lines of a status file name their run, so they may stay when the directory is reused. (Truncating would be slow: ext4
# writes a file that was truncated and filled again to disk at once.)
STATUS_LIMIT = 4096
# The default checkpoint file of a run, and the status file of its checkpoint command.
CHECKPOINT, HOOK = "checkpoint", "hook"
_KEPT = {"status", *logs.STREAMS, *(f"{stream}.{what}" for stream in logs.STREAMS for what in ("gap", "times"))}


class RunDirs:
    """The directories of runs below `root`, by installation and name. One that stayed without output is reused."""

    def __init__(self, root: str) -> None:
        self.root = root
        self._spares: list[str] = []

    def path(self, installation: str, name: str) -> str:
        return f"{self.root}/{installation}/{name}"

    def make(self, path: str) -> None:
        """FileExistsError if a run of this name has been there before; it must not start again."""
        if self._spares:
            try:
                os.rename(self._spares.pop(), path)
                return
            except FileNotFoundError:
                pass  # removed by hand
            except OSError:
                raise FileExistsError(path) from None
        os.mkdir(path, 0o700)

    def release(self, path: str) -> None:
        """The run is forgotten: keep its output; without output, reuse or remove the directory."""
        try:
            silent = all(_is_empty_and_closed(f"{path}/{stream}") for stream in logs.STREAMS)
            for name in set(os.listdir(path)) - _KEPT:
                _remove_entry(f"{path}/{name}")
            short = silent and os.stat(f"{path}/status").st_size < STATUS_LIMIT
            if short and len(self._spares) < SPARES_KEPT:
                self._spares.append(path)
            elif silent:
                shutil.rmtree(path)
            else:
                os.unlink(f"{path}/status")
        except OSError:
            return  # it never started, or the directory was removed by hand

    def with_status(self, known: Callable[[str], bool]) -> list[str]:
        """Directories with a status file, except those of `known` runs (`installation/name`)."""
        return [
            self.path(installation, name)
            for installation in _subdirectories(self.root)
            for name in _subdirectories(f"{self.root}/{installation}")
            if not known(f"{installation}/{name}") and os.path.lexists(f"{self.path(installation, name)}/status")
        ]

    def prune(self, before_s: float, keep: set[str]) -> None:
        """Remove directories without output since `before_s`, except those of runs in `keep` (`installation/name`)."""
        kept = keep | {spare.removeprefix(f"{self.root}/") for spare in self._spares}
        for installation in _subdirectories(self.root):
            for name in _subdirectories(f"{self.root}/{installation}"):
                path = self.path(installation, name)
                if f"{installation}/{name}" not in kept and _last_output_s(path) < before_s:
                    shutil.rmtree(path, ignore_errors=True)


def remove_file(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:
        pass


def _remove_entry(path: str) -> None:
    try:
        os.unlink(path)
    except IsADirectoryError:
        shutil.rmtree(path)


def _is_empty_and_closed(path: str) -> bool:
    """Empty, and open in no process: the kernel grants a write lease only then."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if os.fstat(fd).st_size:
            return False
        fcntl.fcntl(fd, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        return True
    finally:
        os.close(fd)


def _subdirectories(path: str) -> list[str]:
    try:
        with os.scandir(path) as entries:
            return [entry.name for entry in entries if entry.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _last_output_s(path: str) -> float:
    times = []
    for stream in logs.STREAMS:
        try:
            times.append(os.stat(f"{path}/{stream}", follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return max(times, default=0.0)
