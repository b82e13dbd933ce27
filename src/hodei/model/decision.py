"""Why: the values that say no (`Verdict`), and the record of a yes (`Decision`)."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.ids import NodeName

# How a gang of a line that promises starts came to its own: first in line; before one that was promised its start, and
# over by then; beside what is promised.
StartKind = Literal["head", "backfill", "spill"]


class Reason(Struct, frozen=True, omit_defaults=True):
    """Why a plugin says no. `code` is stable; `evictable` is true when stopping other work could change the answer.
    `hint`: what a user can do about it, if the plugin knows."""

    plugin: str
    code: str
    text: str
    evictable: bool = False
    hint: str = ""


class Verdict(Struct, frozen=True, omit_defaults=True):
    """A reason and the nodes behind it. A verdict without nodes refuses the whole gang before any node is looked at."""

    reason: Reason
    count: int = 0
    nodes: tuple[NodeName, ...] = ()


class Term(Struct, frozen=True):
    """One plugin's part in a score: `score` in hundredths of a point (0 to 10,000), times `weight`."""

    plugin: str
    score: int
    weight: int


class Candidate(Struct, frozen=True, omit_defaults=True):
    """A node that could take the run, with its weighted mean score in hundredths of a point."""

    node: NodeName
    score: int
    terms: tuple[Term, ...] = ()


class Decision(Struct, frozen=True, omit_defaults=True):
    """Why a run landed where it did: the chosen node, the runners-up, and how many nodes were in question. `note`: what
    else a plugin says about the choice."""

    chosen: Candidate
    runners_up: tuple[Candidate, ...] = ()
    feasible: int = 0
    nodes: int = 0
    profile: str = "default"
    note: str = ""
