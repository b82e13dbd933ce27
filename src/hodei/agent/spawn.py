"""Giving birth: one `posix_spawn` of a small shell that fences itself, runs the command and writes down how it ended.

The shell's script is fixed; everything else reaches it as arguments, so no value can be read as code. The shell costs
a fraction of an interpreter, and because it is not us that waits, the exit status reaches the disk even when we are
killed. It writes with builtins only, to descriptor 9, which the command itself never sees; `status` reads it.

Its first line is there before the command begins, or the command never does: a run without that line, and without a
process that holds the file, was not born. Our lock is inherited up to the moment in which the shell takes over, with the
file open: the next holder of the lock finds every child of ours either holding its file or gone (see `recovery`).
"""

from __future__ import annotations

import binascii
import os
import re
import signal
import stat as modes
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from signal import Signals
from typing import Any, NamedTuple

from hodei.agent.limits import Fence

STATUS_FD = 9
# Exit code of the wrapper when the command could not even be tried; the status file then says why.
NOT_TRIED = 125
SHELL = next((path for path in ("/bin/dash", "/usr/bin/dash") if os.access(path, os.X_OK)), "/bin/sh")

# One line, so that the shell's own messages read "hodei: 1: ...". Arguments: the run, workdir, address space in KiB
# or 0 and after a colon what is added to its score when memory runs out (only root may lower that: then it stays as it
# is), the claim (`recovery` reads it from the process), groups to join, "--", the command. A TERM for the whole group must not keep the wrapper from recording, hence the
# traps; the shell sets them back to default in the child.
SCRIPT = (
    '_hodei_run=$1; echo "$1 pid $$ $$" >&9 || exit 125; '
    "trap : HUP INT QUIT TERM USR1 USR2 ALRM VTALRM; "
    'cd -- "$2" || { echo "$1 error workdir" >&9; exit 125; }; unset OLDPWD; '
    'if [ "${3%:*}" != 0 ]; then ulimit -v "${3%:*}" || { echo "$1 error memory" >&9; exit 125; }; fi; '
    'if [ "${3#*:}" ]; then { echo "${3#*:}" >/proc/self/oom_score_adj; } 2>/dev/null; fi; '
    "shift 4; "
    'while [ "$1" != -- ]; do '
    'echo 0 >"$1" || { echo "$_hodei_run error group" >&9; exit 125; }; shift; done; shift; '
    '"$@" 9>&-; _hodei_exit=$?; echo "$_hodei_run exit $_hodei_exit $_hodei_exit" >&9; exit $_hodei_exit'
)
# A command with the name of one of the shell's own (echo, test, ...) means the program of that name. `exec` in a
# subshell always means a program; it costs a full fork, so the others go without.
SCRIPT_FOR_SHELL_WORDS = SCRIPT.replace('"$@" 9>&-;', '(exec "$@" 9>&-);')
_SHELL_WORDS = frozenset((
    ".", ":", "[", "alias", "bg", "break", "cd", "chdir", "command", "continue", "echo", "eval", "exec", "exit",
    "export", "false", "fg", "fc", "getopts", "hash", "jobs", "kill", "let", "local", "printf", "pwd", "read",
    "readonly", "return", "set", "shift", "source", "test", "times", "trap", "true", "type", "typeset", "ulimit",
    "umask", "unalias", "unset", "wait",
))  # fmt: skip


_RESET = [number for number in signal.valid_signals() if number not in (signal.SIGKILL, signal.SIGSTOP)]
_LOG_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW
# Names that a shell treats specially, so that it would not hand them on as they were given.
_SHELL_NAMES = frozenset(
    {
        *("PWD", "OLDPWD", "IFS", "OPTIND", "OPTARG", "PPID", "LINENO", "PS1", "PS2", "PS4", "ENV"),
        *("_hodei_run", "_hodei_exit"),
    }
)
# An environment that a shell would change goes past it in these variables, in base64, and is unpacked behind it by a
# program that then becomes the command and speaks like the shell if it cannot.
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
_HANDS_ENV_ON = os.path.basename(SHELL) == "dash"


def spawn(
    name: str,
    directory: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    fence: Fence,
    status: str = "status",
    streams: tuple[str, str] = ("stdout", "stderr"),
    claim: str = "",
) -> int:
    """The wrapper's pid, which is also its session and process group. OSError or ValueError: nothing was started.
    `status` is the file in `directory` that the wrapper holds open and writes to, `streams` those for what is said."""
    actions = [
        (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
        (os.POSIX_SPAWN_OPEN, 1, f"{directory}/{streams[0]}", _LOG_FLAGS, 0o600),
        (os.POSIX_SPAWN_OPEN, 2, f"{directory}/{streams[1]}", _LOG_FLAGS, 0o600),
        (os.POSIX_SPAWN_OPEN, STATUS_FD, f"{directory}/{status}", _LOG_FLAGS, 0o600),
    ]
    if _HANDS_ENV_ON and _plain(env):
        command, shell_env = list(argv), env
    else:
        command, shell_env = [sys.executable, "-IS", "-c", _UNPACK, *argv], _packed({"PWD": workdir, **env})
    script = SCRIPT_FOR_SHELL_WORDS if command[0] in _SHELL_WORDS else SCRIPT
    killed_first = "" if fence.oom_score_adj is None else fence.oom_score_adj
    about = (name, workdir, f"{fence.address_space_kib}:{killed_first}", claim)
    args = ["hodei", "-c", script, "hodei", *about, *fence.join, "--", *command]
    if not fence.cpus:
        return os.posix_spawn(
            SHELL, args, shell_env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        )
    # Cores are inherited: put them on for the moment of birth, so that no descendant ever escapes them.
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, fence.cpus)
    try:
        return os.posix_spawn(
            SHELL, args, shell_env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
        )
    finally:
        os.sched_setaffinity(0, mine)


