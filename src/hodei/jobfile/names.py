"""Which names are good names: Kubernetes' rules, each refusal with a name that would do. Answers are remembered."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches
from functools import lru_cache

from hodei.model.errors import InvalidInput

_LABEL = re.compile(r"[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?")
_DOTTED = re.compile(r"(?=.{1,63}\Z)[a-z0-9](?:[-a-z0-9.]*[a-z0-9])?")
_PREFIX = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?(?:\.[a-z0-9](?:[-a-z0-9]{0,61}[a-z0-9])?)*")
_WORD = re.compile(r"[A-Za-z0-9](?:[-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?")
_ENV = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,255}")


def shown(value: object) -> str:
    """A short safe picture of what was written: never megabytes, never control or bidirectional characters."""
    if not isinstance(value, str | bool | float | None) and not (isinstance(value, int) and abs(value) < 2**64):
        return f"({type(value).__name__})"
    text = value if isinstance(value, str) else str(value)
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'memory'?` if one of the known words is near, else nothing."""
    close = get_close_matches(word[:64], list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


@lru_cache(maxsize=8192)
def job_name(name: str) -> str:
    if not _DOTTED.fullmatch(name):
        raise InvalidInput(
            f"{shown(name)} is not a job name: up to 63 lower case letters, digits, '-' and '.', "
            f"a letter or digit at both ends{_try(name)}"
        )
    return name


@lru_cache(maxsize=1024)
def plain_name(name: str) -> str:
    """The name of a project or task."""
    if not _LABEL.fullmatch(name):
        raise InvalidInput(
            f"{shown(name)} is not a name: up to 63 lower case letters, digits and '-', "
            f"a letter or digit at both ends{_try(name.replace('.', '-'))}"
        )
    return name


@lru_cache(maxsize=1024)
def word(text: str) -> str:
    """A name given by others: of a backend, a profile, a GPU, a place."""
    if not _WORD.fullmatch(text):
        raise InvalidInput(
            f"{shown(text)} is not a name: up to 63 letters, digits, '-', '_' and '.', a letter or digit at both ends"
        )
    return text


@lru_cache(maxsize=4096)
def label_key(key: str) -> str:
    prefix, slash, name = key.rpartition("/")
    if not _WORD.fullmatch(name) or (slash and not _PREFIX.fullmatch(prefix)):
        raise InvalidInput(
            f"{shown(key)} is not a label key: up to 63 letters, digits, '-', '_' and '.', "
            "before them perhaps a domain and '/', as in example.com/team"
        )
    return key


@lru_cache(maxsize=4096)
def label_value(value: str) -> str:
    if value and not _WORD.fullmatch(value):
        raise InvalidInput(
            f"{shown(value)} is not a label value: up to 63 letters, digits, '-', '_' and '.', "
            "a letter or digit at both ends"
        )
    return value


@lru_cache(maxsize=1024)
def env_name(name: str) -> str:
    if not _ENV.fullmatch(name):
        raise InvalidInput(
            f"{shown(name)} is not the name of a variable: letters, digits, '_', '-' and '.', not beginning with a digit"
        )
    return name


@lru_cache(maxsize=1024)
def name_of_program(program: str) -> str:
    """A job name for a command: the program's own, as far as it can be one."""
    return _nearest(program.strip().partition(" ")[0].rpartition("/")[2][:63]) or "job"


def _nearest(name: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", name[:63].lower()).strip("-.")


def _try(name: str) -> str:
    near = _nearest(name) if len(name) <= 63 else ""
    return f"; try {near!r}" if near and near != name else ""
