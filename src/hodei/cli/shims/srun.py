"""`srun`: outside of a job a command as a job, with its output here; within one, its tasks as processes of this member.

On several nodes every member runs the script, and srun starts the tasks of its own node. Within a job that a real Slurm runs, and which kept
Slurm's own job id, the real srun is called if there is one.
"""

from __future__ import annotations

import base64
import contextlib
import getpass
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

from hodei.backends.hpc.batch_options import NO_INDEX, Option, parse_arguments, takes_next_argument
from hodei.cli.shims.rows import Refused
from hodei.model.errors import HodeiError

# ------------------------------------------------------------------------------------------ step files
# `--output`, `--error` and `--input` of an srun within a job: files whose names may hold patterns, for each task.


_PATTERN = re.compile(r"%(\d{1,2})?([%AJNajnstux])")


class Opened(NamedTuple):
    """None: as the srun itself has it."""

    stdin: int | None
    stdout: int | None
    stderr: int | None


def per_task(pattern: str) -> bool:
    """Whether the name differs from task to task."""
    return bool(re.search(r"(?<!%)(%%)*%\d*t", pattern))


class Files:
    """`several`: other members write them too, so none may empty what another wrote."""

    def __init__(self, said: Mapping[str, str], here: Mapping[str, str], *, several: bool) -> None:
        self._said, self._here = said, here
        self._append = several or said.get("open-mode", "").startswith("a")
        self._open: dict[str, int] = {}

    def of(self, rank: int) -> Opened:
        stdout = self._write(self._said.get("output", ""), rank)
        error = self._said.get("error", "")
        return Opened(
            self._read(self._said.get("input", ""), rank), stdout, self._write(error, rank) if error else stdout
        )

    def _write(self, pattern: str, rank: int) -> int | None:
        if pattern in ("", "all"):
            return None
        if pattern == "none" or (pattern.isdigit() and int(pattern) != rank):
            return subprocess.DEVNULL
        if pattern.isdigit():
            return None
        name = self._name(pattern, rank)
        if name not in self._open:
            append = (self._append and not per_task(pattern)) or self._said.get("open-mode", "").startswith("a")
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
            self._open[name] = os.open(name, flags, 0o666)
        return self._open[name]

    def _read(self, pattern: str, rank: int) -> int | None:
        if pattern in ("", "all"):
            return None
        if pattern == "none" or (pattern.isdigit() and int(pattern) != rank):
            return subprocess.DEVNULL
        # Each task reads all of it, so each has its own.
        return None if pattern.isdigit() else os.open(self._name(pattern, rank), os.O_RDONLY)

    def _name(self, pattern: str, rank: int) -> str:
        if "\\" in pattern:
            return pattern.replace("\\", "")
        here = self._here
        job = here.get("HODEI_JOB_ID", "")
        values = {
            "%": "%", "j": job, "A": here.get("HODEI_ARRAY_JOB", job), "a": here.get("HODEI_ARRAY_INDEX", NO_INDEX),
            "J": f"{job}.0", "s": "0", "t": str(rank), "n": here.get("SLURM_NODEID", "0"),
            "N": here.get("SLURMD_NODENAME", os.uname().nodename), "x": here.get("SLURM_JOB_NAME", ""),
            "u": here.get("SLURM_JOB_USER") or getpass.getuser(),
        }  # fmt: skip

        def fill(found: re.Match[str]) -> str:
            value = values[found[2]].replace("/", "_")
            return value.zfill(min(int(found[1]), 10)) if found[1] and found[2] in "jAaJtns" else value

        return _PATTERN.sub(fill, pattern)


# ----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:
    from hodei.client import Client

