"""Configurations one after another: which is in force, who set it and when, and in what two of them differ."""

from __future__ import annotations

from hashlib import sha256
from typing import Any, Literal

import msgspec
from msgspec import Struct

from hodei.model.config import Config, ProfileConfig, SchedulingConfig
from hodei.model.explanation import WhatIf
from hodei.model.secrets import without_secrets_in

# start: read from the file when the server came up. reload: read from it again. set: handed in. undo: an earlier one.
How = Literal["start", "reload", "set", "undo"]
# Sections of `scheduling` that are read when the server comes up: decisions do not depend on them.
_AT_START = ("forecast", "data")


class Configuration(Struct, frozen=True, omit_defaults=True):
    """One of them. `restores`: the number of the earlier one that it brought back. `file`: a fingerprint of what the
    configuration file said then."""

    number: int
    at_ms: int
    by: str
    how: How
    scheduling: SchedulingConfig
    restores: int = 0
    file: str = ""


class Difference(Struct, frozen=True, omit_defaults=True):
    """One setting, by its path; None where it is not set."""

    path: str
    before: Any = None
    after: Any = None


class ConfigChange(Struct, frozen=True, omit_defaults=True):
    """What a change of the configuration did or (not `applied`) would do. `number` is that of the one in force now,
    `effect`: who would start when, for a dry run. `needs_restart`: settings that differ and do not count before that."""

    applied: bool
    number: int
    changes: tuple[Difference, ...] = ()
    needs_restart: tuple[Difference, ...] = ()
    effect: WhatIf | None = None
    notes: tuple[str, ...] = ()


def fingerprint(scheduling: SchedulingConfig) -> str:
    return sha256(msgspec.json.encode(scheduling, order="deterministic")).hexdigest()


def differences(before: SchedulingConfig, after: SchedulingConfig) -> tuple[Difference, ...]:
    """Of a profile that is there on one side alone, what it says is told, and not all that it leaves at the default."""
    plain = dict(_flat(msgspec.to_builtins(ProfileConfig()), ""))
    out, alone = list[Difference](), set(before.profiles) ^ set(after.profiles)
    for found in _between(before, after, "scheduling"):
        name = next((name for name in alone if found.path.startswith(f"scheduling.profiles.{name}.")), "")
        key = found.path.removeprefix(f"scheduling.profiles.{name}")
        said = found.after if found.before is None else found.before
        if not name or key not in plain or plain[key] != said:
            out.append(found)
    for name in sorted(alone):
        if not any(found.path.startswith(f"scheduling.profiles.{name}.") for found in out):
            path, was_there = f"scheduling.profiles.{name}", name in before.profiles
            out.append(Difference(path, {} if was_there else None, None if was_there else {}))
    return tuple(out)


def beyond_scheduling(before: Config, after: Config) -> tuple[Difference, ...]:
    """What a restart is needed for."""
    found = (*_between(before.server, after.server, "server"), *_between(before.nodes, after.nodes, "nodes"))
    old_backends, new_backends = without_secrets_in(before.backends), without_secrets_in(after.backends)
    found = (*found, *_between(old_backends, new_backends, "backends"))
    found = (*found, *_between(before.health, after.health, "health"))
    for section in _AT_START:
        old, new = getattr(before.scheduling, section), getattr(after.scheduling, section)
        found = (*found, *_between(old, new, f"scheduling.{section}"))
    return found


def code_named(scheduling: SchedulingConfig) -> set[str]:
    """The plugins that it names by a path to code (`module:Class`)."""
    named = (name for profile in scheduling.profiles.values() for name in profile.plugin_names())
    return {name for name in named if ":" in name}


def undone(history: tuple[Configuration, ...]) -> Configuration | None:
    """The one that `undo` brings back: the last before that which is in force, whichever way it came to be."""
    if not history:
        return None
    here = history[-1].restores or history[-1].number
    earlier = [each for each in history if each.number < here and not each.restores]
    return earlier[-1] if earlier else None


def _between(before: Any, after: Any, at: str) -> tuple[Difference, ...]:
    old, new = (dict(_flat(msgspec.to_builtins(side), at)) for side in (before, after))
    paths = dict.fromkeys((*old, *new))
    return tuple(Difference(path, old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path))


def _flat(value: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{at}.{key}")]
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return [pair for number, inner in enumerate(value) for pair in _flat(inner, f"{at}[{number}]")]
    return [] if value in ({}, [], ()) else [(at, value)]
