"""Whose eyes may see which values of a job's variables.

Names are for everyone who may read jobs. Values are for the owner of the job and administrators, and values of variables
whose names look secret only if they ask for them. No guess by name decides what others see: they see no value at all.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from msgspec import structs

from hodei.model.job import JobSpec

MASK = "***"
_ANYWHERE = ("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "PRIVATE")
_AT_THE_END = ("KEY", "PWD", "PASS", "DSN")
# All values, those of variables that do not look secret, or only the names.
Shown = Literal["all", "plain", "names"]


def looks_secret(name: str) -> bool:
    upper = name.upper()
    return upper.endswith(_AT_THE_END) or any(word in upper for word in _ANYWHERE)


def masked(env: Mapping[str, str], shown: Shown) -> dict[str, str]:
    if shown == "all":
        return dict(env)
    return {name: MASK if shown == "names" or looks_secret(name) else value for name, value in env.items()}


def without_values(spec: JobSpec) -> JobSpec:
    """The same job as far as any decision goes, with no value of a variable in it."""
    for task in spec.tasks:  # faster than `any`, and asked of every job
        if task.env:
            break
    else:
        return spec
    return structs.replace(
        spec, tasks=tuple(structs.replace(task, env=masked(task.env, "names")) for task in spec.tasks)
    )


def without_secrets_in(settings: Mapping[str, Any], *, env: Shown = "plain") -> dict[str, Any]:
    """The same settings for every eye, however deep a secret is in them. What ends in `_file` names a place, not a secret.
    `env`: what to show of tables of that name, which are variables."""
    return {
        name: MASK if looks_secret(name) and not name.endswith("_file") and value else _shown(name, value, env)
        for name, value in settings.items()
    }


def _shown(name: str, value: Any, env: Shown) -> Any:
    if isinstance(value, Mapping):
        return masked(value, env) if name == "env" else without_secrets_in(value, env=env)
    return [_shown(name, each, env) for each in value] if isinstance(value, list | tuple) else value
