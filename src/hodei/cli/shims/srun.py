"""`srun`: outside of a job it submits a command and prints its output; within a job it starts tasks as processes of this member.

In a job on several nodes every member runs the script, and srun starts the tasks of its node. Within a job of a real Slurm that
kept Slurm's job id, it executes the real srun if there is one.
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
from hodei.cli.shims.jobs import BAD_OPTION, CommandError
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client

_PATTERN = re.compile(r"%(\d{1,2})?([%AJNajnstux])")


class _Streams(NamedTuple):
    """File descriptors of a task; None: that of srun itself."""

    stdin: int | None
    stdout: int | None
    stderr: int | None


def per_task(pattern: str) -> bool:
    """Whether the file name differs between tasks."""
    return bool(re.search(r"(?<!%)(%%)*%\d*t", pattern))


class StepFiles:
    """`--output`, `--error` and `--input` of a step, with patterns in their names. `shared`: other members write them too, so
    they are not truncated."""

    def __init__(self, options: Mapping[str, str], env: Mapping[str, str], *, shared: bool) -> None:
        self._options, self._env, self._shared = options, env, shared
        self._append = options.get("open-mode", "").startswith("a")
        self._open: dict[str, int] = {}

    def open(self, rank: int) -> _Streams:
        stdin, stdout = (
            self._read(self._options.get("input", ""), rank),
            self._write(self._options.get("output", ""), rank),
        )
        error = self._options.get("error", "")
        return _Streams(stdin, stdout, self._write(error, rank) if error else stdout)

    def _write(self, pattern: str, rank: int) -> int | None:
        if pattern in ("", "all"):
            return None
        if pattern == "none" or (pattern.isdigit() and int(pattern) != rank):
            return subprocess.DEVNULL
        if pattern.isdigit():
            return None
        name = self._name(pattern, rank)
        if name not in self._open:
            append = self._append or (self._shared and not per_task(pattern))
            flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if append else os.O_TRUNC)
            self._open[name] = os.open(name, flags, 0o666)
        return self._open[name]

    def _read(self, pattern: str, rank: int) -> int | None:
        if pattern in ("", "all"):
            return None
        if pattern == "none" or (pattern.isdigit() and int(pattern) != rank):
            return subprocess.DEVNULL
        # Every task reads the whole file, so each opens it.
        return None if pattern.isdigit() else os.open(self._name(pattern, rank), os.O_RDONLY)

    def _name(self, pattern: str, rank: int) -> str:
        if "\\" in pattern:
            return pattern.replace("\\", "")
        env = self._env
        job = env.get("HODEI_JOB_ID", "")
        values = {
            "%": "%", "j": job, "A": env.get("HODEI_ARRAY_JOB", job), "a": env.get("HODEI_ARRAY_INDEX", NO_INDEX),
            "J": f"{job}.0", "s": "0", "t": str(rank), "n": env.get("SLURM_NODEID", "0"),
            "N": env.get("SLURMD_NODENAME", os.uname().nodename), "x": env.get("SLURM_JOB_NAME", ""),
            "u": env.get("SLURM_JOB_USER") or getpass.getuser(),
        }  # fmt: skip

        def fill(found: re.Match[str]) -> str:
            value = values[found[2]].replace("/", "_")
            return value.zfill(min(int(found[1]), 10)) if found[1] and found[2] in "jAaJtns" else value

        return _PATTERN.sub(fill, pattern)


_FILES = ("output", "error", "input")
# Options of srun that change nothing here.
_IGNORED = (
    "unbuffered", "overlap", "exact", "kill-on-bad-exit", "preserve-env", "disable-status", "exclusive", "overcommit",
)  # fmt: skip
_IGNORED_WITH_VALUE = (
    "mpi",
    "cpu-bind",
    "cpu_bind",
    "mem-bind",
    "gpu-bind",
    "distribution",
    "hint",
    "accel-bind",
    "wait",
)
_LETTERS = {
    "u": "unbuffered", "K": "kill-on-bad-exit", "E": "preserve-env", "l": "label", "X": "disable-status", "W": "wait",
}  # fmt: skip


def srun(argv: list[str]) -> int:
    options, label, command = _parse(argv)
    if not command:
        raise CommandError("fatal: No command given to execute.")
    values = {option.name: option.value for option in options}
    if "HODEI_JOB_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        if os.environ["SLURM_JOB_ID"] != os.environ["HODEI_JOB_ID"]:
            _exec_real_srun(argv)
        return _run_step(values, label, command)
    if any(argument.partition("=")[0] == "--exclusive" for argument in argv[: len(argv) - len(command)]):
        raise CommandError(
            "error: --exclusive is not supported; next: request the cores and the memory of a whole node"
        )
    return _run_job(options, values, label, command)


def _parse(argv: list[str]) -> tuple[tuple[Option, ...], bool, list[str]]:
    """The options that sbatch has too, whether to label output, and the command."""
    queue, arguments, label = list(argv), list[str](), False
    while queue and queue[0].startswith("-") and queue[0] != "-":
        argument = queue.pop(0)
        if argument == "--":
            break
        if argument.startswith("--"):
            name = argument[2:].partition("=")[0]
        else:
            name = _LETTERS.get(argument[1], "") if len(argument) == 2 else ""
        if name == "label":
            label = True
        elif name in _IGNORED_WITH_VALUE:
            if "=" not in argument and queue:
                queue.pop(0)
        elif name not in _IGNORED:
            arguments.append(argument)
            if queue and takes_next_argument(argument):
                arguments.append(queue.pop(0))
    if ":" in queue:
        raise CommandError("error: heterogeneous steps (command : command) are not supported")
    found, problem = parse_arguments(arguments, "slurm")
    if problem:
        raise CommandError(f"{problem}\nsupported options: docs/how-to/slurm.md", BAD_OPTION)
    return tuple(found), label, queue


class _StepPart(NamedTuple):
    """The tasks of a step that this member starts: `tasks` of `total`, from rank `first` on."""

    tasks: int
    first: int
    total: int


def _step_part(options: dict[str, str], env: Mapping[str, str]) -> _StepPart:
    """Every member runs the script, and so this srun. The first members get the tasks in even blocks."""
    gang_size, rank = _number(env.get("HODEI_WORLD_SIZE", "1")), int(env.get("HODEI_RANK", "0"))
    job_tasks = int(env.get("SLURM_NTASKS", "1"))
    members = _number(options["nodes"].partition("-")[0]) if "nodes" in options else gang_size
    job = env["SLURM_JOB_ID"]
    if members > gang_size:
        raise CommandError(f"error: Unable to create step for job {job}: More nodes requested than permitted")
    if "ntasks" in options:
        tasks = _number(options["ntasks"])
    elif "ntasks-per-node" in options:
        tasks = _number(options["ntasks-per-node"]) * members
    else:
        tasks = sum(_share(job_tasks, gang_size, number) for number in range(members)) or 1
    members = min(members, tasks)
    count = _share(tasks, members, rank) if rank < members else 0
    cpus = count * _number(options.get("cpus-per-task") or "1")
    if cpus > _number(env.get("SLURM_CPUS_ON_NODE", str(max(1, cpus)))):
        raise CommandError(f"error: Unable to create step for job {job}: More processors requested than permitted")
    return _StepPart(count, sum(_share(tasks, members, number) for number in range(min(rank, members))), tasks)


def _share(tasks: int, members: int, rank: int) -> int:
    return tasks // members + (rank < tasks % members)


def _run_step(options: dict[str, str], label: bool, command: list[str]) -> int:
    env = os.environ
    part = _step_part(options, env)
    files = StepFiles(options, env, shared=int(env.get("HODEI_WORLD_SIZE", "1")) > 1)
    threads, running = list[threading.Thread](), list[tuple[int, subprocess.Popen[bytes]]]()
    # As in Slurm, all tasks get the standard input; a single one reads it directly.
    copy_input = part.tasks > 1 and "input" not in options and not os.isatty(0)
    # On a node with other members of the job, their tasks come first.
    first_local = int(env.get("SLURM_LOCALID", "0")) if not ("ntasks" in options or "nodes" in options) else 0
    for local in range(part.tasks):
        rank = part.first + local
        task_env = {
            **env, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_PROCID": str(rank),
            "SLURM_LOCALID": str(first_local + local), "SLURM_NTASKS": str(part.total), "SLURM_NPROCS": str(part.total),
            "SLURM_STEP_NUM_TASKS": str(part.total),
        }  # fmt: skip
        try:
            stdin, stdout, stderr = files.open(rank)
            if label:
                stdout = subprocess.PIPE if stdout is None else stdout
                stderr = subprocess.PIPE if stderr is None else stderr
            if stdin is None and copy_input:
                stdin = subprocess.PIPE
            elif stdin is None and local > 0:
                stdin = subprocess.DEVNULL
            process = subprocess.Popen(command, env=task_env, stdout=stdout, stderr=stderr, stdin=stdin)
        except OSError as error:
            for _, other in running:
                other.kill()
            reason = f"{error.filename or command[0]}: {error.strerror}"
            raise CommandError(f"error: execve(): {reason}", error.errno or 1) from None
        running.append((rank, process))
        for stream, sink in ((process.stdout, sys.stdout.buffer), (process.stderr, sys.stderr.buffer)):
            if stream is not None:
                threads.append(threading.Thread(target=_copy_labelled, args=(rank, stream, sink)))
                threads[-1].start()
    if copy_input:
        pipes = [process.stdin for _, process in running if process.stdin is not None]
        threading.Thread(target=_copy_input, args=(pipes,), daemon=True).start()

    def stop(*signal_and_frame: object) -> None:
        for _, process in running:
            process.terminate()

    signal.signal(signal.SIGTERM, stop)
    code = 0
    for rank, process in running:
        code = max(code, _report_exit(rank, process.wait()))
    for thread in threads:
        thread.join()
    return code


def _copy_input(pipes: list[IO[bytes]]) -> None:
    """Copy standard input to every task, until it ends or no task reads it."""
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


def _report_exit(rank: int, code: int) -> int:
    node = os.environ.get("SLURMD_NODENAME", "localhost")
    if code < 0:
        sys.stderr.write(f"srun: error: {node}: task {rank}: {signal.strsignal(-code)}\n")
        return 128 - code
    if code:
        sys.stderr.write(f"srun: error: {node}: task {rank}: Exited with exit code {code}\n")
    return code


def _copy_labelled(rank: int, stream: IO[bytes], sink: IO[bytes]) -> None:
    for line in stream:
        sink.write(b"%d: " % rank + line)
        sink.flush()


def _exec_real_srun(argv: list[str]) -> None:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        path = shutil.which("srun", path=folder)
        if path and "hodei.cli.shims" not in Path(path).read_text(errors="replace")[:400]:
            os.execv(path, ["srun", *argv])


def _number(text: str) -> int:
    if not text.isdigit() or not int(text):
        raise CommandError(f"error: {text[:40]!r} is not a number of tasks", BAD_OPTION)
    return int(text)


# Starts one process for each task of this member, and returns their highest exit code. The first argument is the standard
# input in base64, empty if there is none. @FILES@ and @START@ are replaced.
_JOB_SCRIPT = r"""
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
# Standard input is passed in the job's command, which has a limit of 128 KiB.
INPUT_LIMIT = 64 << 10
_INPUT_NOTICE_S = 3.0


