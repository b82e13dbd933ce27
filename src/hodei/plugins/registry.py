"""Filters, scores, queues and tie-breakers by name, and the profiles built from them.

A plugin is a class with a `name` and at least one point; nothing else is ever called.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, cast

from msgspec import structs

from hodei import extensions
from hodei.engine.points import QueueSort
from hodei.engine.profile import Profile, make_profile
from hodei.model.config import ProfileConfig, SchedulingConfig, SpillConfig
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.resources import parse_duration_ms
from hodei.plugins.queues import TIE_BREAKERS, TieBreakingQueue
from hodei.plugins.spill import SpillRule

PLUGINS, QUEUES = (extensions.BUILT_IN[group] for group in (extensions.PLUGINS, extensions.QUEUES))
BUILT_IN = frozenset((*PLUGINS, *QUEUES, *TIE_BREAKERS))

FILTERS = (
    "health", "platform", "capabilities", "affinity", "taints", "job_affinity", "spread", "ports", "fit", "pools",
    "devices", "overcommit", "workload",
)  # fmt: skip
# Backends are chosen before the domains within them.
LAYOUTS = ("distribution", "gang_topology", "start_reservations")
WEIGHTS = {"resource": 40, "load": 30, "affinity": 20, "proximity": 10, "platform": 20,
           "job_affinity": 20, "spread": 20, "taints": 30}  # fmt: skip
_ONLY_IN_DEFAULT = ("resource", "load", "affinity", "proximity")
# The built-in profiles. Weights that are not specific to a profile (a preferred backend, say) are the same in each.
BASES: dict[str, dict[str, int]] = {
    "default": WEIGHTS,
    "compute": {
        **{name: weight for name, weight in WEIGHTS.items() if name not in _ONLY_IN_DEFAULT},
        "fit": 30,
        "affinity": 20,
        "load": 20,
        "data_locality": 20,
        "cost": 10,
    },
}
# The weight of a score that a profile names and its base does not have.
DEFAULT_WEIGHTS = {name: weight for base in reversed(BASES.values()) for name, weight in base.items()}
_POINTS = ("pre_filter", "layouts", "filter", "post_filter", "score", "reserve", "permit", "bind")


def find_plugin(
    name: str, arguments: Mapping[str, Any] | None = None, *, trusted: Collection[str] | None = None
) -> Any:
    """The plugin of that name, constructed with `arguments`; InvalidInput if there is none or it is not a plugin.
    `trusted`: the only names besides the built-in ones that may be loaded; None for any."""
    found = _load_class(extensions.PLUGINS, "plugin", name, PLUGINS, trusted)
    # Checked before construction: an unrelated class must not be called.
    if not any(callable(getattr(found, point, None)) for point in _POINTS):
        raise _not_a_plugin(name)
    plugin = extensions.construct(found, name, "plugin", **dict(arguments or {}))
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
    """A profile from its configuration. `base`: the built-in profile to start from. `worker_selection` replaces
    resource or fit, and load, with their weight. `scores` replaces all weights. `plugins` adds to the built-in filters
    and layouts, `disabled` removes from them. `trusted`: see `find_plugin`."""
    if base not in BASES:
        raise InvalidInput(f"there is no base {base!r}{did_you_mean(base, BASES)}", hint=f"one of: {', '.join(BASES)}")
    weights = dict(BASES[base] if scores is None else scores)
    if only_scores:
        unknown = [name for name in scores or () if name not in only_scores]
        if unknown:
            raise InvalidInput(f"a weight for {', '.join(unknown)}, which is not among the score_plugins")
        weights = {name: weights.get(name, DEFAULT_WEIGHTS.get(name, 10)) for name in only_scores}
    constructed: dict[str, Any] = {}

    def add(plugin_name: str) -> str:
        plugin = find_plugin(plugin_name, (arguments or {}).get(plugin_name), trusted=trusted)
        constructed.setdefault(plugin.name, plugin)
        return str(plugin.name)

    for plugin_name in (*FILTERS, *LAYOUTS, *plugins):
        if plugin_name not in disabled:
            added = add(plugin_name)
            if plugin_name in plugins:
                usual = getattr(constructed[added], "usual_weight", 10)
                weights.setdefault(added, weights.pop(plugin_name, usual if scores is None and not only_scores else 0))
    if (
        scores is None and not only_scores and "gpu_last" not in disabled
    ):  # a setting of a backend, whatever the profile prefers
        weights.setdefault(add("gpu_last"), constructed["gpu_last"].usual_weight)
    if worker_selection and scores is None and not only_scores:
        weights[add(worker_selection)] = sum(weights.pop(replaced, 0) for replaced in ("resource", "fit", "load"))
    for plugin_name in list(weights):
        if plugin_name not in constructed and plugin_name not in disabled:
            weight = weights.pop(plugin_name)
            weights[add(plugin_name)] = weight
    for scorer, weight in weights.items():
        if isinstance(weight, bool) or not isinstance(weight, int) or not 0 <= weight <= 1000:
            raise InvalidInput(f"the weight of {scorer!r} must be a whole number from 0 to 1000, not {weight!r}")
    ordering = find_queue(
        queue, secondary, queue_arguments or {}, (arguments or {}).get(secondary, {}), trusted=trusted
    )
    if not preempts:
        ordering.preempts = False
    return make_profile(name, ordering, list(constructed.values()), weights, max_pending=max_pending)


def find_queue(
    name: str,
    secondary: str = "",
    arguments: Mapping[str, Any] | None = None,
    secondary_arguments: Mapping[str, Any] | None = None,
    *,
    trusted: Collection[str] | None = None,
) -> QueueSort:
    """The queue of that name, with the tie-breaker `secondary` if given. `trusted`: see `find_plugin`."""
    ordering = _make_queue_part(
        "queue", name, QUEUES, arguments or {}, ("queue_sort", "tenant", "charge"), ("preempts",), trusted
    )
    if not secondary:
        return cast("QueueSort", ordering)
    if hasattr(ordering, "reservation_depth") or hasattr(ordering, "rank_milli"):
        why = (
            "batch has an order of its own (options.batch.order)"
            if hasattr(ordering, "reservation_depth")
            else "it adds points up"
        )
        raise InvalidInput(f"the queue {name!r} takes no secondary order: {why}", hint="leave secondary out")
    return TieBreakingQueue(
        ordering,
        _make_queue_part("secondary", secondary, TIE_BREAKERS, secondary_arguments or {}, ("keys",), (), trusted),
    )


def _make_queue_part(
    what: str,
    name: str,
    known: Mapping[str, Any],
    arguments: Mapping[str, Any],
    methods: tuple[str, ...],
    attributes: tuple[str, ...],
    trusted: Collection[str] | None,
) -> Any:
    found = _load_class(extensions.QUEUES, what, name, known, trusted)
    # Checked before construction: an unrelated class must not be called.
    _check_complete(what, name, [method for method in methods if not callable(getattr(found, method, None))])
    part = extensions.construct(found, name, what, **dict(arguments))
    _check_complete(what, name, [attribute for attribute in ("name", *attributes) if not hasattr(part, attribute)])
    return part


def _check_complete(what: str, name: str, missing: list[str]) -> None:
    if missing:
        raise InvalidInput(
            f"{name!r} cannot be a {what}: it has no {', '.join(missing)}", hint="docs/how-to/write-a-plugin.md"
        )


def _load_class(
    group: str, what: str, name: str, known: Mapping[str, Any], trusted: Collection[str] | None
) -> type[Any]:
    found = extensions.load(group, name, what, built_in=known, trusted=trusted)
    if not isinstance(found, type):
        raise InvalidInput(f"{name!r} is not a class", hint="name a class: module:Class")
    return found


def implied_plugins(config: SchedulingConfig, profile: ProfileConfig) -> Iterator[str]:
    """Plugins that other settings enable."""
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
    return config.fallback_enabled and bool(config.fallback)


def _options(config: SchedulingConfig, profile: ProfileConfig) -> dict[str, Any]:
    """Constructor arguments of plugins: the profile's options, and those from settings that enable a plugin."""
    out: dict[str, Any] = dict(profile.options)
    if profile.nodes:
        out["scope"] = {"nodes": profile.nodes}
    if config.spill:
        out["spill"] = {"rules": [spill_rule(rule) for rule in config.spill]}
    if has_fallback_chain(config):
        out["fallback_chain"] = {"chain": config.fallback, "only_after_failure": config.fallback_when == "failure"}
    if config.data_rules:
        rules: dict[str, tuple[str, ...]] = {}
        for rule in config.data_rules:
            rules[rule.dataset] = (*rules.get(rule.dataset, ()), *rule.stay_in)
        out["data_rules"] = {"rules": rules}
    return out


