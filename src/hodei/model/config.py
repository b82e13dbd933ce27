"""Everything that an operator can configure, as values; and versions of the configuration and their differences.

`wiring` reads the values from a file and builds objects from them.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from hodei.model.audit import mask_settings
from hodei.model.explanation import WhatIf

# Shares, quotas, budgets, and the minimum and maximum request of one job.


Amount = str | int | float


class AccountConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An organisation or a project. `under` names its parent account (empty: top level), `shares` its weight among its
    siblings ("parent": it dissolves into its parent), `users` the shares of its users."""

    name: str
    under: str = ""
    shares: int | Literal["parent"] = 1
    users: dict[str, int | Literal["parent"]] = {}


class SharesConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fair share. `half_life`: usage that old counts half; `window`: instead, only usage within it counts, in full.
    `weights`: the billing weight of one core, one byte (`0.25/Gi`), one GPU, combined by `sum` or `max`. `refresh`: how
    often factors are recomputed. Accounts that are not listed have one share."""

    enabled: bool = False
    formula: Literal["fair_tree", "classic", "drf"] = "fair_tree"
    half_life: str = "7d"
    window: str = ""
    refresh: str = "1m"
    weights: dict[str, Amount] = field(default_factory=lambda: {"cpu": "1.0", "memory": "0.25/Gi", "gpu": "8.0"})
    mode: Literal["sum", "max"] = "sum"
    accounts: tuple[AccountConfig, ...] = ()


class QuotaConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the jobs of a project may hold at once. `jobs` is a resource too: the number of running jobs. `hard` is
    exceeded only by borrowing within the `cohort`: at most `borrow` more, from what other members do not use and
    `lend`. `soft` may be exceeded while no other project waits. `per_user`: a hard limit for each user. `pending`:
    maximum number of pending jobs."""

    hard: dict[str, Amount] = {}
    soft: dict[str, Amount] = {}
    per_user: dict[str, Amount] = {}
    cohort: str = ""
    lend: dict[str, Amount] = {}
    borrow: dict[str, Amount] = {}
    weight: int = 1
    pending: int | None = None


class RangeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Minimum, maximum and default request of one member of a job of the project."""

    min: dict[str, Amount] = {}
    max: dict[str, Amount] = {}
    default: dict[str, Amount] = {}


class BudgetConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a project may use over time: `hours` of resource units (GPU-hours, core-hours) and `money` at `prices` per
    hour. `period` resets it every day, week or month (UTC); `since` counts from a fixed day (2026-01-31) instead."""

    hours: dict[str, Amount] = {}
    money: float | None = None
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
    weights: dict[str, int] = {}
    quantum: str = "1m"
    max_pending: int = 1_000_000
    worker_selection: str = ""
    plugins: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    scores: dict[str, int] | None = None
    options: dict[str, dict[str, Any]] = {}
    projects: tuple[str, ...] = ()
    nodes: str = ""
    fallback: str = ""
    fallback_after: str = "0s"
    escalation: EscalationConfig | None = None
    scheduling_timeout: str = ""
    max_queue_time: str = ""
    paused: bool = False
    preemption: bool = True
    grace: str = ""
    score_plugins: tuple[str, ...] = ()
    backend_policy: Literal["", "cost_optimized", "performance", "locality"] = ""

    def plugin_names(self) -> tuple[str, ...]:
        """Every name that is passed to the plugin loader. A new key that names a plugin must be added current."""
        named = (
            self.queue,
            self.secondary,
            self.worker_selection,
            *self.plugins,
            *self.score_plugins,
            *(self.scores or {}),
        )
        return tuple(name for name in named if name)


class EscalationConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Measures for jobs that wait too long: after `relax_after` the rules in `relax` become preferences; after every
    `promote_after` the job moves up one priority class, at most to `promote_to`. "0s": never."""

    relax: tuple[Literal["spread", "topology", "backend"], ...] = ()
    relax_after: str = "0s"
    promote_after: str = "0s"
    promote_to: str | int = "high"


class RouteWhenConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Conditions on a job; all that are set must hold. `project` and `user` are patterns with `*`, `labels` is a
    selector."""

    gpu: bool | None = None
    priority_at_least: str | int | None = None
    project: str = ""
    user: str = ""
    labels: str = ""
    workload: Literal["", "batch", "long-running", "serverless", "data-processing", "interactive"] = ""


class RouteConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs without a profile use that of the first matching route."""

    profile: str
    when: RouteWhenConfig = RouteWhenConfig()


class BreakerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """After `rounds` fruitless rounds `within` that time, a queue is retried less often on a timer: after `pause`,
    doubling up to `max_pause`. Freed capacity resets it. 0 rounds: never."""

    rounds: int = 10
    within: str = "1m"
    pause: str = "2s"
    max_pause: str = "30s"


class BackoffConfig(Struct, frozen=True, forbid_unknown_fields=True):
    base: str = "1s"
    factor: int = 2
    max: str = "1m"
    jitter: float = 0.1
    gang_factor: int = 3


class PreemptionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`min_runtime`: runs are protected for that long. `max_per_job`: how often one job may be preempted. `budget`:
    number of preempted jobs per `interval`, 0 for no limit."""

    enabled: bool = True
    min_runtime: str = "0s"
    max_per_job: int = 5
    budget: int = 0
    interval: str = "1m"


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`max_priority`: the highest priority that a role may set (unlisted roles: any). `project_users`: the users who
    may submit to a project, besides administrators (unlisted projects: everyone)."""

    oversized: Literal["reject", "wait"] = "reject"
    max_members: int = 100_000
    max_priority: dict[str, int | str] = field(default_factory=lambda: {"user": "high"})
    project_users: dict[str, tuple[str, ...]] = {}


class EstimatesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Estimates of run time: `user`; `learned`: the `quantile` (percent) of the last `window` similar runs; or
    `corrected`: the user's estimate, reduced by the overestimates of the user's last `window` runs. Other names are
    installed estimators, constructed with `options`."""

    source: str = "user"
    quantile: int = 75
    window: int = 20
    options: dict[str, Any] = {}


class ForecastConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Start forecasts of pending jobs: how often they are computed, and up to how many pending jobs."""

    enabled: bool = True
    every: str = "1m"
    max_jobs: int = 5000


class NodeGroupConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes of one group that a backend can start and stop. `min` and `max`: how many run; `warm`: how many idle ones are
    kept ready. Others are released after `idle`. A node that is not ready after `boot_timeout` is switched off; after
    `tries` such failures it is set aside for `pause`, and so is a group without capacity (longer each time)."""

    min: int = 0
    max: int = 10_000
    warm: int = 0
    idle: str = "10m"
    boot_timeout: str = "15m"
    tries: int = 3
    pause: str = "2m"


class CapacityConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Orders nodes for pending jobs, if backends offer potential nodes. `groups`: settings by group, else by backend.
    `max_cost`: of all ordered nodes per hour. `slack`: no node is ordered for a job that is expected to start on existing
    nodes at most this much later than a new node would be ready. `consolidate`: nodes that are used less than this many
    percent may be emptied if others can take their work (0: never). `spot`: nodes that the provider may take back compete
    by price and risk, are used `last`, or `never`."""

    enabled: bool = True
    interval: str = "5s"
    max_cost: float | None = None
    slack: str = "0s"
    consolidate: int = 50
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
    only_if_wait_over: str = "0s"
    max_cost: float | None = None
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
    scheduling_timeout: str = "0s"
    max_queue_time: str = "0s"
    unavailable_profile: Literal["hold", "fallback"] = "hold"
    fallback_enabled: bool = True
    fallback: tuple[str, ...] = ()
    fallback_when: Literal["no_room", "failure"] = "no_room"
    parallel_scheduling: bool | int = True
    retry: BackoffConfig = BackoffConfig()
    max_losses: int = 3
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
    cpu: str | int | float = "1"
    memory: str | int = "1Gi"
    storage: str | int = "0"
    gpu: str | int | float = "0"
    resources: dict[str, str | int] = {}
    labels: dict[str, str] = {}
    taints: tuple[str, ...] = ()
    arch: str = ""
    gpu_type: str = ""
    region: str = ""
    zone: str = ""
    datacenter: str = ""
    rack: str = ""
    lat: float | None = None
    lng: float | None = None
    data: tuple[str, ...] = ()
    cost: float = 0.0
    overcommit: dict[str, float] = {}
    sockets: tuple[SocketConfig, ...] = ()
    address: str = ""


class HealthConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Backends are checked every `interval` ("0s": never) with a `timeout`. After `failures` failed checks in a row
    nothing starts there; they are checked again after `pause`, doubling up to `max_pause`."""

    interval: str = "30s"
    timeout: str = "10s"
    failures: int = 3
    pause: str = "5s"
    max_pause: str = "5m"


NotNegative = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of the server, in total and per caller. A caller is identified by the name of its token, or by its address
    without one. 0 for a limit "per" something: no limit."""

    connections: AtLeastOne = 2048
    connections_per_address: NotNegative = 512
    requests: AtLeastOne = 512
    requests_per_token: NotNegative = 128
    rate_per_token: NotNegative = 1000
    burst_per_token: AtLeastOne = 2000
    waits: AtLeastOne = 1024
    waits_per_token: NotNegative = 256
    streams: AtLeastOne = 256
    streams_per_token: NotNegative = 32
    headers_timeout: str = "10s"
    body_timeout: str = "30s"


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 7680
    names: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    metrics_public: bool = False
    decision_log: str = "decisions.jsonl"
    decision_log_size: str = "256Mi"
    retention: str = "30d"
    audit_retention: str = "90d"
    log_cap: str = "64Mi"
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
        (before.health, after.health, "health"),
    ]
    for name in _AT_START:
        sections.append((getattr(before.scheduling, name), getattr(after.scheduling, name), f"scheduling.{name}"))
    return tuple(found for section in sections for found in _between(*section))


def imported_plugins(scheduling: SchedulingConfig) -> set[str]:
    """The plugins that are named by a path to code (`module:Class`)."""
    named = (name for profile in scheduling.profiles.values() for name in profile.plugin_names())
    return {name for name in named if ":" in name}


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