class Wrapper(NamedTuple):
    """What the command line of a living wrapper says: whose it is, where it runs, its groups, and its claim if any."""

    run: str
    workdir: str
    groups: tuple[str, ...]
    claim: str


def wrapper_of(words: Sequence[str]) -> Wrapper | None:
    """None if this is not the command line of a wrapper."""
    if len(words) < 8 or words[0] != "hodei" or words[1] != "-c" or words[3] != "hodei":
        return None
    rest = list(words[7:])
    claim = rest.pop(0) if rest[0] == "" or rest[0].startswith("{") else ""
    joins = rest[: rest.index("--")] if "--" in rest else []
    return Wrapper(words[4], words[5], tuple(os.path.dirname(join) for join in joins), claim)


def env_of(wrapper: int) -> dict[str, str]:
    """The environment that a living wrapper's command was given. OSError if the wrapper is gone.

    Read from the system instead of kept: it works for runs of an agent before us, and no secret is written down.
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
    """What every run gets without asking. Of our own environment only these few names are handed on."""
    env = {name: os.environ[name] for name in ("PATH", "HOME", "USER", "LOGNAME", "LANG", "TZ") if name in os.environ}
    env.setdefault("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
    env.setdefault("HOME", "/")
    return env


def _plain(env: Mapping[str, str]) -> bool:
    return _SHELL_NAMES.isdisjoint(env) and all(name.isascii() and name.isidentifier() for name in env)


def _packed(env: Mapping[str, str]) -> dict[str, str]:
    """In variables that every shell hands on as they are. Never as words of a command, which everybody can read."""
    pairs = b"\0".join(os.fsencode(f"{name}={value}") for name, value in env.items())
    packed = binascii.b2a_base64(pairs, newline=False).decode()
    parts = [packed[first : first + _PART] for first in range(0, len(packed), _PART)] or [""]
    return {f"{_PACKED}{number}": part for number, part in enumerate(parts)}


# ------------------------------------------------------------------------------------------------ hook
# How a run is asked to save its work before it is stopped: a signal to it, or a command beside it. A value only.


TIMEOUT_MS = 30_000
# Those that the wrapper of a run outlives; any other would end it, and the run with it.
SIGNALS = ("ALRM", "CONT", "HUP", "INT", "QUIT", "TERM", "URG", "USR1", "USR2", "VTALRM", "WINCH")


class BadHook(ValueError):
    """It can not be used; the message says why. The stop goes on without it."""


@dataclass(frozen=True)
class Hook:
    """Either `signal` or `command` is set; `timeout_ms` bounds how long we wait for it."""

    signal: str = ""
    command: tuple[str, ...] = ()
    timeout_ms: int = TIMEOUT_MS

    @property
    def number(self) -> Signals:
        return Signals[f"SIG{self.signal}"]

    @classmethod
    def from_order(cls, order: Mapping[str, Any] | None) -> Hook | None:
        """None if nothing was asked for. A time of 0 means that none was set."""
        if not order or not isinstance(order, Mapping):
            return None
        name, command, timeout_ms = order.get("signal") or "", order.get("command") or [], order.get("timeout_ms") or 0
        if not isinstance(timeout_ms, int) or timeout_ms < 0:
            raise BadHook("its time is not a whole number from 0 on")
        if command:
            if not isinstance(command, list) or not all(isinstance(w, str) and "\0" not in w for w in command):
                raise BadHook("the command is not a list of words")
            return cls("", tuple(command), timeout_ms or TIMEOUT_MS)
        if not name:
            return None
        name = str(name).upper().removeprefix("SIG")
        if name not in SIGNALS:
            raise BadHook(f"the signal {name[:20]} can not be used; there are {', '.join(SIGNALS)}")
        return cls(name, (), timeout_ms or TIMEOUT_MS)

    def as_order(self) -> dict[str, Any]:
        """What `from_order` reads; also the form in the journal."""
        return {"signal": self.signal, "command": list(self.command), "timeout_ms": self.timeout_ms}


# ------------------------------------------------------------------------------------- status files


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


class Status(NamedTuple):
    """`pid`: the wrapper's, 0 if it wrote none. `code`: the exit code, None if it wrote none. `error`: a key of ERRORS, or
    "". `exists`: there is something at that place. `sound`: all of it is whole lines of wrappers. `lines`: how many.
    `written_ms`: when the last one was written."""

    pid: int = 0
    code: int | None = None
    error: str = ""
    exists: bool = False
    sound: bool = True
    lines: int = 0
    written_ms: int = 0


def read_status(name: str, directory: str, status: str = "status") -> Status:
    """What the wrapper of run `name` wrote."""
    try:
        # Not to wait for the other end of a pipe that someone put there.
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
    once = False
    for line in lines:
        match = _LINE.fullmatch(line)
        if match is None:
            sound = False
            continue
        run, kind, first, second = match.groups()
        if run != name:
            # The directory is handed on after an end only: a beginning in the last line is ours, with a damaged name.
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
            once = second is None
        elif second is not None or once:
            codes.add(int(first))
        else:
            sound = False
    errors &= ERRORS.keys()
    # Two different words on the same thing: neither can be believed.
    if len(pids) > 1 or len(codes) > 1 or len(errors) > 1 or (codes and errors):
        return Status(exists=True, sound=False, lines=len(lines))
    return Status(
        pid=min(pids, default=0),
        code=min(codes, default=None),
        error=min(errors, default=""),
        exists=True,
        sound=sound,
        lines=len(lines),
    )