def spill_rule(rule: SpillConfig) -> SpillRule:
    if not rule.to or rule.to in rule.home:
        raise InvalidInput(f"spill rule to {rule.to!r}: `to` must name a backend that is not in `from`")
    cost = None if rule.max_cost is None else round(rule.max_cost * 1000)
    return SpillRule(rule.to, parse_duration_ms(rule.only_if_wait_over), cost, rule.home)


def queue_options(wanted: ProfileConfig) -> dict[str, Any]:
    """Constructor arguments of a profile's queue."""
    if wanted.queue == "fair":
        quantum_ms = parse_duration_ms(wanted.quantum)
        return {"tenant_key": wanted.tenant_key, "weights": wanted.weights, "quantum_ms": quantum_ms}
    return {} if wanted.queue in ("fifo", "priority") else dict(wanted.options.get(wanted.queue, {}))


def find_problems(config: SchedulingConfig, name: str) -> list[tuple[str, str]]:
    """The problems of one profile, with their keys; "" for those of several keys. Loads and constructs its plugins."""
    profile, problems = config.profiles[name], list[tuple[str, str]]()

    def check(key: str, make: Callable[[], object]) -> None:
        try:
            make()
        except InvalidInput as error:
            text = error.message.removeprefix(f"profile {name!r}: ")
            problems.append((key, f"{text}; {error.hint}" if error.hint else text))

    config = structs.replace(config, spill=())  # has problems of its own
    options = _options(config, profile)
    for key, plugin in profile.plugin_names():
        if key == "queue":
            check(key, partial(find_queue, plugin, "", queue_options(profile)))
        elif key == "secondary":
            check(key, partial(find_queue, profile.queue, plugin, queue_options(profile), options.get(plugin)))
        elif not (key.startswith("scores.") and plugin in profile.plugins):
            check(key, partial(find_plugin, plugin, options.get(plugin)))
    known = {*BUILT_IN, *(plugin for _, plugin in profile.plugin_names())}
    for key, names in (("disable", profile.disable), ("options", profile.options)):
        problems += [(key, f"there is no plugin {n!r}{did_you_mean(n, known)}") for n in names if n not in known]
    if not problems:
        check("", lambda: build_profiles(structs.replace(config, profiles={name: profile})))
    return problems