_BAD_OPTION = 255
_FILES = ("output", "error", "input")
# Options of srun alone that change nothing here, with a value or without.
_IDLE = (
    "unbuffered",
    "overlap",
    "exact",
    "kill-on-bad-exit",
    "preserve-env",
    "disable-status",
    "exclusive",
    "overcommit",
)
_IDLE_WITH_VALUE = ("mpi", "cpu-bind", "cpu_bind", "mem-bind", "gpu-bind", "distribution", "hint", "accel-bind", "wait")
_LETTERS = {
    "u": "unbuffered",
    "K": "kill-on-bad-exit",
    "E": "preserve-env",
    "l": "label",
    "X": "disable-status",
    "W": "wait",
}
# One process for each task of this member, and the highest of their exit codes. The first word is the standard input
# in base64, empty if there is none. @FILES@ and @START@ are filled in.
_EACH = r"""
in=$1; shift
all=${SLURM_NTASKS:-1}; nodes=${HODEI_WORLD_SIZE:-1}; at=${HODEI_RANK:-0}
here=$((all / nodes)); more=$((all % nodes)); [ "$at" -ge "$more" ] || here=$((here+1))
start() { if [ -n "$in" ]; then printf %s "$in" | base64 -d | "$@"; else exec "$@" </dev/fd/3 3<&-; fi; }
shown() {
  exec 5>&1
  code=$({ { { (start "$@") 2>&6 4>&- 5>&- 6>&-; echo $? >&4; } | sed -u "s/^/$SLURM_PROCID: /" >&5; } 6>&1 4>&4 |
    sed -u "s/^/$SLURM_PROCID: /" >&2; } 4>&1)
  exit "$code"
}
exec 3<&0
i=0; p=
while [ "$i" -lt "$here" ]; do
  (export SLURM_PROCID=$((${SLURM_PROCID:-0} + i)) SLURM_LOCALID=$((${SLURM_LOCALID:-0} + i)); @FILES@; @START@ "$@") &
  p="$p $!"; i=$((i+1))
done
r=0; for one in $p; do wait "$one"; c=$?; [ "$c" -le "$r" ] || r=$c; done; exit "$r"
"""
# So much standard input can be given to a job: it travels in its command, which may be 128 KiB in all.
MOST_INPUT = 64 << 10
_PATIENCE_S = 3.0


def run(words: list[str]) -> int:
    options, label, command = _read(words)
    if not command:
        raise Refused("fatal: No command given to execute.")
    said = {option.name: option.value for option in options}
    if "HODEI_JOB_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        if os.environ["SLURM_JOB_ID"] != os.environ["HODEI_JOB_ID"]:
            _become_the_real_one(words)
        return _step(said, label, command)
    if any(word.partition("=")[0] == "--exclusive" for word in words[: len(words) - len(command)]):
        raise Refused("error: --exclusive has no like here; next: ask for the cores and the memory of a whole node")
    return _job(options, said, label, command)


def _read(words: list[str]) -> tuple[tuple[Option, ...], bool, list[str]]:
    queue, ours, label = list(words), list[str](), False
    while queue and queue[0].startswith("-") and queue[0] != "-":
        word = queue.pop(0)
        if word == "--":
            break
        name = (
            word[2:].partition("=")[0] if word.startswith("--") else _LETTERS.get(word[1], "") if len(word) == 2 else ""
        )
        if name == "label":
            label = True
        elif name in _IDLE_WITH_VALUE:
            if "=" not in word and queue:
                queue.pop(0)
        elif name not in _IDLE:
            ours.append(word)
            if queue and takes_next_argument(word):
                ours.append(queue.pop(0))
    if ":" in queue:
        raise Refused("error: heterogeneous steps (command : command) are not known here")
    found, problem = parse_arguments(ours, "slurm")
    if problem:
        raise Refused(f"{problem}\nit is not known here; see docs/how-to/slurm.md", _BAD_OPTION)
    return tuple(found), label, queue


# ---------------------------------------------------------------------------------------------- within a job


class _Part(NamedTuple):
    """What this member starts of a step: so many tasks, from rank `first` on, of `tasks` in all."""

    here: int
    first: int
    tasks: int


