"""Aliases of settings: `queue_strategy`, `scoring_weights`, `scheduler.backends[]` with `policies` and so on.

`translate` converts a configuration with aliases to the form of `model.config`. Unknown keys are left as they are: the
check of the configuration reports them. The aliases are documented in docs/reference/configuration.md, "Other names".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from hodei.jobfile.values import Problems, did_you_mean
from hodei.model.config import ProfileConfig
from hodei.model.names import safe_repr

_FILTERS = {
    "resource": "fit", "resources": "fit", "resource_filter": "fit", "affinity_filter": "affinity",
    "node_affinity": "affinity", "taint": "taints", "taint_filter": "taints", "node_health": "health",
}  # fmt: skip
# Filters that every profile has: listing them changes nothing, and omitting them would not be safe.
ALWAYS = (
    "health", "platform", "capabilities", "affinity", "taints", "job_affinity", "spread", "ports", "fit", "pools",
    "devices", "overcommit", "workload", "distribution", "gang_topology", "start_reservations",
)  # fmt: skip
_SCORES = {
    "resource_utilization": "resource", "resource_scorer": "resource", "resource_balance_score": "resource",
    "load_balancing": "load", "load_scorer": "load", "affinity_bonus": "affinity", "affinity_scorer": "affinity",
    "network_proximity": "proximity",
}  # fmt: skip
_KINDS = {"docker_standalone": "docker", "k8s": "kubernetes"}
_KNOWN_KINDS = ("kubernetes", "docker_standalone", "docker", "hpc_cluster", "slurm", "pbs", "local")
_UNSUPPORTED_KINDS = ("cloud_vm", "bare_metal", "serverless", "edge")
_POLICIES = ("backend_preference", "fallback_enabled", "fallback_chain", "health_check_interval")
_QUEUE_KEYS = {
    "fifo": (),
    "priority": ("with_preemption", "max_queue_time"),
    "fair": ("tenant_key", "weights", "quantum"),
}
_PREEMPTION_KEYS = ("enabled", "max_preemptions", "grace_period")


def has_aliases(found: Mapping[str, Any]) -> bool:
    if "scheduler" in found or "schedulers" in found:
        return True
    profiles = _table(_table(found.get("scheduling")).get("profiles"))
    return any(key in _KEYS for table in profiles.values() for key in _table(table))


def translate(found: Mapping[str, Any]) -> tuple[dict[str, Any], Problems, dict[str, str]]:
    """The configuration without aliases, its mistakes, and for each translated path the path in the file."""
    work = _Translation(found)
    for name, table in list(work.profiles.items()):
        if isinstance(table, Mapping):
            work.profile(name, table, f"scheduling.profiles.{name}")
    if "scheduler" in found:
        work.scheduler(found["scheduler"], "scheduler")
    if isinstance(found.get("schedulers"), list):
        for number, one in enumerate(found["schedulers"]):
            work.scheduler(one, f"schedulers[{number}]")
    elif "schedulers" in found:
        work.wrong("schedulers", "a list of schedulers, each with a name")
    return work.done(), work.problems, work.origins


class _Translation:
    def __init__(self, found: Mapping[str, Any]) -> None:
        self.out = {key: value for key, value in found.items() if key not in ("scheduler", "schedulers")}
        self.problems: Problems = [
            (section, "a table of settings")
            for section in ("scheduling", "health", "backends")
            if section in found and not isinstance(found[section], Mapping)
        ]
        for section, _ in self.problems:
            del self.out[section]  # already reported
        self.scheduling = dict(_table(found.get("scheduling")))
        if not isinstance(self.scheduling.get("profiles", {}), Mapping):
            del self.scheduling["profiles"]
            self.problems.append(("scheduling.profiles", "a table of profiles"))
        self.profiles = dict(_table(self.scheduling.get("profiles")))
        self.health = dict(_table(found.get("health")))
        self.backends = dict(_table(found.get("backends")))
        self.origins: dict[str, str] = {}
        self.name = ""  # of the current profile
        self._server_settings: dict[str, tuple[Any, str]] = {}
        self._backends_of_type: dict[str, list[str]] = {}  # names in the order of the file
        self._fallback_path = ""

    def wrong(self, at: str, text: str) -> None:
        self.problems.append((at, text))

    def done(self) -> dict[str, Any]:
        if self._fallback_path:
            self._expand_fallback()
        if self.profiles:
            self.scheduling["profiles"] = self.profiles
        for name, table in (("scheduling", self.scheduling), ("health", self.health), ("backends", self.backends)):
            if table:
                self.out[name] = table
        return self.out

    def _expand_fallback(self) -> None:
        """An entry of the chain is a backend's name, or a type, which stands for all backends of that type."""
        chain, known = self.scheduling["fallback"], {"local", *self.backends}
        if not _is_words(chain):
            return  # reported by the check of the configuration
        out: list[str] = []
        for each in chain:
            if each not in known and each not in self._backends_of_type:
                text = f"there is no backend {safe_repr(each)}{_near(each, tuple(known))}; one of: {', '.join(sorted(known))}"
                self.wrong(self._fallback_path, text)
            out += [each] if each in known else self._backends_of_type.get(each, [])
        self.scheduling["fallback"] = out

    def for_server(self, section: dict[str, Any], key: str, value: Any, at: str) -> None:
        """A setting of the whole server; two different values are a mistake."""
        before = self._server_settings.setdefault(f"{id(section)} {key}", (section.get(key, value), at))
        if before[0] != value:
            self.wrong(at, f"{key} is a setting of the whole server, and {before[1]} has another value")
        section[key] = value
        self.origins[f"{'health' if section is self.health else 'scheduling'}.{key}"] = at

    def scheduler(self, given: Any, at: str) -> None:
        """One entry of `schedulers`: a profile, plus settings of the whole server."""
        if not isinstance(given, Mapping):
            self.wrong(at, "a table of settings: name, queue_strategy, backends ...")
            return
        name = given.get("name", "default")
        if not isinstance(name, str) or not name:
            self.wrong(f"{at}.name", "expected the name of the scheduler, which jobs use as their profile")
            return
        name = "default" if name == "general" else name
        if name in self.profiles:
            self.wrong(f"{at}.name", f"there is a scheduler {name!r} already")
            return
        rest = {key: value for key, value in given.items() if key not in ("name", "backends", "policies")}
        self.profile(name, rest, at)
        names = self._backends(given.get("backends", []), f"{at}.backends")
        policies = given.get("policies", {})
        if not isinstance(policies, Mapping):
            self.wrong(f"{at}.policies", f"a table with {', '.join(_POLICIES)}")
            return
        self._policies(self.profiles[name], policies, names, f"{at}.policies")

    def _policies(self, profile: dict[str, Any], policies: Mapping[str, Any], names: list[str], at: str) -> None:
        for key, value in policies.items():
            here = f"{at}.{key}"
            if key == "backend_preference":
                _put(self, profile, "backend_policy", value, here)
            elif key == "health_check_interval":
                self.for_server(self.health, "interval", _duration(value), here)
            elif key == "fallback_chain":
                self.for_server(self.scheduling, "fallback", value, here)
                self._fallback_path = here
            elif key == "fallback_enabled":
                if not isinstance(value, bool):
                    self.wrong(here, "true or false")
                    continue
                self.for_server(self.scheduling, "fallback_enabled", value, here)
                if value and "fallback_chain" not in policies and len(names) > 1:
                    # Without a chain the order is that of the file.
                    self.for_server(self.scheduling, "fallback", names, here)
            else:
                self.wrong(here, f"unknown key {safe_repr(key)}{_near(key, _POLICIES)}")

    def _backends(self, given: Any, at: str) -> list[str]:
        if not isinstance(given, list):
            self.wrong(at, "a list of backends, each with a type")
            return []
        names = []
        for number, one in enumerate(given):
            here = f"{at}[{number}]"
            if not isinstance(one, Mapping) or not isinstance(one.get("type"), str):
                self.wrong(here, f"type is missing; one of: {', '.join(_KNOWN_KINDS)}")
                continue
            name = one.get("name") or one["type"].replace("_", "-")
            if not isinstance(name, str):
                self.wrong(f"{here}.name", "expected the name of the backend")
                continue
            if name in self.backends and one.get("name"):
                self.wrong(f"{here}.name", f"there is a backend {safe_repr(name)} already")
                continue
            if name in self.backends:
                name = f"{name}-{number + 1}"
            settings = self._backend(one, name, here)
            if settings is None:
                continue
            self.backends[name] = settings
            self._backends_of_type.setdefault(one["type"], []).append(name)
            self.origins[f"backends.{name}"] = here
            names.append(name)
        return names

    def _backend(self, one: Mapping[str, Any], name: str, at: str) -> dict[str, Any] | None:
        kind = _KINDS.get(one["type"], one["type"])
        table = {key: value for key, value in one.items() if key not in ("type", "name")}
        if kind == "hpc_cluster":
            kind = str(table.pop("scheduler", "slurm")).lower()
            if "partition" in table:
                table["partitions" if kind == "slurm" else "queues"] = [table.pop("partition")]
        if kind in _UNSUPPORTED_KINDS:
            known = ", ".join(_KNOWN_KINDS)
            self.wrong(f"{at}.type", f"there is no backend of type {kind!r} in this version; one of: {known}")
            return None
        if kind not in _KNOWN_KINDS:
            near = _near(kind, (*_KNOWN_KINDS, *_UNSUPPORTED_KINDS))
            self.wrong(f"{at}.type", f"there is no backend of type {safe_repr(kind)}{near}")
            return None
        if kind == "docker":
            path, limit = table.pop("socket_path", None), table.pop("max_containers", None)
            if path is not None or limit is not None:
                # The node is called like the backend, because node names must be unique.
                node = "docker" if name == "docker-standalone" else re.sub(r"[^a-z0-9.]+", "-", name.lower())
                host: dict[str, Any] = {"name": node.strip("-.") or "docker"}
                host |= {} if path is None else {"url": path if "://" in str(path) else f"unix://{path}"}
                table["hosts"] = [host | ({} if limit is None else {"max_containers": limit})]
        return {"kind": kind, **table}

    def profile(self, name: str, given: Mapping[str, Any], at: str) -> None:
        out: dict[str, Any] = {}
        self.name = name
        self.origins[f"scheduling.profiles.{name}"] = at
        for key, value in given.items():
            if key not in _KEYS:
                _put(self, out, key, value, f"{at}.{key}")
            else:
                _KEYS[key](self, out, value, f"{at}.{key}")
        self.profiles[name] = out