def _run_job(options: tuple[Option, ...], values: dict[str, str], label: bool, command: list[str]) -> int:
    from hodei.backends.hpc.batch_options import redirections
    from hodei.cli.shims.sbatch import build_document
    from hodei.client import Client

    name = values.get("job-name") or os.path.basename(command[0])
    if any(values.get(key, "").isdigit() for key in _FILES):
        raise CommandError("error: a task number for --input, --output or --error is not supported", BAD_OPTION)
    values = {key: "/dev/null" if key in _FILES and value == "none" else value for key, value in values.items()}
    # Files that differ between tasks are opened by each task, all others once.
    own = {key: values[key] for key in _FILES if per_task(values.get(key, "")) and values[key] != "all"}
    opened = redirections(own.get("output", ""), own.get("error", ""), own.get("input", ""), append=False, name=name)
    kept = tuple(
        Option(option.name, values[option.name], option.line) for option in options
        if option.name not in own and not (option.name in _FILES and values[option.name] == "all")
    )  # fmt: skip
    stdin = "" if values.get("input", "all") != "all" else _standard_input()
    script = _JOB_SCRIPT.replace("@FILES@", opened or ":").replace("@START@", "shown" if label else "start")
    with Client() as client:
        document, notes = build_document(client, f"#!/bin/sh\n{script}", name, kept, (stdin, *command), by_srun=True)
        if "array" in document:
            raise CommandError("error: srun starts no arrays; next: sbatch --array", BAD_OPTION)
        sys.stderr.writelines(f"srun: note: {note}\n" for note in notes)
        try:
            id = client.submit_all([document])[0]
        except HodeiError as error:
            raise CommandError(f"error: Unable to allocate resources: {error.message}") from None
        try:
            return _follow(client, id, int(document.get("count", 1)))
        except KeyboardInterrupt:
            sys.stderr.write(f"srun: forcing job termination of {id}\n")
            client.cancel(id, reason="interrupted at the terminal")
            return 130


