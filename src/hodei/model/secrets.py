"""Which variables are not for every eye, by their names. Their values are shown to nobody who did not ask for them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from msgspec import structs

from hodei.model.job import JobSpec

MASK = "***"
_ANYWHERE = ("TOKEN", "PASSWORD", "PASSWD", "PASSPHRASE", "SECRET", "CREDENTIAL", "PRIVATE")
_AT_THE_END = ("KEY", "PWD", "PASS", "DSN")


def looks_secret(name: str) -> bool:
    upper = name.upper()
    return upper.endswith(_AT_THE_END) or any(word in upper for word in _ANYWHERE)


def masked(env: Mapping[str, str]) -> dict[str, str]:
    return {name: MASK if looks_secret(name) else value for name, value in env.items()}


def without_secrets(spec: JobSpec) -> JobSpec:
    """The same job as far as any decision goes; itself if it has nothing to hide."""
    if not any(looks_secret(name) for task in spec.tasks for name in task.env):
        return spec
    return structs.replace(spec, tasks=tuple(structs.replace(task, env=masked(task.env)) for task in spec.tasks))


def without_secrets_in(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The same settings for every eye, however deep a secret is in them. What ends in `_file` names a place, not a secret."""
    return {
        name: MASK if looks_secret(name) and not name.endswith("_file") and value else _shown(value)
        for name, value in settings.items()
    }


def _shown(value: Any) -> Any:
    if isinstance(value, Mapping):
        return without_secrets_in(value)
    return [_shown(each) for each in value] if isinstance(value, list | tuple) else value
