"""Values as YAML on one line (`{job: big, on: [n1, n2]}`), for files that people read. `yamlfile` reads it back."""

from __future__ import annotations

import json
import re
from typing import Any

from hodei.jobfile.yaml_reader import load_yaml
from hodei.model.errors import InvalidInput

_PLAIN = re.compile(r"[A-Za-z0-9_./+-](?:[A-Za-z0-9_./+ -]*[A-Za-z0-9_./+-])?")


def flow(value: Any) -> str:
    """`value` (mappings, lists and scalars) on one line; text is quoted only where it must be."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{flow(key)}: {flow(inner)}" for key, inner in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(flow, value)) + "]"
    if isinstance(value, str):
        return value if _says_itself(value) else json.dumps(value, ensure_ascii=False)
    return json.dumps(value)


def _says_itself(text: str) -> bool:
    """Whether the bare text is read back as this very text, and not as a number, a list or nothing."""
    if not _PLAIN.fullmatch(text) or text.startswith(("- ", "---")):
        return False
    try:
        return load_yaml(text) == [text]
    except InvalidInput:
        return False