def _standard_input() -> str:
    """Standard input in base64; "" for a terminal, which a job cannot be given."""
    notice = "srun: reading standard input to its end; next: srun --input none, if there is none\n"
    try:
        if os.isatty(0):
            return ""
        timer = threading.Timer(_INPUT_NOTICE_S, lambda: sys.stderr.write(notice))
        timer.daemon = True
        timer.start()
        data = b""
        while len(data) <= INPUT_LIMIT and (more := os.read(0, 1 << 16)):
            data += more
        timer.cancel()
    except OSError:  # it is closed
        return ""
    if len(data) > INPUT_LIMIT:
        raise CommandError(
            f"error: standard input has more than {INPUT_LIMIT >> 10} KiB, which cannot be passed to a job\n"
            "next: put it into a file that the nodes can read, and use srun --input FILE"
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
    backoff = Backoff()
    while not all(reader.at_end for reader, _ in readers):
        found = False
        for reader, sink in readers:
            if not reader.at_end and (data := reader.read()):
                sink.write(data)
                sink.flush()
                found = True
        time.sleep(backoff.next_s(found))
    view = client.wait(id)[0]
    if view.state != "succeeded":
        node = view.nodes[0] if view.nodes else "localhost"
        result = f"Exited with exit code {view.exit_code}" if view.exit_code else view.reason or view.state
        sys.stderr.write(f"srun: error: {node}: job {id}: {result}\n")
    return 0 if view.state == "succeeded" else view.exit_code or 1
