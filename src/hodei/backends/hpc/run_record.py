"""What the batch script of a run has written down, beside the run's output on the shared file system."""

from __future__ import annotations

import os
import re

from msgspec import Struct

_LIMIT = 65_536
# The claim of a record that the server made, so that no script can any more.
SEALED = "sealed"
_TIME = re.compile(r"(\d{1,12})[.,](\d{3})\d*")


class Record(Struct, frozen=True):
    """`claim`: whose the record is, SEALED if nothing is to run any more. `began`: the command was about to be tried, as this
    job (`number`: as the queue shows it), there, then; `pid` is its process on that node. `exit_code` None: it has not
    ended, or nobody could write it down. Times are the node's own, 0 if its bash is too old to tell."""

    claim: str = ""
    began: bool = False
    job: str = ""
    number: str = ""
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


def seal(files: str) -> bool:
    """From now on no script of this run runs anything. False if one has begun, or that cannot be told. Blocks."""
    try:
        fd = os.open(f"{files}.status", os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(fd, "wb") as file:
            file.write(f"claim {SEALED}\n".encode())
    except FileExistsError:
        return read_record(files).claim == SEALED
    except OSError:
        return False
    return True


def parse_record(text: str) -> Record:
    out: dict[str, object] = {}
    for line in text.split("\n")[:-1]:  # a line without its end is torn
        match line.split(" "):
            case ["claim", claim]:
                out = {"claim": claim}
            case ["began", job, node, at, *element]:
                number = "".join(element) or job
                out = {
                    "claim": out.get("claim", ""),
                    "began": True,
                    "job": job,
                    "number": number,
                    "node": node,
                    "began_ms": _ms(at),
                }
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