def _put(work: _Translation, out: dict[str, Any], key: str, value: Any, at: str) -> None:
    if key in out and out[key] != value:
        work.wrong(at, f"{key} is given twice, under two names, with different values")
    out[key] = value
    work.origins[f"scheduling.profiles.{work.name}.{key}"] = at


def _queue_strategy(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    """`fifo`, `{priority: {max_queue_time: 1h}}`, or `{type: fair, quantum: 30s}`."""
    kind, options = _variant(value)
    if kind is None or not isinstance(options, Mapping):
        work.wrong(at, "expected a queue (fifo, priority or fair) with its options")
        return
    _put(work, out, "queue", kind, at)
    known = _QUEUE_KEYS.get(kind, ())
    for key, option in options.items():
        here = f"{at}.{key}"
        if key not in known:
            has = f"it has: {', '.join(known)}" if known else "it has none"
            work.wrong(here, f"the queue {kind} has no option {safe_repr(key)}; {has}")
        elif key == "with_preemption":
            _put(work, out, "preemption", option, here)
        else:
            _put(work, out, key, option if key in ("tenant_key", "weights") else _duration(option), here)


def _worker_selection(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    kind, option = _variant(value)
    if kind is None:
        work.wrong(at, "a strategy such as LeastLoaded, or {Custom: module:Class}")
        return
    _put(work, out, "worker_selection", option if kind == "custom" and isinstance(option, str) else kind, at)


def _filter_plugins(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    """Built-in filters are always active; others are added."""
    if not _is_words(value):
        work.wrong(at, "a list of names of plugins")
        return
    names = [name for given in value if (name := _FILTERS.get(given, given)) not in ALWAYS]
    out["plugins"] = [*out.get("plugins", []), *(name for name in names if name not in out.get("plugins", []))]


def _score_plugins(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    if not _is_words(value):
        work.wrong(at, "a list of names of plugins")
        return
    _put(work, out, "score_plugins", [_SCORES.get(name, name) for name in value], at)


def _scoring_weights(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    """Whole numbers, or fractions that add up to 1: 0.4 becomes 40."""
    numbers = isinstance(value, Mapping) and all(_is_number(weight) for weight in value.values())
    if not numbers:
        work.wrong(at, "a weight for each score: {resource_utilization: 40, load_balancing: 30}")
        return
    shares = 0 < sum(value.values()) <= 1.001
    weights = {_SCORES.get(name, name): round(weight * 100) if shares else weight for name, weight in value.items()}
    invalid = [name for name, weight in weights.items() if weight != int(weight) or not 0 <= weight <= 1000]
    if invalid:
        names = ", ".join(invalid)
        work.wrong(at, f"the weight of {names} must be a whole number from 0 to 1000, or all add up to 1")
        return
    _put(work, out, "scores", {name: int(weight) for name, weight in weights.items()}, at)


def _preemption_policy(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    if not isinstance(value, Mapping):
        work.wrong(at, f"a table with {', '.join(_PREEMPTION_KEYS)}")
        return
    for key, option in value.items():
        here = f"{at}.{key}"
        if key == "enabled":
            _put(work, out, "preemption", option, here)
        elif key == "grace_period":
            _put(work, out, "grace", _duration(option), here)
        elif key == "max_preemptions":
            section = work.scheduling["preemption"] = dict(_table(work.scheduling.get("preemption")))
            if section.get("max_per_job", option) != option:
                work.wrong(here, "max_preemptions is a setting of the whole server (scheduling.preemption.max_per_job)")
            section["max_per_job"] = option
            work.origins["scheduling.preemption.max_per_job"] = here
        else:
            work.wrong(here, f"unknown key {safe_repr(key)}{_near(key, _PREEMPTION_KEYS)}")


def _parallel_scheduling(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    work.for_server(work.scheduling, "parallel_scheduling", value, at)


def _namespace(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
    _put(work, out, "projects", [value], at)


def _renamed(key: str, read: Callable[[Any], Any] = lambda value: value) -> Callable[..., None]:
    def put(work: _Translation, out: dict[str, Any], value: Any, at: str) -> None:
        _put(work, out, key, read(value), at)

    return put


def _duration(value: Any) -> Any:
    """A number is seconds."""
    return f"{value}s" if isinstance(value, int) and not isinstance(value, bool) else value


def _word(value: Any) -> Any:
    """`Shortest` as `shortest`."""
    return _snake(value) if isinstance(value, str) else value


_KEYS: dict[str, Callable[[_Translation, dict[str, Any], Any, str], None]] = {
    "queue_strategy": _queue_strategy,
    "primary": _renamed("queue", _word),
    "primary_policy": _renamed("queue", _word),
    "secondary_policy": _renamed("secondary", _word),
    "worker_selection": _worker_selection,
    "filter_plugins": _filter_plugins,
    "score_plugins": _score_plugins,
    "scoring_weights": _scoring_weights,
    "preemption_policy": _preemption_policy,
    "preemption_enabled": _renamed("preemption"),
    "scheduling_timeout": _renamed("scheduling_timeout", _duration),
    "timeout_seconds": _renamed("scheduling_timeout", _duration),
    "max_queue_time": _renamed("max_queue_time", _duration),
    "parallel_scheduling": _parallel_scheduling,
    "namespace": _namespace,
}
NAMES: tuple[str, ...] = tuple(key for key in _KEYS if key not in ProfileConfig.__struct_fields__)


def _variant(value: Any) -> tuple[str | None, Any]:
    """`Fair`, `{Fair: {...}}`, `{type: fair, ...}` -> ("fair", options)."""
    if isinstance(value, str):
        found = re.fullmatch(r"Custom\((.+)\)", value)
        return ("custom", found[1]) if found else (_snake(value), {})
    if isinstance(value, Mapping) and isinstance(value.get("type"), str):
        return _snake(value["type"]), {key: option for key, option in value.items() if key != "type"}
    if isinstance(value, Mapping) and len(value) == 1:
        ((kind, options),) = value.items()
        return (_snake(kind), {} if options is None else options) if isinstance(kind, str) else (None, None)
    return None, None


def _snake(name: str) -> str:
    """`LeastLoaded` -> `least_loaded`; a path to code stays as it is."""
    return name if ":" in name else re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _is_words(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(each, str) for each in value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _near(key: Any, known: tuple[str, ...]) -> str:
    return did_you_mean(key, known) if isinstance(key, str) else ""
