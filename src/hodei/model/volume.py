"""Storage that a member needs at hand: where it can be reached, whose limits it counts against, whom it can not share with."""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from hodei.model.affinity import Requirement

# ----------------------------------------------------------------------------------------------- terms
# A term about a node: conditions on its labels and fields that must hold together.


class NodeTerm(Struct, frozen=True, omit_defaults=True):
    """Conditions on a node's labels and fields (`metadata.name`); all of them must hold."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(requirement) for requirement in (*self.labels, *self.fields))


# ----------------------------------------------------------------------------------------------------


# Where a volume is, where it could be made, where there is enough storage for it, and in which zone it is: the same demand,
# told apart for those who read why.
ReachKind = Literal["there", "could_be", "space", "zone"]


class Reach(Struct, frozen=True, omit_defaults=True):
    """From which nodes a volume can be reached: any one of `terms` must hold (none given: from no node)."""

    kind: ReachKind
    terms: tuple[NodeTerm, ...] = ()


class Choice(Struct, frozen=True, omit_defaults=True):
    """A free volume that one claim may have: its name, and from where it can be reached (no terms: from everywhere)."""

    name: str
    terms: tuple[NodeTerm, ...] = ()


class Volume(Struct, frozen=True, omit_defaults=True):
    """One volume of a member.

    `handle` tells volumes apart: one that several members of a node use is attached to it once. `reach`: all of these
    must hold. `limit`: the name under which a node says how many of the kind it can take ("": no limit is known of).
    `alone`: no other member may use it, on the same node or anywhere (`read_only` ones may share a node).
    `choices`: it is a claim that takes one of these free volumes, the best first, each of which only one claim can have;
    `made`: where a new one can be made instead (all of these must hold), None for nowhere.
    """

    handle: str
    reach: tuple[Reach, ...] = ()
    limit: str = ""
    alone: Literal["", "node", "anywhere"] = ""
    read_only: bool = False
    choices: tuple[Choice, ...] = ()
    made: tuple[Reach, ...] | None = None
