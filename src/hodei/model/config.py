"""What an operator can set, as values. `wiring` reads them from a file and makes objects of them."""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, field

from hodei.model.audit import mask_settings
from hodei.model.explanation import WhatIf

# ----------------------------------------------------------------------------------- accounting config
# What an operator can set about who may have how much: shares, quotas, budgets, and the least and most of one job.


Amount = str | int | float


class AccountConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An organisation or a project. `under` names the account that it is part of (none: it stands at the top), `shares`
    what it is due beside its siblings (or "parent": it dissolves into the account above), `users` what its users are."""

    name: str
    under: str = ""
    shares: int | Literal["parent"] = 1
    users: dict[str, int | Literal["parent"]] = {}


class SharesConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Fair share. `half_life`: after so long use counts half; `window`: instead, only the last so long counts, in full.
    `weights`: what one core, one byte (`0.25/Gi`), one GPU is worth, added up (`sum`) or only the dearest (`max`).
    `refresh`: how often factors are worked out anew. Accounts that are not named have one share."""

    enabled: bool = False
    formula: Literal["fair_tree", "classic", "drf"] = "fair_tree"
    half_life: str = "7d"
    window: str = ""
    refresh: str = "1m"
    weights: dict[str, Amount] = field(default_factory=lambda: {"cpu": "1.0", "memory": "0.25/Gi", "gpu": "8.0"})
    mode: Literal["sum", "max"] = "sum"
    accounts: tuple[AccountConfig, ...] = ()


class QuotaConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What the jobs of a project may hold at once. `jobs` is a resource too: how many run. `hard` is never passed but by
    borrowing within the `cohort`: at most `borrow` more, of what its members do not use and, by `lend`, give. `soft` may
    be passed while nobody else waits for room. `per_user`: the same as hard for each user. `pending`: how many may wait.
    """

    hard: dict[str, Amount] = {}
    soft: dict[str, Amount] = {}
    per_user: dict[str, Amount] = {}
    cohort: str = ""
    lend: dict[str, Amount] = {}
    borrow: dict[str, Amount] = {}
    weight: int = 1
    pending: int | None = None


class RangeConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What one member of a job of the project may ask for, at least and at most, and what it gets that does not say."""

    min: dict[str, Amount] = {}
    max: dict[str, Amount] = {}
    default: dict[str, Amount] = {}


class BudgetConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a project may use over time: `hours` of whole resources (GPU-hours, core-hours) and `money` at `prices` an hour.
    `period` starts it anew every day, week or month (UTC); `since` is a fixed day (2026-01-31) instead."""

    hours: dict[str, Amount] = {}
    money: float | None = None
    prices: dict[str, Amount] = {}
    period: Literal["", "day", "week", "month"] = "month"
    since: str = ""


# ----------------------------------------------------------------------------------------------------


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A named scheduler: its queue, its plugins and their weights.

    `queue` is the primary order, `secondary` breaks its ties. `base` names the built-in profile whose weights it starts from (empty: the one of its own name, else `default`);
    `worker_selection` names the strategy that takes the place of the scores resource (or fit) and load; `scores`
    replaces all weights; `plugins` adds (built-in names, announced ones, or module:Class), `disable` takes away.
    `projects` may use it (with `*`; none named: all), and it may use the `nodes` of this label selector. Jobs that no node
    of it could ever take, or that have waited for `fallback_after`, go to the profile `fallback`. `backend_policy` chooses
    among backends before nodes are chosen. `scheduling_timeout` and `max_queue_time` are for its jobs that do not say how
    long they may wait; empty: as the server has it. While it is `paused` none of its jobs starts. Without `preemption` none
    of them takes the place of others. `grace` is for jobs that say none. `score_plugins`: these scores alone count.
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
        """Every name that the loader is asked for: queues, orders, filters, scores. A new key that names one goes here."""
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
    """What is done about jobs that wait too long: after `relax_after` their rules named in `relax` count as wishes, after
    every `promote_after` they go up one class, at most to `promote_to`. "0s" for never."""

    relax: tuple[Literal["spread", "topology", "backend"], ...] = ()
    relax_after: str = "0s"
    promote_after: str = "0s"
    promote_to: str | int = "high"


class RouteWhenConfig(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """What a job must be like; all that is said must hold. `project` and `user` may have a `*`, `labels` is a selector."""

    gpu: bool | None = None
    priority_at_least: str | int | None = None
    project: str = ""
    user: str = ""
    labels: str = ""
    workload: Literal["", "batch", "long-running", "serverless", "data-processing", "interactive"] = ""


class RouteConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs that name no profile go to that of the first route that fits them."""

    profile: str
    when: RouteWhenConfig = RouteWhenConfig()


class BreakerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """After so many `rounds` in vain `within` that time, a line is tried less often for the clock's sake alone: after
    `pause`, then twice as long each time up to `max_pause`. Whatever frees room ends that at once. 0 rounds: never."""

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
    """Higher classes taking the place of lower ones. `min_runtime`: nobody is told to go sooner. `max_per_job`: how often
    the same job may be. `budget`: how many jobs within `interval`, 0 for no limit."""

    enabled: bool = True
    min_runtime: str = "0s"
    max_per_job: int = 5
    budget: int = 0
    interval: str = "1m"


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`max_priority`: the highest priority that holders of a role may give (roles that are not named: any).
    `project_users`: by project, the users that may submit to it besides administrators (projects not named: all may)."""

    oversized: Literal["reject", "wait"] = "reject"
    max_members: int = 100_000
    max_priority: dict[str, int | str] = field(default_factory=lambda: {"user": "high"})
    project_users: dict[str, tuple[str, ...]] = {}


class EstimatesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How long jobs are expected to run: by what users say; learned: the `quantile` (in percent) of the last `window`
    runs of their like; or corrected: what users say, less by what they said too much of their last `window` runs. Other
    names are estimators of installed packages, made with `options`."""

    source: str = "user"
    quantile: int = 75
    window: int = 20
    options: dict[str, Any] = {}


class ForecastConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """When those who wait will start, worked out anew so often; not while more than `max_jobs` wait."""

    enabled: bool = True
    every: str = "1m"
    max_jobs: int = 5000


class DataConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Directories of this host and addresses below which jobs may wait for data to appear; none if nothing is said."""

    allow: tuple[str, ...] = ()


class SpillConfig(Struct, frozen=True, forbid_unknown_fields=True, rename={"home": "from"}):
    """Backend `to` is for the overflow: jobs go there only if they would wait longer than `only_if_wait_over` on the backends
    named in `from` (none named: on all that are not for overflow), and cost no more than `max_cost` there."""

    to: str
    only_if_wait_over: str = "0s"
    max_cost: float | None = None
    home: tuple[str, ...] = ()


class DataRuleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Jobs that read `dataset` run only in these regions, zones, data centers or backends."""

    dataset: str
    stay_in: tuple[str, ...]


class SchedulingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All that decisions depend on; a decision log carries it so that it can be replayed.

    `unavailable_profile`: what becomes of jobs whose profile is not configured any more, paused, or broken. `fallback`:
    backends in the order in which they are used, the next one when there is no room or, with `fallback_when = "failure"`,
    only when those before it are not available. `fallback_enabled`: whether the chain counts at all.
    `parallel_scheduling`: how many jobs are placed in one step; true for a thousand, false for one after another.
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
    data: DataConfig = DataConfig()
    spill: tuple[SpillConfig, ...] = ()
    data_rules: tuple[DataRuleConfig, ...] = ()


class SocketConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Cores and GPUs that are near each other, by the operating system's numbers: `0-3,8` or a list."""

    cpus: str | int | tuple[int, ...] = ""
    gpus: str | int | tuple[int, ...] = ""


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A slice of this machine, offered as a node of its own.

    `data` names the data sets that it holds, `cost` is what an hour of it costs, `overcommit` how many times over a
    resource may be promised (from 0.1 to 100; 1 if not said). `sockets` are what it is made of, so that cores can be
    bound; `lat` and `lng` are degrees north and east; `address` is where members of one gang reach each other.
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
    """Backends are asked for a sign of life every `interval` ("0s": never), and have `timeout` to give it. After so many
    `failures` in a row nothing starts there; they are asked again after `pause`, then twice as long each time up to
    `max_pause`."""

    interval: str = "30s"
    timeout: str = "10s"
    failures: int = 3
    pause: str = "5s"
    max_pause: str = "5m"


