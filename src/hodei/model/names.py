"""The syntax of names and labels: that of Kubernetes where it has one."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import lru_cache

from hodei.model.errors import InvalidInput

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_DOTTED = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)*")
_WORD = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")


def safe_repr(value: object) -> str:
    """A short `repr` for messages, without control or bidirectional characters."""
    if not isinstance(value, str | bool | float | None) and not (isinstance(value, int) and abs(value) < 2**64):
        return f"({type(value).__name__})"
    text = value if isinstance(value, str) else str(value)
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."


def _name_check(
    pattern: re.Pattern[str], expected: str, *, size: int, nearest: Callable[[str], str] = lambda name: ""
) -> Callable[[str], str]:
    """A cached validator that returns the name. `nearest`: a similar valid name, for the message."""

    @lru_cache(maxsize=size)
    def check(name: str) -> str:
        if not pattern.fullmatch(name):
            near = nearest(name) if len(name) <= 63 else ""
            suggestion = f"; try {near!r}" if near and near != name else ""
            raise InvalidInput(f"{safe_repr(name)} is not {expected}{suggestion}")
        return name

    return check


_ENDS = "a letter or digit at both ends"
_WORD_RULE = f"up to 63 letters, digits, '-', '_' and '.', {_ENDS}"
job_name = _name_check(
    _DOTTED, f"a job name: up to 63 lower case letters, digits, '-' and '.', {_ENDS}", size=8192,
    nearest=lambda name: _nearest(name),
)  # fmt: skip
# Projects and tasks.
plain_name = _name_check(
    _LABEL, f"a name: up to 63 lower case letters, digits and '-', {_ENDS}", size=1024,
    nearest=lambda name: _nearest(name.replace(".", "-")),
)  # fmt: skip
# Backends, profiles, GPU types and topology domains.
word = _name_check(_WORD, f"a name: {_WORD_RULE}", size=1024)
label_value = _name_check(re.compile(f"(?:{_WORD.pattern})?"), f"a label value: {_WORD_RULE}", size=4096)
env_name = _name_check(
    _ENV, "the name of a variable: letters, digits, '_', '-' and '.', not starting with a digit", size=1024
)


@lru_cache(maxsize=4096)
def label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if not _WORD.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
        raise InvalidInput(
            f"{safe_repr(key)} is not a label key: up to 63 letters, digits, '-', '_' and '.', "
            "optionally after a domain and '/', as in example.com/team"
        )
    return key


def parse_labels(labels: Mapping[str, str]) -> None:
    """InvalidInput with the problem of each key."""
    problems = []
    for key, value in labels.items():
        try:
            label_key(key)
            label_value(value)
        except InvalidInput as error:
            problems.append((key, error.message))
    if problems:
        raise InvalidInput(problems[0][1], problems=tuple(problems))


@lru_cache(maxsize=1024)
def name_of_program(program: str) -> str:
    """A job name derived from a command."""
    return _nearest(program.strip().partition(" ")[0].rpartition("/")[2][:63]) or "job"


def _nearest(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name[:63].lower()).strip("-.")
