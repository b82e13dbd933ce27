"""Extensions by name: built in, from an entry point of an installed package, or `module:attribute`.

Built-in names win and need no installed metadata. Metadata is read only for other names, so neither the CLI nor a start
without third-party extensions scans it. `pyproject.toml` lists the built-in ones as entry points too; a test keeps both
equal.
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


def _classes(module: str, **classes: str) -> dict[str, str]:
    return {name: f"hodei.plugins.{module}:{found}" for name, found in classes.items()}


_PLUGINS = {
    **_classes("affinity", affinity="NodeAffinity", scope="Scope"),
    **_classes("allocation", balanced_allocation="BalancedAllocation", least_allocated="LeastAllocated",
        most_allocated="MostAllocated", requested_to_capacity_ratio="RequestedToCapacityRatio"),
    **_classes("backend_policies", cost="Cost", cost_optimized="CostOptimized", locality="Locality",
        performance="Performance"),
    **_classes("capabilities", capabilities="Capabilities"),
    **_classes("devices", devices="Devices"),
    **_classes("distribution", distribution="Distribution"),
    **_classes("fallback_chain", fallback_chain="FallbackChain"),
    **_classes("fit", fit="Fit", overcommit="Overcommit", pools="Pools"),
    **_classes("fragmentation", fgd="Fgd", gpu_hodei="GpuHodei"),
    **_classes("gang_topology", gang_topology="GangTopology"),
    **_classes("gpu_packing", gpu_bestfit="GpuBestfit", gpu_clustering="GpuClustering", gpu_dotprod="GpuDotprod",
        gpu_packing="GpuPacking", gpu_random="GpuRandom"),
    **_classes("health", health="Health"),
    **_classes("job_affinity", job_affinity="JobAffinityPlugin"),
    **_classes("locality", data_locality="DataLocality", data_rules="DataRules", image_locality="ImageLocality",
        locality_aware="LocalityAware", proximity="Proximity"),
    **_classes("platform", platform="Platform"),
    **_classes("ports", ports="Ports"),
    **_classes("quota", quota="Quota"),
    **_classes("spill", spill="Spill"),
    **_classes("spread", spread="Spread"),
    **_classes("start_reservations", start_reservations="StartReservations"),
    **_classes("strategies", bin_packing="BinPacking", least_loaded="LeastLoaded", load="Load", most_free="MostFree",
        resource="Resource", resource_balance="ResourceBalance", round_robin="RoundRobin"),
    **_classes("taints", gpu_last="GpuLast", taints="Taints"),
    **_classes("volumes", volumes="Volumes"),
    **_classes("workload", workload="Workload"),
}  # fmt: skip

BUILT_IN: dict[str, dict[str, str]] = {
    PLUGINS: _PLUGINS,
    QUEUES: _classes("batch", batch="Batch")
    | _classes("queues", fair="Fair", fifo="Fifo", multifactor="Multifactor", priority="Priority"),
    BACKENDS: {
        "local": "hodei.backends.local",
        "instant": "hodei.backends.instant",
        "docker": "hodei.backends.docker",
        "slurm": "hodei.backends.hpc.slurm",
        "pbs": "hodei.backends.hpc.pbs",
        "kubernetes": "hodei.backends.kubernetes",
        "bare_metal": "hodei.backends.bare_metal",
        "command": "hodei.backends.command",
        "edge": "hodei.backends.edge",
        "hosts": "hodei.backends.hosts",
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
    """The object behind `name`. `built_in`: objects or paths by name, instead of BUILT_IN. `trusted`: the only other
    names that may be loaded; None for any. InvalidInput names the package at fault."""
    known = BUILT_IN.get(group, {}) if built_in is None else built_in
    if name in known:
        found = known[name]
        return _import(found) if isinstance(found, str) else found
    entry = None if ":" in name else find_entry(group, name)
    if entry is None and ":" not in name:
        raise ExtensionMissing(
            f"there is no {what} {name[:80]!r}{did_you_mean(name, known)}",
            hint=f"name one of: {', '.join(sorted({*known, *installed(group)}))}; packages add more with the entry point"
            f" group {group}, and module:name works too",
        )
    if trusted is not None and name not in trusted:
        raise InvalidInput(
            f"{what} {name[:80]!r} is not in use on this server",
            hint="only built-in names and names in the server's own configuration may be used here",
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
            hint=f"repair it with `pip install --upgrade {package}`, or remove {name!r} from the configuration",
        ) from error


def find_entry(group: str, name: str) -> EntryPoint | None:
    """InvalidInput if two packages provide the name: the choice would depend on the order of installation."""
    entries = {entry.value: entry for entry in entry_points(group=group, name=name)}
    if len(entries) > 1:
        packages = ", ".join(sorted(entry.dist.name if entry.dist else entry.value for entry in entries.values()))
        raise InvalidInput(
            f"{name!r} of {group} is provided by several packages: {packages}",
            hint="uninstall all but one, or write module:name",
        )
    return next(iter(entries.values()), None)


def installed(group: str) -> set[str]:
    """Names that installed packages provide. Reads all metadata: for messages only."""
    return {entry.name for entry in entry_points(group=group)}


def make(
    group: str, name: str, what: str, *arguments: Any, trusted: Collection[str] | None = None, **options: Any
) -> Any:
    """The extension, called with these arguments. InvalidInput if it does not accept them."""
    return construct(load(group, name, what, trusted=trusted), name, what, *arguments, **options)


def construct(factory: Any, name: str, what: str, *arguments: Any, **options: Any) -> Any:
    try:
        return factory(*arguments, **options)
    except HodeiError:
        raise
    except Exception as error:
        raise InvalidInput(f"{what} {name!r} cannot be created: {error}", hint="check its options") from error


def _import(path: str) -> Any:
    module, _, attribute = path.partition(":")
    found = importlib.import_module(module)
    return getattr(found, attribute) if attribute else found