NotNegative = Annotated[int, Meta(ge=0)]
AtLeastOne = Annotated[int, Meta(ge=1)]


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How much of the server all callers together, and each of them, may take. A token's holder is told by its name, a call
    without a token by its address. 0 where it says "per": no limit."""

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


# start: read from the file when the server came up. reload: read from it again. set: handed in. undo: an earlier one.
ConfigOrigin = Literal["start", "reload", "set", "undo"]
# Sections of `scheduling` that are read when the server comes up: decisions do not depend on them.
_AT_START = ("forecast", "data")


class ConfigVersion(Struct, frozen=True, omit_defaults=True):
    """One of them. `restores`: the number of the earlier one that it brought back. `file`: a fingerprint of what the
    configuration file said then."""

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
    """What a change of the configuration did or (not `applied`) would do. `number` is that of the one in force now,
    `effect`: who would start when, for a dry run. `needs_restart`: settings that differ and do not count before that."""

    applied: bool
    number: int
    changes: tuple[ConfigDifference, ...] = ()
    needs_restart: tuple[ConfigDifference, ...] = ()
    effect: WhatIf | None = None
    notes: tuple[str, ...] = ()


def config_fingerprint(scheduling: SchedulingConfig) -> str:
    return sha256(msgspec.json.encode(scheduling, order="deterministic")).hexdigest()


def config_differences(before: SchedulingConfig, after: SchedulingConfig) -> tuple[ConfigDifference, ...]:
    """Of a profile that is there on one side alone, what it says is told, and not all that it leaves at the default."""
    plain = dict(_flat(msgspec.to_builtins(ProfileConfig()), ""))
    out, alone = list[ConfigDifference](), set(before.profiles) ^ set(after.profiles)
    for found in _between(before, after, "scheduling"):
        name = next((name for name in alone if found.path.startswith(f"scheduling.profiles.{name}.")), "")
        key = found.path.removeprefix(f"scheduling.profiles.{name}")
        said = found.after if found.before is None else found.before
        if not name or key not in plain or plain[key] != said:
            out.append(found)
    for name in sorted(alone):
        if not any(found.path.startswith(f"scheduling.profiles.{name}.") for found in out):
            path, was_there = f"scheduling.profiles.{name}", name in before.profiles
            out.append(ConfigDifference(path, {} if was_there else None, None if was_there else {}))
    return tuple(out)


def restart_differences(before: Config, after: Config) -> tuple[ConfigDifference, ...]:
    """What a restart is needed for."""
    found = (*_between(before.server, after.server, "server"), *_between(before.nodes, after.nodes, "nodes"))
    old_backends, new_backends = mask_settings(before.backends), mask_settings(after.backends)
    found = (*found, *_between(old_backends, new_backends, "backends"))
    found = (*found, *_between(before.health, after.health, "health"))
    for section in _AT_START:
        old, new = getattr(before.scheduling, section), getattr(after.scheduling, section)
        found = (*found, *_between(old, new, f"scheduling.{section}"))
    return found


def imported_plugins(scheduling: SchedulingConfig) -> set[str]:
    """The plugins that it names by a path to code (`module:Class`)."""
    named = (name for profile in scheduling.profiles.values() for name in profile.plugin_names())
    return {name for name in named if ":" in name}


def version_to_restore(history: tuple[ConfigVersion, ...]) -> ConfigVersion | None:
    """The one that `undo` brings back: the last before that which is in force, whichever way it came to be."""
    if not history:
        return None
    here = history[-1].restores or history[-1].number
    earlier = [each for each in history if each.number < here and not each.restores]
    return earlier[-1] if earlier else None


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
