"""Everything that an operator can configure, as values; and versions of the configuration and their differences.

The types say what is valid on its own: ranges, and the function that must accept a text (`parse`, see
`hodei.jobfile.check`). `hodei.configuration` checks the rest, and `wiring` builds objects from the values.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from hodei.model.affinity import parse_selector
from hodei.model.audit import mask_settings
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.explanation import WhatIf
from hodei.model.job import PRIORITY_CLASSES
from hodei.model.names import label_value, parse_labels
from hodei.model.resources import parse_duration_ms, parse_quantity, parse_resources


def _parse_span(text: str) -> None:
    if not parse_duration_ms(text):
        raise InvalidInput(f"{text!r} is too short", hint="write a duration above 0s")


def _parse_optional_duration(text: str) -> None:
    if text:
        parse_duration_ms(text)


def _parse_amounts(amounts: Mapping[str, str | int | float]) -> None:
    """InvalidInput with the problem of each key."""
    problems, valid = [], dict[str, str | int | float]()
    for name, amount in amounts.items():
        try:
            parse_resources({name: amount})
            parse_resources(valid | {name: amount})  # no resource under two names
            valid[name] = amount
        except InvalidInput as error:
            problems.append((name, f"{error.message}; {error.hint}" if error.hint else error.message))
    if problems:
        raise InvalidInput(problems[0][1], problems=tuple(problems))


def parse_priority(given: str | int) -> int:
    """The number of a priority or of its class."""
    if isinstance(given, int):
        return given
    if given not in PRIORITY_CLASSES:
        raise InvalidInput(
            f"there is no priority {given!r}{did_you_mean(given, PRIORITY_CLASSES)}",
            hint=f"one of: {', '.join(PRIORITY_CLASSES)}, or a whole number",
        )
    return PRIORITY_CLASSES[given]


# Far above any use, and sums and products stay within 64 bits.
MANY = 1_000_000_000
MAX_COST = 1_000_000
# Jobs that are tried in one step.
MAX_BATCH = 100_000

Count = Annotated[int, Meta(ge=0, le=MANY)]
Positive = Annotated[int, Meta(ge=1, le=MANY)]
Factor = Annotated[int, Meta(ge=1, le=1000)]
Weight = Annotated[int, Meta(ge=0, le=1000)]
Percent = Annotated[int, Meta(ge=0, le=100)]
LabelValue = Annotated[str, Meta(extra={"parse": label_value})]
Labels = Annotated[dict[str, str], Meta(extra={"parse": parse_labels})]
Cost = Annotated[float, Meta(ge=0, le=MAX_COST)]
Duration = Annotated[str, Meta(extra={"parse": parse_duration_ms})]
Span = Annotated[str, Meta(extra={"parse": _parse_span})]  # not 0s
OptionalDuration = Annotated[str, Meta(extra={"parse": _parse_optional_duration})]
Size = Annotated[str, Meta(extra={"parse": parse_quantity})]
Selector = Annotated[str, Meta(extra={"parse": parse_selector})]
Priority = Annotated[Annotated[int, Meta(ge=-(2**31), le=2**31)] | str, Meta(extra={"parse": parse_priority})]
Cores = Annotated[str | int | float, Meta(extra={"parse": partial(parse_quantity, scale=1000)})]
Bytes = Annotated[str | int, Meta(extra={"parse": parse_quantity})]
Amount = str | int | float
Amounts = Annotated[dict[str, Amount], Meta(extra={"parse": _parse_amounts})]

# Shares, quotas, budgets, and the minimum and maximum request of one job.


class AccountConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An organisation or a project. `under` names its parent account (empty: top level), `shares` its weight among its
    siblings ("parent": it dissolves into its parent), `users` the shares of its users."""

    name: str
    under: str = ""
    shares: Count | Literal["parent"] = 1
    users: dict[str, Count | Literal["parent"]] = {}


class SharesConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fair share. `half_life`: usage that old counts half; `window`: instead, only usage within it counts, in full.
    `weights`: the billing weight of one core, one byte (`0.25/Gi`), one GPU, combined by `sum` or `max`. `refresh`: how
    often factors are recomputed. Accounts that are not listed have one share."""

    enabled: bool = False
    formula: Literal["fair_tree", "classic", "drf"] = "fair_tree"
    half_life: Duration = "7d"
    window: OptionalDuration = ""
    refresh: Duration = "1m"
    weights: dict[str, Amount] = field(default_factory=lambda: {"cpu": "1.0", "memory": "0.25/Gi", "gpu": "8.0"})
    mode: Literal["sum", "max"] = "sum"
    accounts: tuple[AccountConfig, ...] = ()


class QuotaConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the jobs of a project may hold at once. `jobs` is a resource too: the number of running jobs. `hard` is
    exceeded only by borrowing within the `cohort`: at most `borrow` more, from what other members do not use and
    `lend`. `soft` may be exceeded while no other project waits. `per_user`: a hard limit for each user. `pending`:
    maximum number of pending jobs."""

    hard: Amounts = {}
    soft: Amounts = {}
    per_user: Amounts = {}
    cohort: str = ""
    lend: Amounts = {}
    borrow: Amounts = {}
    weight: Count = 1
    pending: Count | None = None


class RangeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Minimum, maximum and default request of one member of a job of the project."""

    min: Amounts = {}
    max: Amounts = {}
    default: Amounts = {}


class BudgetConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a project may use over time: `hours` of resource units (GPU-hours, core-hours) and `money` at `prices` per
    hour. `period` resets it every day, week or month (UTC); `since` counts from a fixed day (2026-01-31) instead."""

    hours: Amounts = {}
    money: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    prices: dict[str, Amount] = {}
    period: Literal["", "day", "week", "month"] = "month"
    since: str = ""


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A named scheduler: its queue, its plugins and their weights.

    `queue` is the primary order, `secondary` breaks ties. `base` names the built-in profile to start from (empty: the
    one with the same name, else `default`). `worker_selection` names the strategy that replaces the scores resource (or
    fit) and load; `scores` replaces all weights; `plugins` adds (built-in names, installed ones, or module:Class),
    `disable` removes. `score_plugins`: only these scores count.

    `projects` may use it (patterns with `*`; empty: all), on the `nodes` of this label selector. Jobs that no node of
    it could ever run, or that have waited for `fallback_after`, move to the profile `fallback`. `backend_policy`
    chooses backends before nodes. `scheduling_timeout` and `max_queue_time` apply to jobs without their own; empty: the
    server's. `paused`: none of its jobs starts. `preemption`: whether its jobs may preempt. `grace` applies to jobs
    without their own.
    """

    base: str = ""
    queue: str = "priority"
    secondary: str = ""
    tenant_key: str = "project"
    weights: dict[str, Positive] = {}
    quantum: Span = "1m"
    max_pending: Positive = 1_000_000
    worker_selection: str = ""
    plugins: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    scores: dict[str, Weight] | None = None
    options: dict[str, dict[str, Any]] = {}
    projects: tuple[str, ...] = ()
    nodes: Selector = ""
    fallback: str = ""
    fallback_after: Duration = "0s"
    escalation: EscalationConfig | None = None
    scheduling_timeout: OptionalDuration = ""
    max_queue_time: OptionalDuration = ""
    paused: bool = False
    preemption: bool = True
    grace: OptionalDuration = ""
    score_plugins: tuple[str, ...] = ()
    backend_policy: Literal["", "cost_optimized", "performance", "locality"] = ""

    def plugin_names(self) -> tuple[tuple[str, str], ...]:
        """Every name that is passed to the plugin loader, with its key. A new key that names a plugin must be added here."""
        named = (
            ("queue", self.queue),
            ("secondary", self.secondary),
            ("worker_selection", self.worker_selection),
            *((f"plugins[{number}]", name) for number, name in enumerate(self.plugins)),
            *((f"score_plugins[{number}]", name) for number, name in enumerate(self.score_plugins)),
            *((f"scores.{name}", name) for name in self.scores or {}),
        )
        return tuple((key, name) for key, name in named if name)


class EscalationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Measures for jobs that wait too long: after `relax_after` the rules in `relax` become preferences; after every
    `promote_after` the job moves up one priority class, at most to `promote_to`. "0s": never."""

    relax: tuple[Literal["spread", "topology", "backend"], ...] = ()
    relax_after: Duration = "0s"
    promote_after: Duration = "0s"
    promote_to: Priority = "high"


class RouteWhenConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions on a job; all that are set must hold. `project` and `user` are patterns with `*`, `labels` is a
    selector."""

    gpu: bool | None = None
    priority_at_least: Priority | None = None
    project: str = ""
    user: str = ""
    labels: Selector = ""
    workload: Literal["", "batch", "long-running", "serverless", "data-processing", "interactive"] = ""


class RouteConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs without a profile use that of the first matching route."""

    profile: str
    when: RouteWhenConfig = RouteWhenConfig()


class BreakerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """After `rounds` fruitless rounds `within` that time, a queue is retried less often on a timer: after `pause`,
    doubling up to `max_pause`. Freed capacity resets it. 0 rounds: never."""

    rounds: Count = 10
    within: Duration = "1m"
    pause: Duration = "2s"
    max_pause: Duration = "30s"