def _part(said: dict[str, str], here: Mapping[str, str]) -> _Part:
    """Every member runs the script and so this srun. The tasks go to the first members in blocks, as evenly as they can."""
    cluster, rank = _number(here.get("HODEI_WORLD_SIZE", "1")), int(here.get("HODEI_RANK", "0"))
    of_job = int(here.get("SLURM_NTASKS", "1"))
    members = _number(said["nodes"].partition("-")[0]) if "nodes" in said else cluster
    job = here["SLURM_JOB_ID"]
    if members > cluster:
        raise Refused(f"error: Unable to create step for job {job}: More nodes requested than permitted")
    if "ntasks" in said:
        tasks = _number(said["ntasks"])
    elif "ntasks-per-node" in said:
        tasks = _number(said["ntasks-per-node"]) * members
    else:
        tasks = sum(_share(of_job, cluster, number) for number in range(members)) or 1
    members = min(members, tasks)
    mine = _share(tasks, members, rank) if rank < members else 0
    each = _number(said.get("cpus-per-task") or "1")
    if mine * each > _number(here.get("SLURM_CPUS_ON_NODE", str(max(1, mine * each)))):
        raise Refused(f"error: Unable to create step for job {job}: More processors requested than permitted")
    return _Part(mine, sum(_share(tasks, members, number) for number in range(min(rank, members))), tasks)


def _share(tasks: int, members: int, rank: int) -> int:
    return tasks // members + (rank < tasks % members)


def _step(said: dict[str, str], label: bool, command: list[str]) -> int:
    here = os.environ
    part = _part(said, here)
    files = Files(said, here, several=int(here.get("HODEI_WORLD_SIZE", "1")) > 1)
    threads, running = list[threading.Thread](), list[tuple[int, subprocess.Popen[bytes]]]()
    # As with Slurm's srun, all tasks get what comes in here; one alone reads it itself.
    shared = part.here > 1 and "input" not in said and not os.isatty(0)
    for local in range(part.here):
        rank = part.first + local
        # On a node with other members of the job, tasks of theirs come before.
        base = int(here.get("SLURM_LOCALID", "0")) if not ("ntasks" in said or "nodes" in said) else 0
        env = {**here, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": str(rank),
               "SLURM_LOCALID": str(base + local), "SLURM_NTASKS": str(part.tasks), "SLURM_NPROCS": str(part.tasks),
               "SLURM_STEP_NUM_TASKS": str(part.tasks)}  # fmt: skip
        try:
            opened = files.of(rank)
            out = opened.stdout if opened.stdout is not None else subprocess.PIPE if label else None
            err = opened.stderr if opened.stderr is not None else subprocess.PIPE if label else None
            stdin = opened.stdin if opened.stdin is not None else subprocess.PIPE if shared else None if local == 0 else subprocess.DEVNULL  # fmt: skip
            process = subprocess.Popen(command, env=env, stdout=out, stderr=err, stdin=stdin)
        except OSError as error:
            for _, one in running:
                one.kill()
            raise Refused(
                f"error: execve(): {error.filename or command[0]}: {error.strerror}", error.errno or 1
            ) from None
        running.append((rank, process))
        for stream, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            if stream is not None:
                threads.append(threading.Thread(target=_labelled, args=(rank, stream, sink)))
                threads[-1].start()
    if shared:
        pipes = [one.stdin for _, one in running if one.stdin is not None]
        threading.Thread(target=_to_all, args=(pipes,), daemon=True).start()

    def stop(*signal_and_frame: object) -> None:
        for _, one in running:
            one.terminate()

    signal.signal(signal.SIGTERM, stop)
    code = 0
    for rank, process in running:
        code = max(code, _ended(rank, process.wait()))
    for thread in threads:
        thread.join()
    return code


def _to_all(pipes: list[IO[bytes]]) -> None:
    """Standard input to every task, until it ends or none listens any more."""
    while pipes and (data := os.read(0, 1 << 16)):
        for pipe in list(pipes):
            try:
                pipe.write(data)
                pipe.flush()
            except OSError:
                pipes.remove(pipe)
    for pipe in pipes:
        with contextlib.suppress(OSError):
            pipe.close()


def _ended(number: int, code: int) -> int:
    node = os.environ.get("SLURMD_NODENAME", "localhost")
    if code < 0:
        sys.stderr.write(f"srun: error: {node}: task {number}: {signal.strsignal(-code)}\n")
        return 128 - code
    if code:
        sys.stderr.write(f"srun: error: {node}: task {number}: Exited with exit code {code}\n")
    return code


def _labelled(number: int, stream: IO[bytes], sink: IO[bytes]) -> None:
    for line in stream:
        sink.write(b"%d: " % number + line)
        sink.flush()