def build_profiles(
    config: SchedulingConfig, broken: dict[str, str] | None = None, *, trusted: Collection[str] | None = None
) -> dict[str, Profile]:
    """The built-in profiles and every configured one (which replaces the built-in one of that name). A profile that
    cannot be built is an error, or with `broken` is omitted and reported there; `default` must always exist. `trusted`:
    see `find_plugin`."""
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


_MAX_PROFILES = 20
_MAX_ROUTES = 200
_MAX_TEXT = 200


def check_trial_policy(config: SchedulingConfig, live: SchedulingConfig) -> SchedulingConfig:
    """Checks a configuration that a caller wants to try on a running server; InvalidInput for plugins that are neither
    built in nor in use there, or for options of arbitrary size.

    A what-if question must not load code that the operator never named, nor build tables of any size.
    """
    if len(config.profiles) > _MAX_PROFILES:
        raise InvalidInput(f"{len(config.profiles)} profiles", hint=f"try at most {_MAX_PROFILES}")
    if len(config.routes) > _MAX_ROUTES:
        raise InvalidInput(f"{len(config.routes)} routes", hint=f"try at most {_MAX_ROUTES}")
    known = BUILT_IN | plugins_in_use(live)
    for name, profile in config.profiles.items():
        for _, plugin in profile.plugin_names():
            if plugin not in known:
                raise InvalidInput(
                    f"profile {name!r}: plugin {plugin[:80]!r} is not in use on this server",
                    hint="built-in plugins and those of the server's own configuration can be tried",
                )
        used = live.profiles.get(name, ProfileConfig()).options
        for plugin, options in profile.options.items():
            if options != used.get(plugin) and not all(_is_small(value) for value in options.values()):
                raise InvalidInput(
                    f"profile {name!r}: the options of {plugin[:80]!r} are too large to try",
                    hint="use numbers and short texts",
                )
    return config


def plugins_in_use(config: SchedulingConfig) -> frozenset[str]:
    """The plugins that the profiles name, and the estimator."""
    named = (name for profile in config.profiles.values() for _, name in profile.plugin_names())
    return frozenset((*named, config.estimates.source))


def _is_small(value: Any) -> bool:
    return isinstance(value, int | float | bool) or (isinstance(value, str) and len(value) <= _MAX_TEXT)
