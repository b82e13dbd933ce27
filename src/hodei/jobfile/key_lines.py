"""In which line of a YAML or JSON text each key stands, by the paths that mistakes are told with (`tasks[0].memory`).

Only asked when there is a mistake to show; texts that cannot be read give no lines.
"""

from __future__ import annotations

from typing import Any

import yaml

_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
# Larger texts are not read a second time.
_LARGEST = 4 * 1024 * 1024
_MOST_KEYS = 100_000


def key_lines(text: str) -> list[dict[str, int]]:
    """For each job of the text, in order: path to line, counted from 1. A list, or a mapping with the one key `jobs`, holds
    several jobs."""
    if len(text) > _LARGEST:
        return []
    out: list[dict[str, int]] = []
    try:
        for document in yaml.compose_all(text, Loader=_Loader):
            if document is not None and not _is_null(document):
                out += [_lines_in(job) for job in _jobs_in(document)]
    except (yaml.YAMLError, RecursionError, ValueError):
        return []
    return out


def _is_null(node: Any) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.value in ("", "~", "null")


def _jobs_in(node: Any) -> list[Any]:
    if isinstance(node, yaml.MappingNode) and [key.value for key, _ in node.value] == ["jobs"]:
        inner = node.value[0][1]
        node = inner if isinstance(inner, yaml.SequenceNode) else node
    return list(node.value) if isinstance(node, yaml.SequenceNode) else [node]


def _lines_in(job: Any) -> dict[str, int]:
    lines = {"": job.start_mark.line + 1}
    seen: set[int] = set()  # what an alias names is looked at once
    left: list[tuple[str, Any]] = [("", job)]
    while left and len(lines) < _MOST_KEYS:
        path, node = left.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                inner = f"{path}.{key.value}" if path else str(key.value)
                lines.setdefault(inner, key.start_mark.line + 1)
                left.append((inner, value))
        elif isinstance(node, yaml.SequenceNode):
            for number, value in enumerate(node.value):
                inner = f"{path}[{number}]"
                lines.setdefault(inner, value.start_mark.line + 1)
                left.append((inner, value))
    return lines
