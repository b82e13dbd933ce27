"""`srun`: outside of a job a command as a job, with its output here; within one, its tasks as processes of this member.

A member of a gang is one task already: there srun starts the command once. Within a job that a real Slurm runs, and which kept
Slurm's own job id, the real srun is called if there is one.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO, TYPE_CHECKING

from hodei.backends.hpc.batch_lines import Option, needs_next_word, parse_words
from hodei.cli.shims.words import Refused
from hodei.model.errors import HodeiError

if TYPE_CHECKING:
    from hodei.client import Client

_BAD_OPTION = 255
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
_ONCE = 'exec "$@"'
# One process for each task, and the highest of their exit codes.
_EACH = (
    'i=0; while [ "$i" -lt "$SLURM_NTASKS" ]; do SLURM_PROCID=$i SLURM_LOCALID=$i "$@" & p="$p $!"; i=$((i+1)); done; '
    'r=0; for one in $p; do wait "$one"; c=$?; [ "$c" -le "$r" ] || r=$c; done; exit "$r"'
)


def run(words: list[str]) -> int:
    options, label, command = _read(words)
    if not command:
        raise Refused("fatal: No command given to execute.")
    said = {option.name: option.value for option in options}
    if "HODEI_JOB_ID" in os.environ and "SLURM_JOB_ID" in os.environ:
        if os.environ["SLURM_JOB_ID"] != os.environ["HODEI_JOB_ID"]:
            _become_the_real_one(words)
        return _step(said, label, command)
    return _job(options, said, command)


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
            if queue and needs_next_word(word):
                ours.append(queue.pop(0))
    if ":" in queue:
        raise Refused("error: heterogeneous steps (command : command) are not known here")
    found, problem = parse_words(ours, "slurm")
    if problem:
        raise Refused(f"{problem}\nit is not known here; see docs/how-to/slurm.md", _BAD_OPTION)
    return tuple(found), label, queue


# ---------------------------------------------------------------------------------------------- within a job


def _step(said: dict[str, str], label: bool, command: list[str]) -> int:
    here = os.environ
    gang = int(here.get("HODEI_WORLD_SIZE", "1")) > 1
    tasks = 1 if gang else _number(said.get("ntasks") or said.get("ntasks-per-node") or here.get("SLURM_NTASKS", "1"))
    each = _number(said.get("cpus-per-task") or "1")
    if not gang and tasks * each > _number(here.get("SLURM_CPUS_ON_NODE", str(tasks * each))):
        job = here["SLURM_JOB_ID"]
        raise Refused(f"error: Unable to create step for job {job}: More processors requested than permitted")
    threads, running = list[threading.Thread](), list[tuple[int, subprocess.Popen[bytes]]]()
    for rank in range(tasks):
        number = int(here.get("SLURM_PROCID", "0")) if gang else rank
        env = {**here, "SLURM_STEP_ID": "0", "SLURM_STEPID": "0"}
        env |= {} if gang else {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NTASKS": str(tasks),
                                "SLURM_NPROCS": str(tasks), "SLURM_STEP_NUM_TASKS": str(tasks)}  # fmt: skip
        try:
            process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE if label else None,
                                       stdin=None if rank == 0 else subprocess.DEVNULL)  # fmt: skip
        except OSError as error:
            for _, one in running:
                one.kill()
            raise Refused(f"error: execve(): {command[0]}: {error.strerror}", error.errno or 1) from None
        running.append((number, process))
        if label and process.stdout is not None:
            threads.append(threading.Thread(target=_labelled, args=(number, process.stdout)))
            threads[-1].start()

    def stop(*signal_and_frame: object) -> None:
        for _, one in running:
            one.terminate()

    signal.signal(signal.SIGTERM, stop)
    code = 0
    for number, process in running:
        code = max(code, _ended(number, process.wait()))
    for thread in threads:
        thread.join()
    return code


def _ended(number: int, code: int) -> int:
    node = os.environ.get("SLURMD_NODENAME", "localhost")
    if code < 0:
        sys.stderr.write(f"srun: error: {node}: task {number}: {signal.strsignal(-code)}\n")
        return 128 - code
    if code:
        sys.stderr.write(f"srun: error: {node}: task {number}: Exited with exit code {code}\n")
    return code


def _labelled(number: int, stream: IO[bytes]) -> None:
    for line in stream:
        sys.stdout.buffer.write(b"%d: " % number + line)
        sys.stdout.buffer.flush()


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


def _job(options: tuple[Option, ...], said: dict[str, str], command: list[str]) -> int:
    from hodei.cli.shims.sbatch import submission
    from hodei.client import Client

    name = said.get("job-name") or os.path.basename(command[0])
    with Client() as client:
        document, notes = submission(client, f"#!/bin/sh\n{_ONCE}\n", name, options, tuple(command), files=False)
        if "array" in document:
            raise Refused("error: srun starts no arrays; next: sbatch --array", _BAD_OPTION)
        if "SLURM_NTASKS" in document.get("env", {}):  # all of them in one member
            document["command"][document["command"].index(_ONCE)] = _EACH
        for note in notes:
            if not note.startswith("it has "):
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


def _follow(client: Client, id: int, members: int) -> int:
    import time

    from hodei.client.logs import Pause

    readers = [
        (client.log_reader(id, stream=stream, member=member), sink)
        for member in range(members)
        for stream, sink in (("stdout", sys.stdout.buffer), ("stderr", sys.stderr.buffer))
    ]
    pause = Pause()
    while not all(reader.at_end for reader, _ in readers):
        found = False
        for reader, sink in readers:
            if not reader.at_end and (data := reader.read()):
                sink.write(data)
                sink.flush()
                found = True
        time.sleep(pause.after(found))
    view = client.wait(id)[0]
    if view.state != "succeeded":
        place = view.nodes[0] if view.nodes else "localhost"
        how = f"Exited with exit code {view.exit_code}" if view.exit_code else view.reason or view.state
        sys.stderr.write(f"srun: error: {place}: job {id}: {how}\n")
    return 0 if view.state == "succeeded" else view.exit_code or 1
