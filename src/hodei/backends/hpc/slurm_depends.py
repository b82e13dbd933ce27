"""`--dependency` of sbatch: `afterok:12:13,afterany:14`, or with `?` between them for any one."""

from __future__ import annotations

import re
from typing import NamedTuple

_KINDS = {"afterok": "succeeded", "afterany": "completed", "afternotok": "failed"}
_JOB = re.compile(r"\d+(_(\d+|\*|\[[\d,:-]+\]))?")


class Depends(NamedTuple):
    """The jobs as they were written, by how they must have ended. `any`: one of them is enough."""

    jobs: dict[str, list[str]]
    any: bool = False


def dependencies(text: str) -> Depends | str:
    """Or what can not be done."""
    if "," in text and "?" in text:
        return "has both , and ?"
    jobs: dict[str, list[str]] = {}
    for part in re.split(r"[,?]", text):
        kind, _, rest = part.partition(":")
        if _JOB.fullmatch(kind) and not rest:  # a number alone is an old way to write afterany
            kind, rest = "afterany", kind
        if kind not in _KINDS:
            return f"({kind[:40]}) has no like here; there is {', '.join(_KINDS)}"
        named = rest.split(":") if rest else []
        if not named or not all(map(_JOB.fullmatch, named)):
            return f"names no jobs after {kind}"
        jobs.setdefault(_KINDS[kind], []).extend(named)
    return Depends(jobs, "?" in text)
