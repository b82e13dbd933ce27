"""Extensions by name: built in, announced by an installed package (entry points), or `module:attribute`.

Built-in names come first and need no installed metadata. Metadata is read only for a name that is not built in, so
neither the CLI nor a start without third-party extensions scans it. `pyproject.toml` announces the same built-in names.
"""

from __future__ import annotations

import importlib
from collections.abc import Collection, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from hodei.model.errors import HodeiError, InvalidInput, did_you_mean

PLUGINS = "hodei.plugins"
QUEUES = "hodei.queues"
BACKENDS = "hodei.backends"
STORES = "hodei.stores"
AUTHENTICATORS = "hodei.authenticators"
ESTIMATORS = "hodei.estimators"
COLLECTORS = "hodei.collectors"
SINKS = "hodei.sinks"

# Plugins and queues are classes that every profile needs: `hodei.plugins.registry` imports them.
BUILT_IN: dict[str, dict[str, str]] = {
    BACKENDS: {
        "local": "hodei.backends.local",
        "instant": "hodei.backends.instant",
        "docker": "hodei.backends.docker",
        "slurm": "hodei.backends.hpc.slurm",
        "pbs": "hodei.backends.hpc.pbs",
        "kubernetes": "hodei.backends.kubernetes",
    },
    STORES: {"sqlite": "hodei.store.sqlite:from_url", "memory": "hodei.store.memory:from_url"},
    AUTHENTICATORS: {"tokens": "hodei.server.auth:open_tokens"},
    ESTIMATORS: {
        "user": "hodei.control.estimates:UserEstimates",
        "learned": "hodei.control.estimates:LearnedEstimates",
        "corrected": "hodei.control.estimates:CorrectedEstimates",
    },
    COLLECTORS: {"process": "hodei.runtime.observers:ProcessMetrics"},
    SINKS: {"jsonl": "hodei.runtime.observers:JsonLines"},
}


class ExtensionMissing(InvalidInput):
    """No built-in and no installed extension has this name."""


def load(
    group: str,
    name: str,
    what: str,
    *,
    built_in: Mapping[str, Any] | None = None,
    trusted: Collection[str] | None = None,
) -> Any:
    """The object behind `name`. `built_in`: its table, of objects or paths. `trusted`: the only other names that may be
    loaded; None for any. InvalidInput names the package at fault."""
    known = BUILT_IN.get(group, {}) if built_in is None else built_in
    if name in known:
        found = known[name]
        return _import(found) if isinstance(found, str) else found
    entry = None if ":" in name else find_entry(group, name)
    if entry is None and ":" not in name:
        raise ExtensionMissing(
            f"there is no {what} {name[:80]!r}{did_you_mean(name, known)}",
            hint=f"name one of: {', '.join(sorted({*known, *installed(group)}))}; a package adds more by the entry point"
            f" group {group}, and module:name works too",
        )
    if trusted is not None and name not in trusted:
        raise InvalidInput(
            f"{what} {name[:80]!r} is not in use on this server",
            hint="only built-in names and those of the server's own configuration may be used here",
        )
    try:
        return entry.load() if entry is not None else _import(name)
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        if entry is None:
            raise InvalidInput(
                f"{what} {name!r} cannot be imported: {cause}", hint="check the path, and that the server can import it"
            ) from error
        package = entry.dist.name if entry.dist is not None else entry.module
        version = f" {entry.dist.version}" if entry.dist is not None else ""
        raise InvalidInput(
            f"{what} {name!r} of the package {package}{version} cannot be loaded from {entry.value}: {cause}",
            hint=f"repair it with `pip install --upgrade {package}`, or take {name!r} out of the configuration",
        ) from error


def find_entry(group: str, name: str) -> EntryPoint | None:
    """InvalidInput if two packages announce the name: which of them counts would depend on the installation's order."""
    entries = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if len(entries) > 1:
        packages = ", ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries.values()))
        raise InvalidInput(
            f"{name!r} of {group} is announced by several packages: {packages}",
            hint="uninstall all but one, or write module:name",
        )
    return next(iter(entries.values()), None)


def installed(group: str) -> set[str]:
    """Names that installed packages announce. Reads all metadata: for messages only."""
    return {entry.name for entry in entry_points(group=group)}


def make(
    group: str, name: str, what: str, *arguments: Any, trusted: Collection[str] | None = None, **options: Any
) -> Any:
    """The extension, called with these arguments. InvalidInput if it does not take them."""
    factory = load(group, name, what, trusted=trusted)
    try:
        return factory(*arguments, **options)
    except HodeiError:
        raise
    except Exception as error:
        raise InvalidInput(f"{what} {name!r} cannot be made: {error}", hint="check its options") from error


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
