"""Filters, scores, queues and tie-breakers by name, and the profiles made of them.

A plugin is a class with a `name` and at least one point; nothing else is ever called. `hodei.extensions` finds those that
are not built in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, cast

from hodei.engine.points import QueueSort
from hodei.engine.profile import Profile, make_profile
from hodei.extensions import load
from hodei.model.config import ProfileConfig, SchedulingConfig, SpillConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.resources import parse_duration_ms
from hodei.plugins.affinity import NodeAffinity, Scope
from hodei.plugins.allocation import BalancedAllocation, LeastAllocated, MostAllocated, RequestedToCapacityRatio
from hodei.plugins.backend_policies import Cost, CostOptimized, Locality, Performance
from hodei.plugins.batch import Batch
from hodei.plugins.capabilities import Capabilities
from hodei.plugins.devices import Devices
from hodei.plugins.distribution import Distribution
from hodei.plugins.fallback_chain import FallbackChain
from hodei.plugins.fit import Fit, Overcommit, Pools
from hodei.plugins.fragmentation import Fgd, GpuHodei
from hodei.plugins.gang_topology import GangTopology
from hodei.plugins.gpu_packing import GpuBestfit, GpuClustering, GpuDotprod, GpuPacking, GpuRandom
from hodei.plugins.health import Health
from hodei.plugins.job_affinity import JobAffinityPlugin
from hodei.plugins.locality import DataLocality, DataRules, ImageLocality, LocalityAware, Proximity
from hodei.plugins.platform import Platform
from hodei.plugins.ports import Ports
from hodei.plugins.queues import TIE_BREAKERS, Fair, Fifo, Multifactor, Priority, TieBreakingQueue
from hodei.plugins.quota import Quota
from hodei.plugins.spill import Spill, SpillRule
from hodei.plugins.spread import Spread
from hodei.plugins.start_reservations import StartReservations
from hodei.plugins.strategies import BinPacking, LeastLoaded, Load, MostFree, Resource, ResourceBalance, RoundRobin
from hodei.plugins.taints import GpuLast, Taints
from hodei.plugins.volumes import Volumes
from hodei.plugins.workload import Workload

PLUGINS: dict[str, type[Any]] = {
    plugin.name: plugin
    for plugin in (
        Health, Platform, Capabilities, NodeAffinity, Taints, JobAffinityPlugin, Spread, Ports, Fit, Pools, Devices, Overcommit,
        Workload,
        Distribution, GangTopology, StartReservations, Scope, Quota, Volumes, ImageLocality,
        FallbackChain, GpuLast, Resource, Load, Proximity, Spill, DataRules, CostOptimized, Performance, Locality,
        LeastLoaded, MostFree, ResourceBalance, BinPacking, RoundRobin, LocalityAware,
        LeastAllocated, MostAllocated, RequestedToCapacityRatio, BalancedAllocation, DataLocality, Cost,
        Fgd, GpuHodei, GpuBestfit, GpuPacking, GpuClustering, GpuDotprod, GpuRandom,
    )
}  # fmt: skip
QUEUES: dict[str, type[Any]] = {queue.name: queue for queue in (Fifo, Priority, Fair, Multifactor, Batch)}

BUILT_IN = frozenset((*PLUGINS, *QUEUES, *TIE_BREAKERS))

FILTERS = (
    "health", "platform", "capabilities", "affinity", "taints", "job_affinity", "spread", "ports", "fit", "pools",
    "devices", "overcommit", "workload",
)  # fmt: skip
# Backends are chosen before the places within them.
LAYOUTS = ("distribution", "gang_topology", "start_reservations")
WEIGHTS = {"resource": 40, "load": 30, "affinity": 20, "proximity": 10, "platform": 20,
           "job_affinity": 20, "spread": 20, "taints": 30}  # fmt: skip
_OF_DEFAULT_ALONE = ("resource", "load", "affinity", "proximity")
# The built-in profiles; what is not among their own weights (a preferred backend, say) counts the same in each.
BASES: dict[str, dict[str, int]] = {
    "default": WEIGHTS,
    "compute": {
        **{name: weight for name, weight in WEIGHTS.items() if name not in _OF_DEFAULT_ALONE},
        "fit": 30,
        "affinity": 20,
        "load": 20,
        "data_locality": 20,
        "cost": 10,
    },
}
# What a score is worth that a profile names and its base does not have.
DEFAULT_WEIGHTS = {name: weight for base in reversed(BASES.values()) for name, weight in base.items()}
_POINTS = ("pre_filter", "layouts", "filter", "post_filter", "score", "reserve", "permit", "bind")


def find_plugin(
    name: str, arguments: Mapping[str, Any] | None = None, *, trusted: Collection[str] | None = None
) -> Any:
    """The plugin of that name, made with `arguments`. InvalidInput when there is none, or it does not fit. `trusted`: the
    only names besides the built-in ones that may be loaded; None for any."""
    made = _class_of("plugin", name, PLUGINS, "hodei.plugins", trusted)
    if not _has_method(made, _POINTS):
        raise _not_a_plugin(name)
    try:
        plugin = made(**dict(arguments or {}))
    except Exception as error:
        raise InvalidInput(f"plugin {name!r} cannot be made: {error}", hint="check its arguments") from error
    if not isinstance(getattr(plugin, "name", None), str):
        raise _not_a_plugin(name)
    return plugin


def _not_a_plugin(name: str) -> InvalidInput:
    return InvalidInput(f"{name!r} is not a plugin", hint=f"a class with a name and one of: {', '.join(_POINTS)}")


def build_profile(
    name: str,
    *,
    base: str = "default",
    queue: str = "priority",
    queue_arguments: Mapping[str, Any] | None = None,
    secondary: str = "",
    worker_selection: str = "",
    plugins: tuple[str, ...] = (),
    disabled: tuple[str, ...] = (),
    scores: Mapping[str, int] | None = None,
    only_scores: tuple[str, ...] = (),
    preempts: bool = True,
    arguments: Mapping[str, Mapping[str, Any]] | None = None,
    max_pending: int = 1_000_000,
    trusted: Collection[str] | None = None,
) -> Profile:
    """A profile from its configuration. `base` is the built-in profile whose weights it starts from; `worker_selection`
    takes the place (and the weight) of resource or fit, and load; `scores` replaces all weights; `plugins` adds to the
    built-in filters and layouts, `disabled` takes from them. `trusted`: see `find`."""
    if base not in BASES:
        raise InvalidInput(f"there is no base {base!r}{did_you_mean(base, BASES)}", hint=f"one of: {', '.join(BASES)}")
    weights = dict(BASES[base] if scores is None else scores)
    if only_scores:
        unknown = [name for name in scores or () if name not in only_scores]
        if unknown:
            raise InvalidInput(f"a weight for {', '.join(unknown)}, which is not among the score_plugins")
        weights = {name: weights.get(name, DEFAULT_WEIGHTS.get(name, 10)) for name in only_scores}
    made: dict[str, Any] = {}

    def add(plugin_name: str) -> str:
        plugin = find_plugin(plugin_name, (arguments or {}).get(plugin_name), trusted=trusted)
        made.setdefault(plugin.name, plugin)
        return str(plugin.name)

    for plugin_name in (*FILTERS, *LAYOUTS, *plugins):
        if plugin_name not in disabled:
            added = add(plugin_name)
            if plugin_name in plugins:
                usual = getattr(made[added], "usual_weight", 10)
                weights.setdefault(added, weights.pop(plugin_name, usual if scores is None and not only_scores else 0))
    if (
        scores is None and not only_scores and "gpu_last" not in disabled
    ):  # a setting of a backend, whatever the profile prefers
        weights.setdefault(add("gpu_last"), made["gpu_last"].usual_weight)
    if worker_selection and scores is None and not only_scores:
        weights[add(worker_selection)] = sum(weights.pop(replaced, 0) for replaced in ("resource", "fit", "load"))
    for plugin_name in list(weights):
        if plugin_name not in made and plugin_name not in disabled:
            weight = weights.pop(plugin_name)
            weights[add(plugin_name)] = weight
    for scorer, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 1000:
            raise InvalidInput(f"the weight of {scorer!r} must be a whole number from 0 to 1000, not {weight!r}")
    line = find_queue(queue, secondary, queue_arguments or {}, (arguments or {}).get(secondary, {}), trusted=trusted)
    if not preempts:
        line.preempts = False
    return make_profile(name, line, list(made.values()), weights, max_pending=max_pending)


def find_queue(
    name: str,
    secondary: str = "",
    arguments: Mapping[str, Any] | None = None,
    secondary_arguments: Mapping[str, Any] | None = None,
    *,
    trusted: Collection[str] | None = None,
) -> QueueSort:
    """The queue of that name, with the tie-breaker `secondary` if one is named. `trusted`: see `find`."""
    line = _made("queue", name, QUEUES, arguments or {}, ("queue_sort", "tenant", "charge"), ("preempts",), trusted)
    if not secondary:
        return cast("QueueSort", line)
    if hasattr(line, "reservation_depth") or hasattr(line, "rank_milli"):
        why = (
            "batch has an order of its own (options.batch.order)"
            if hasattr(line, "reservation_depth")
            else "it adds points up"
        )
        raise InvalidInput(f"the queue {name!r} takes no secondary order: {why}", hint="leave secondary out")
    return TieBreakingQueue(
        line, _made("secondary", secondary, TIE_BREAKERS, secondary_arguments or {}, ("keys",), (), trusted)
    )


def _made(
    what: str,
    name: str,
    known: Mapping[str, type[Any]],
    arguments: Mapping[str, Any],
    methods: tuple[str, ...],
    values: tuple[str, ...],
    trusted: Collection[str] | None,
) -> Any:
    """One of ours, one that an installed package announces (entry point group `hodei.queues`), or module:Class."""
    made = _class_of(what, name, known, "hodei.queues", trusted)
    _refuse_missing(what, name, [method for method in methods if not _has_method(made, (method,))])
    try:
        plugin = made(**dict(arguments))
    except InvalidInput:
        raise
    except Exception as error:
        raise InvalidInput(f"the {what} {name!r} cannot be made: {error}", hint="check its arguments") from error
    _refuse_missing(what, name, [value for value in ("name", *values) if not hasattr(plugin, value)])
    return plugin


def _refuse_missing(what: str, name: str, missing: list[str]) -> None:
    if missing:
        raise InvalidInput(
            f"{name!r} cannot be a {what}: it has no {', '.join(missing)}", hint="docs/how-to/write-a-plugin.md"
        )


def _has_method(made: type[Any], methods: tuple[str, ...]) -> bool:
    """Asked of the class before it is called: an unrelated class must not be made at all."""
    return any(callable(getattr(made, method, None)) for method in methods)


def _class_of(
    what: str, name: str, known: Mapping[str, type[Any]], group: str, trusted: Collection[str] | None
) -> type[Any]:
    found = load(group, name, what, built_in=known, trusted=trusted)
    if not isinstance(found, type):
        raise InvalidInput(f"{name!r} is not a class", hint="name a class: module:Class")
    return found


def implied_plugins(config: SchedulingConfig, profile: ProfileConfig) -> Iterator[str]:
    """Plugins that other settings bring along."""
    if profile.nodes:
        yield "scope"
    if config.quotas or config.budgets:
        yield "quota"
    if config.spill:
        yield "spill"
    if has_fallback_chain(config):
        yield "fallback_chain"
    if config.data_rules:
        yield "data_rules"
    if profile.backend_policy:
        yield profile.backend_policy


def has_fallback_chain(config: SchedulingConfig) -> bool:
    """Whether backends are used in an order."""
    return config.fallback_enabled and bool(config.fallback)


def _options(config: SchedulingConfig, profile: ProfileConfig) -> dict[str, Any]:
    """What plugins are made with: what the profile says, and what other settings say to those that they bring along."""
    out: dict[str, Any] = dict(profile.options)
    if profile.nodes:
        out["scope"] = {"nodes": profile.nodes}
    if config.spill:
        out["spill"] = {"rules": [_spill_rule(rule) for rule in config.spill]}
    if has_fallback_chain(config):
        out["fallback_chain"] = {"chain": config.fallback, "only_after_failure": config.fallback_when == "failure"}
    if config.data_rules:
        rules: dict[str, tuple[str, ...]] = {}
        for rule in config.data_rules:
            rules[rule.dataset] = (*rules.get(rule.dataset, ()), *rule.stay_in)
        out["data_rules"] = {"rules": rules}
    return out


def _spill_rule(rule: SpillConfig) -> SpillRule:
    if not rule.to or rule.to in rule.home:
        raise InvalidInput(
            f"spill rule to {rule.to!r}: name the backend that it spills to, other than those it is from"
        )
    if rule.max_cost is not None and not 0 <= rule.max_cost <= 1_000_000:
        raise InvalidInput(f"spill rule to {rule.to!r}: max_cost is from 0 to 1000000, not {rule.max_cost:g}")
    cost = None if rule.max_cost is None else round(rule.max_cost * 1000)
    return SpillRule(rule.to, parse_duration_ms(rule.only_if_wait_over), cost, rule.home)


def queue_options(wanted: ProfileConfig) -> dict[str, Any]:
    """What a profile's queue is told."""
    if wanted.queue == "fair":
        quantum_ms = parse_duration_ms(wanted.quantum)
        return {"tenant_key": wanted.tenant_key, "weights": wanted.weights, "quantum_ms": quantum_ms}
    return {} if wanted.queue in ("fifo", "priority") else dict(wanted.options.get(wanted.queue, {}))


