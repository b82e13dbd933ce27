"""`--output`, `--error` and `--input` of an srun within a job: files whose names may hold patterns, for each task."""

from __future__ import annotations

import getpass
import os
import re
import subprocess
from collections.abc import Mapping
from typing import NamedTuple

from hodei.backends.hpc.batch_files import NO_INDEX

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
