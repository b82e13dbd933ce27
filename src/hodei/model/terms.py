"""A term about a node: conditions on its labels and fields that must hold together."""

from __future__ import annotations

from msgspec import Struct

from hodei.model.selector import Requirement


class NodeTerm(Struct, frozen=True, omit_defaults=True):
    """Conditions on a node's labels and fields (`metadata.name`); all of them must hold."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def __str__(self) -> str:
        return ", ".join(str(requirement) for requirement in (*self.labels, *self.fields))