def _become_the_real_one(words: list[str]) -> None:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = shutil.which("srun", path=folder)
        if path and "hodei.cli.shims" not in Path(path).read_text(errors="replace")[:400]:
            os.execv(path, ["srun", *words])


def _number(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise Refused(f"error: {text[:40]!r} is no number of tasks", _BAD_OPTION)
    return int(text)


# ------------------------------------------------------------------------------------------- outside of one


def _job(options: tuple[Option, ...], said: dict[str, str], label: bool, command: list[str]) -> int:
    from hodei.backends.hpc.batch_options import redirections
    from hodei.cli.shims.sbatch import submission
    from hodei.client import Client

    name = said.get("job-name") or os.path.basename(command[0])
    if said.get("input", "").isdigit() or said.get("output", "").isdigit() or said.get("error", "").isdigit():
        raise Refused("error: a task's number for --input, --output or --error is not known here", _BAD_OPTION)
    said = {key: {"none": "/dev/null"}.get(value, value) if key in _FILES else value for key, value in said.items()}
    # What differs by task is opened by each task, all else once.
    own = {key: said[key] for key in _FILES if per_task(said.get(key, "")) and said[key] != "all"}
    opened = redirections(own.get("output", ""), own.get("error", ""), own.get("input", ""), append=False, name=name)
    kept = tuple(Option(one.name, said[one.name], one.line) for one in options
                 if one.name not in own and not (one.name in _FILES and said[one.name] == "all"))  # fmt: skip
    given = "" if "input" in said and said["input"] != "all" else _standard_input()
    script = _EACH.replace("@FILES@", opened or ":").replace("@START@", "shown" if label else "start")
    with Client() as client:
        document, notes = submission(client, f"#!/bin/sh\n{script}", name, kept, (given, *command), files=False)
        if "array" in document:
            raise Refused("error: srun starts no arrays; next: sbatch --array", _BAD_OPTION)
        for note in notes:
            if not note.startswith("it asks for "):
                sys.stderr.write(f"srun: note: {note}\n")
        try:
            id = client.submit_all([document])[0]
        except HodeiError as error:
            raise Refused(f"error: Unable to allocate resources: {error.message}") from None
        try:
            return _follow(client, id, int(document.get("count", 1)))
        except KeyboardInterrupt:
            sys.stderr.write(f"srun: forcing job termination of {id}\n")
            client.cancel(id, reason="interrupted at the terminal")
            return 130


def _standard_input() -> str:
    """All of it in base64; none from a terminal, which a job can not be given."""
    try:
        if os.isatty(0):
            return ""
        said = threading.Timer(
            _PATIENCE_S,
            lambda: sys.stderr.write(
                "srun: reading standard input to its end; next: srun --input none, if there is none\n"
            ),
        )
        said.daemon = True
        said.start()
        data = b""
        while len(data) <= MOST_INPUT and (more := os.read(0, 1 << 16)):
            data += more
        said.cancel()
    except OSError:  # closed: there is none
        return ""
    if len(data) > MOST_INPUT:
        raise Refused(
            f"error: more than {MOST_INPUT >> 10} KiB of standard input can not be given to a job\n"
            "next: put it into a file that the nodes see, and say srun --input FILE"
        )
    return base64.b64encode(data).decode()


def _follow(client: Client, id: int, members: int) -> int:
    import time

    from hodei.client.logs import Backoff

    readers = [
        (client.log_reader(id, stream=stream, member=member), sink)
        for member in range(members)
        for stream, sink in (("stdout", sys.stdout.buffer), ("stderr", sys.stderr.buffer))
    ]
    pause = Backoff()
    while not all(reader.at_end for reader, _ in readers):
        found = False
        for reader, sink in readers:
            if not reader.at_end and (data := reader.read()):
                sink.write(data)
                sink.flush()
                found = True
        time.sleep(pause.next_s(found))
    view = client.wait(id)[0]
    if view.state != "succeeded":
        place = view.nodes[0] if view.nodes else "localhost"
        how = f"Exited with exit code {view.exit_code}" if view.exit_code else view.reason or view.state
        sys.stderr.write(f"srun: error: {place}: job {id}: {how}\n")
    return 0 if view.state == "succeeded" else view.exit_code or 1