def build_profiles(
    config: SchedulingConfig, broken: dict[str, str] | None = None, *, trusted: Collection[str] | None = None
) -> dict[str, Profile]:
    """The built-in profiles, and every configured one (over the built-in one of that name, if there is one). One that
    cannot be made is an error, or with `broken` is left out and told there; `default` must always be there. `trusted`: see
    `find`."""
    out = {}
    for name, wanted in {**dict.fromkeys(BASES, ProfileConfig()), **config.profiles}.items():
        try:
            out[name] = build_profile(
                name,
                base=wanted.base or (name if name in BASES else "default"),
                queue=wanted.queue,
                queue_arguments=queue_options(wanted),
                secondary=wanted.secondary,
                worker_selection=wanted.worker_selection,
                plugins=(*wanted.plugins, *implied_plugins(config, wanted)),
                disabled=wanted.disable,
                scores=wanted.scores,
                only_scores=wanted.score_plugins,
                preempts=wanted.preemption,
                arguments=_options(config, wanted),
                max_pending=wanted.max_pending,
                trusted=trusted,
            )
        except InvalidInput as error:
            if broken is None or name == "default":
                raise InvalidInput(f"profile {name!r}: {error.message}", hint=error.hint) from error
            broken[name] = error.message
    return out


_MOST_PROFILES = 20
_MOST_ROUTES = 200
_LONGEST = 200


