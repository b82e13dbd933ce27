"""What the batch script of a run has written down, beside the run's output on the shared file system."""

from __future__ import annotations

import os
import re

from msgspec import Struct

_LIMIT = 65_536
_TIME = re.compile(r"(\d{1,12})[.,](\d{3})\d*")


class Record(Struct, frozen=True):
    """`began`: the command was about to be tried, as this job, there, then; `pid` is its process on that node. `exit_code`
    None: it has not ended, or nobody could write it down. Times are the node's own, 0 if its bash is too old to tell."""

    began: bool = False
    job: str = ""
    node: str = ""
    began_ms: int = 0
    pid: int = 0
    exit_code: int | None = None
    ended_ms: int = 0
    no_workdir: bool = False


def read_record(files: str) -> Record:
    """Of the latest try, if the system has tried several times. Blocks: call it from a thread."""
    try:
        fd = os.open(f"{files}.status", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(fd, "rb") as file:
            return parse_record(file.read(_LIMIT).decode(errors="replace"))
    except OSError:
        return Record()


def parse_record(text: str) -> Record:
    out: dict[str, object] = {}
    for line in text.split("\n")[:-1]:  # a line without its end is torn
        match line.split(" "):
            case ["began", job, node, at]:
                out = {"began": True, "job": job, "node": node, "began_ms": _ms(at)}
            case ["pid", number] if number.isdigit():
                out["pid"] = int(number)
            case ["exit", number, at] if number.isdigit():
                out |= {"exit_code": int(number), "ended_ms": _ms(at)}
            case ["error", "workdir"]:
                out["no_workdir"] = True
    return Record(**out)  # type: ignore[arg-type]


def _ms(at: str) -> int:
    """`1794810068.123456`, with a comma in some languages."""
    found = _TIME.fullmatch(at)
    return int(found[1]) * 1000 + int(found[2]) if found else 0