class BackoffConfig(Struct, frozen=True, forbid_unknown_fields=True):
    base: Duration = "1s"
    factor: Factor = 2
    max: Duration = "1m"
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.1
    gang_factor: Factor = 3


class PreemptionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`min_runtime`: runs are protected for that long. `max_per_job`: how often one job may be preempted. `budget`:
    number of preempted jobs per `interval`, 0 for no limit."""

    enabled: bool = True
    min_runtime: Duration = "0s"
    max_per_job: Count = 5
    budget: Count = 0
    interval: Duration = "1m"


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`max_priority`: the highest priority that a role may set (unlisted roles: any). `project_users`: the users who
    may submit to a project, besides administrators (unlisted projects: everyone)."""

    oversized: Literal["reject", "wait"] = "reject"
    max_members: Positive = 100_000
    max_priority: dict[str, Priority] = field(default_factory=lambda: {"user": "high"})
    project_users: dict[str, tuple[str, ...]] = {}


class EstimatesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Estimates of run time: `user`; `learned`: the `quantile` (percent) of the last `window` similar runs; or
    `corrected`: the user's estimate, reduced by the overestimates of the user's last `window` runs. Other names are
    installed estimators, constructed with `options`."""

    source: str = "user"
    quantile: Annotated[int, Meta(ge=1, le=100)] = 75
    window: Annotated[int, Meta(ge=2, le=1000)] = 20
    options: dict[str, Any] = {}


class ForecastConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Start forecasts of pending jobs: how often they are computed, and up to how many pending jobs."""

    enabled: bool = True
    every: Span = "1m"
    max_jobs: Count = 5000


class NodeGroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of one group that a backend can start and stop. `min` and `max`: how many run; `warm`: how many idle ones are
    kept ready. Others are released after `idle`. A node that is not ready after `boot_timeout` is switched off; after
    `tries` such failures it is set aside for `pause`, and so is a group without capacity (longer each time)."""

    min: Count = 0
    max: Count = 10_000
    warm: Count = 0
    idle: Duration = "10m"
    boot_timeout: Span = "15m"
    tries: Positive = 3
    pause: Span = "2m"


class CapacityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Orders nodes for pending jobs, if backends offer potential nodes. `groups`: settings by group, else by backend.
    `max_cost`: of all ordered nodes per hour. `slack`: no node is ordered for a job that is expected to start on existing
    nodes at most this much later than a new node would be ready. `consolidate`: nodes that are used less than this many
    percent may be emptied if others can take their work (0: never). `spot`: nodes that the provider may take back compete
    by price and risk, are used `last`, or `never`."""

    enabled: bool = True
    interval: Span = "5s"
    max_cost: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    slack: Duration = "0s"
    consolidate: Percent = 50
    spot: Literal["allow", "last", "never"] = "allow"
    default: NodeGroupConfig = NodeGroupConfig()
    groups: dict[str, NodeGroupConfig] = {}


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Directories of this host and URLs below which jobs may wait for data; empty: none."""

    allow: tuple[str, ...] = ()


class SpillConfig(Struct, frozen=True, forbid_unknown_fields=True, rename={"home": "from"}):
    """Backend `to` takes overflow: jobs go there only if they would wait longer than `only_if_wait_over` on the
    backends in `from` (empty: all that take no overflow), and cost at most `max_cost` there."""

    to: str
    only_if_wait_over: Duration = "0s"
    max_cost: Cost | None = None
    home: tuple[str, ...] = ()


class DataRuleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs that read `dataset` run only in these regions, zones, data centers or backends."""

    dataset: str
    stay_in: tuple[str, ...]


class SchedulingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that decisions depend on; the decision log contains it for replay.

    `unavailable_profile`: what happens to jobs whose profile is missing, paused or broken. `fallback`: backends in
    order of use; the next one is used when there is no capacity or, with `fallback_when = "failure"`, only when the
    earlier ones are unavailable. `fallback_enabled`: whether the chain applies. `parallel_scheduling`: how many jobs
    are placed in one step; true for a thousand, false for one.
    """

    profiles: dict[str, ProfileConfig] = {}
    scheduling_timeout: Duration = "0s"
    max_queue_time: Duration = "0s"
    unavailable_profile: Literal["hold", "fallback"] = "hold"
    fallback_enabled: bool = True
    fallback: tuple[str, ...] = ()
    fallback_when: Literal["no_capacity", "failure"] = "no_capacity"
    parallel_scheduling: bool | Annotated[int, Meta(ge=1, le=MAX_BATCH)] = True
    retry: BackoffConfig = BackoffConfig()
    max_losses: Count = 3
    admission: AdmissionConfig = AdmissionConfig()
    preemption: PreemptionConfig = PreemptionConfig()
    estimates: EstimatesConfig = EstimatesConfig()
    forecast: ForecastConfig = ForecastConfig()
    routes: tuple[RouteConfig, ...] = ()
    escalation: EscalationConfig = EscalationConfig()
    breaker: BreakerConfig = BreakerConfig()
    shares: SharesConfig = SharesConfig()
    quotas: dict[str, QuotaConfig] = {}
    ranges: dict[str, RangeConfig] = {}
    budgets: dict[str, BudgetConfig] = {}
    capacity: CapacityConfig = CapacityConfig()
    data: DataConfig = DataConfig()
    spill: tuple[SpillConfig, ...] = ()
    data_rules: tuple[DataRuleConfig, ...] = ()


class SocketConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Cores and GPUs of one socket, by the numbers of the operating system: `0-3,8` or a list."""

    cpus: str | int | tuple[int, ...] = ""
    gpus: str | int | tuple[int, ...] = ""


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A slice of this machine, offered as its own node.

    `data`: the data sets it holds; `cost`: price per hour; `overcommit`: how many times a resource may be allocated
    (0.1 to 100; default 1). `sockets` allow core binding; `lat`, `lng`: degrees north and east; `address`: where
    members of a gang reach each other.
    """

    name: str
    cpu: Cores = "1"
    memory: Bytes = "1Gi"
    storage: Bytes = "0"
    gpu: Cores = "0"
    resources: Amounts = {}
    labels: Labels = {}
    taints: tuple[str, ...] = ()
    arch: LabelValue = ""
    gpu_type: LabelValue = ""
    region: LabelValue = ""
    zone: LabelValue = ""
    datacenter: LabelValue = ""
    rack: LabelValue = ""
    lat: Annotated[float, Meta(ge=-90, le=90)] | None = None
    lng: Annotated[float, Meta(ge=-180, le=180)] | None = None
    data: tuple[str, ...] = ()
    cost: Cost = 0.0
    overcommit: dict[str, Annotated[float, Meta(ge=0.1, le=100)]] = {}
    sockets: tuple[SocketConfig, ...] = ()
    address: str = ""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Backends are checked every `interval` ("0s": never) with a `timeout`. After `failures` failed checks in a row
    nothing starts there; they are checked again after `pause`, doubling up to `max_pause`."""

    interval: Duration = "30s"
    timeout: Span = "10s"
    failures: Annotated[int, Meta(ge=1, le=100)] = 3
    pause: Span = "5s"
    max_pause: Duration = "5m"


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the server, in total and per caller. A caller is identified by the name of its token, or by its address
    without one. 0 for a limit "per" something: no limit."""

    connections: Positive = 2048
    connections_per_address: Count = 512
    requests: Positive = 512
    requests_per_token: Count = 128
    rate_per_token: Count = 1000
    burst_per_token: Positive = 2000
    waits: Positive = 1024
    waits_per_token: Count = 256
    streams: Positive = 256
    streams_per_token: Count = 32
    headers_timeout: Span = "10s"
    body_timeout: Span = "30s"


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 7680
    names: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    metrics_public: bool = False
    decision_log: str = "decisions.jsonl"
    decision_log_size: Size = "256Mi"
    retention: Duration = "30d"
    audit_retention: Duration = "90d"
    log_cap: Size = "64Mi"
    store: str = ""
    authenticator: str = "tokens"
    limits: LimitsConfig = LimitsConfig()


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    nodes: tuple[NodeConfig, ...] = ()
    backends: dict[str, dict[str, Any]] = {}
    sinks: dict[str, dict[str, Any]] = {}
    collectors: dict[str, dict[str, Any]] = {}
    health: HealthConfig = HealthConfig()


# start: read from the file at start-up. reload: read from it again. set: sent by a caller. undo: an earlier version.
ConfigOrigin = Literal["start", "reload", "set", "undo"]
# Sections of `scheduling` that are read only at start-up; decisions do not depend on them.
_AT_START = ("forecast", "data")


class ConfigVersion(Struct, frozen=True, omit_defaults=True):
    """`restores`: the number of the earlier version that it restored. `file`: a fingerprint of the configuration file
    at that time."""

    number: int
    at_ms: int
    by: str
    how: ConfigOrigin
    scheduling: SchedulingConfig
    restores: int = 0
    file: str = ""


class ConfigDifference(Struct, frozen=True, omit_defaults=True):
    """One setting, by its path; None where it is not set."""

    path: str
    before: Any = None
    after: Any = None


class ConfigChange(Struct, frozen=True, omit_defaults=True):
    """What a configuration change did or, if not `applied`, would do. `number` is the active version. `effect`: how
    start times would change, for a dry run. `needs_restart`: settings that differ and take effect only after a restart.
    `restores`: the earlier version that an undo restores.
    """

    applied: bool
    number: int
    changes: tuple[ConfigDifference, ...] = ()
    needs_restart: tuple[ConfigDifference, ...] = ()
    effect: WhatIf | None = None
    notes: tuple[str, ...] = ()
    restores: int = 0


def config_fingerprint(scheduling: SchedulingConfig) -> str:
    return sha256(msgspec.json.encode(scheduling, order="deterministic")).hexdigest()


def config_differences(before: SchedulingConfig, after: SchedulingConfig) -> tuple[ConfigDifference, ...]:
    """For a profile that exists on one side only, settings at their default are omitted."""
    defaults = dict(_flat(msgspec.to_builtins(ProfileConfig()), ""))
    out, one_sided = list[ConfigDifference](), set(before.profiles) ^ set(after.profiles)
    for found in _between(before, after, "scheduling"):
        name = next((name for name in one_sided if found.path.startswith(f"scheduling.profiles.{name}.")), "")
        key = found.path.removeprefix(f"scheduling.profiles.{name}")
        value = found.after if found.before is None else found.before
        if not name or key not in defaults or defaults[key] != value:
            out.append(found)
    for name in sorted(one_sided):
        if not any(found.path.startswith(f"scheduling.profiles.{name}.") for found in out):
            path, existed = f"scheduling.profiles.{name}", name in before.profiles
            out.append(ConfigDifference(path, {} if existed else None, None if existed else {}))
    return tuple(out)


def restart_differences(before: Config, after: Config) -> tuple[ConfigDifference, ...]:
    """The settings that differ and take effect only after a restart."""
    sections = [
        (before.server, after.server, "server"),
        (before.nodes, after.nodes, "nodes"),
        (mask_settings(before.backends), mask_settings(after.backends), "backends"),
        (mask_settings(before.sinks), mask_settings(after.sinks), "sinks"),
        (mask_settings(before.collectors), mask_settings(after.collectors), "collectors"),
        (before.health, after.health, "health"),
    ]
    for name in _AT_START:
        sections.append((getattr(before.scheduling, name), getattr(after.scheduling, name), f"scheduling.{name}"))
    return tuple(found for section in sections for found in _between(*section))


def imported_code(config: Config) -> dict[str, str]:
    """What is named by a path to code (`module:attribute`), by the path of the setting."""
    named = {
        "server.authenticator": config.server.authenticator,
        "scheduling.estimates.source": config.scheduling.estimates.source,
    }
    for name, profile in config.scheduling.profiles.items():
        named |= {f"scheduling.profiles.{name}.{key}": plugin for key, plugin in profile.plugin_names()}
    for section in ("backends", "sinks", "collectors"):
        for name, table in getattr(config, section).items():
            named[f"{section}.{name}.kind"] = str(table.get("kind") or name)
    return {path: name for path, name in named.items() if ":" in name}


def version_to_restore(history: tuple[ConfigVersion, ...]) -> ConfigVersion | None:
    """The version that `undo` restores, as in an editor: the one that was active before the last change that is not undone.
    Versions equal to the active one are skipped."""
    path: list[ConfigVersion] = []
    for version in history:
        origin = version.restores or version.number
        known = [place for place, each in enumerate(path) if origin in (each.number, each.restores)]
        if version.restores and known:
            del path[known[-1] + 1 :]
        else:  # a change, or an undone version that was restored by its number
            path.append(version)
    return next((each for each in reversed(path[:-1]) if each.scheduling != path[-1].scheduling), None)


def _between(before: Any, after: Any, at: str) -> tuple[ConfigDifference, ...]:
    old, new = (dict(_flat(msgspec.to_builtins(side), at)) for side in (before, after))
    paths = dict.fromkeys((*old, *new))
    return tuple(
        ConfigDifference(path, old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)
    )


def _flat(value: Any, at: str) -> list[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        return [pair for key, inner in value.items() for pair in _flat(inner, f"{at}.{key}")]
    if isinstance(value, list | tuple) and value and isinstance(value[0], dict):
        return [pair for number, inner in enumerate(value) for pair in _flat(inner, f"{at}[{number}]")]
    return [] if value in ({}, [], ()) else [(at, value)]
