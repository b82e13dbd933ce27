"""Where in the text of a YAML file a value stands: the line for an error, the piece to write anew.

Only for text that `jobfile.yaml_reader` has read without complaint.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, NamedTuple

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


class Piece(NamedTuple):
    """`line` counts from 1; `start` and `end` are places in the text. `is_flow`: written in brackets, on any one line."""

    line: int
    start: int
    end: int
    is_flow: bool = False


def piece_at(text: str, path: str) -> Piece | None:
    """The value at a path such as `jobs[2].cpu`, or the nearest thing around it; None for an empty file."""
    node = _composed(text)
    if node is None:
        return None
    line = node.start_mark.line
    for number, key in _STEP.findall(path):
        inner = None
        if number and isinstance(node, yaml.SequenceNode) and int(number) < len(node.value):
            inner = node.value[int(number)]
            line = inner.start_mark.line
        elif key and isinstance(node, yaml.MappingNode):
            for name, value in node.value:
                if getattr(name, "value", None) == key:
                    inner, line = value, name.start_mark.line
        if inner is None:
            break
        node = inner
    is_flow = bool(getattr(node, "flow_style", False))
    return Piece(line + 1, node.start_mark.index, node.end_mark.index, is_flow)


@lru_cache(maxsize=2)
def _composed(text: str) -> Any:
    return yaml.compose(text, Loader=_Loader)


def line_of(text: str, path: str) -> int:
    found = piece_at(text, path)
    return found.line if found else 1