def check_trial_policy(config: SchedulingConfig, live: SchedulingConfig) -> SchedulingConfig:
    """The configuration as it is; InvalidInput for what is not in use, built in, or plain."""
    if len(config.profiles) > _MOST_PROFILES:
        raise InvalidInput(f"{len(config.profiles)} profiles", hint=f"try at most {_MOST_PROFILES}")
    if len(config.routes) > _MOST_ROUTES:
        raise InvalidInput(f"{len(config.routes)} routes", hint=f"try at most {_MOST_ROUTES}")
    known = BUILT_IN | plugins_in_use(live)
    for name, profile in config.profiles.items():
        for plugin in profile.plugin_names():
            if plugin not in known:
                raise InvalidInput(
                    f"profile {name!r}: plugin {plugin[:80]!r} is not in use on this server",
                    hint="built-in plugins and those of the server's own configuration can be tried",
                )
        used = live.profiles.get(name, ProfileConfig()).options
        for plugin, options in profile.options.items():
            if options != used.get(plugin) and not all(_plain(value) for value in options.values()):
                raise InvalidInput(
                    f"profile {name!r}: the options of {plugin[:80]!r} are too much to try",
                    hint="numbers and short words can be tried",
                )
    return config


def plugins_in_use(config: SchedulingConfig) -> frozenset[str]:
    """The plugins that its profiles name, and its estimator."""
    named = (name for profile in config.profiles.values() for name in profile.plugin_names())
    return frozenset((*named, config.estimates.source))


def _plain(value: Any) -> bool:
    return isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) <= _LONGEST)
