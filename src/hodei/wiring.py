"""Configuration to objects; the only module that knows every implementation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

import msgspec

from hodei.agent.limits import enforcement
from hodei.api.views import Check
from hodei.backends.base import BackendContext
from hodei.backends.instant import InstantBackend
from hodei.backends.local import LocalBackend, VirtualNode
from hodei.backends.registry import common_of, make_backend, make_or_explain, node_defaults
from hodei.backends.remote.hub import AgentHub
from hodei.backends.remote.registry import AgentRegistry
from hodei.configuration import check_config, check_scheduling, make_estimator, node_offer, read_config
from hodei.control.accounting.accounts import accounts_policy
from hodei.control.admission.config import batch_of, build_router
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.capacity.scaling import capacity_policy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.retry import Backoff, CircuitPolicy, RetryPolicy
from hodei.extensions import COLLECTORS, SINKS, STORES, make
from hodei.model.config import Config, HealthConfig, SchedulingConfig, imported_code
from hodei.model.errors import InvalidInput
from hodei.model.facts import EventNoted
from hodei.model.node import Node
from hodei.model.resources import (
    CPU,
    MAX_DURATION_MS,
    MEMORY,
    STORAGE,
    parse_duration_ms,
    parse_quantity,
)
from hodei.plugins.registry import build_profiles, check_trial_policy, plugins_in_use
from hodei.ports import Backend, Store
from hodei.runtime.agent_records import commit_agents, load_agents
from hodei.runtime.backend_manager import BackendFactory
from hodei.runtime.clock import SystemClock
from hodei.runtime.config_changes import ConfigChanges, no_config_file, resolve_history
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.service import Service
from hodei.runtime.watcher import HealthPolicy

log = logging.getLogger("hodei.wiring")


def make_controller(
    config: SchedulingConfig, last_event: int = 0, *, trusted: Collection[str] | None = None
) -> Controller:
    """`trusted`: the only plugins besides the built-in ones that it may ever load; None for any."""

    def rebuild(scheduling: SchedulingConfig) -> Controller:  # a function: clones share it, a partial would be copied
        return make_controller(scheduling, trusted=trusted)

    retry = Backoff(
        parse_duration_ms(config.retry.base),
        config.retry.factor,
        parse_duration_ms(config.retry.max),
        round(config.retry.jitter * 1000),
    )
    # With a fallback profile, one broken profile does not keep the server from starting.
    broken: dict[str, str] = {}
    profiles = build_profiles(config, broken if config.unavailable_profile == "fallback" else None, trusted=trusted)
    return Controller(
        profiles,
        retry=RetryPolicy(failed_run=retry, max_losses=config.max_losses, gang_factor=config.retry.gang_factor),
        admission=AdmissionPolicy(config.admission.oversized, config.admission.max_members),
        preemption=PreemptionPolicy(
            config.preemption.enabled,
            parse_duration_ms(config.preemption.min_runtime),
            config.preemption.max_per_job,
            config.preemption.budget,
            parse_duration_ms(config.preemption.interval),
        ),
        estimator=make_estimator(config.estimates, trusted),
        accounts=accounts_policy(config),
        capacity=capacity_policy(config.capacity),
        profile_router=build_router(config, profiles, broken),
        last_event=last_event,
        max_tries=batch_of(config.parallel_scheduling),
        rebuild=rebuild,
    )


def trial_controller(policy: SchedulingConfig, live: SchedulingConfig) -> Controller:
    """For what-if queries, which any reader may make: loads no code that `live` does not name."""
    return make_controller(check_trial_policy(policy, live), trusted=plugins_in_use(live))


def make_store(url: str, home: Path) -> Store:
    """`url`: SCHEME:REST, where the scheme selects the store; empty for hodei.db in the home."""
    store: Store = make(STORES, url.partition(":")[0] or "sqlite", "store", url, home)
    return store


def add_observers(service: Service, config: Config) -> None:
    """Sinks and collectors decide nothing, so one that cannot be created is only reported."""
    for section, group, add in (
        ("sinks", SINKS, service.observers.add_sink),
        ("collectors", COLLECTORS, service.observers.add_collector),
    ):
        for name, table in getattr(config, section).items():
            options = {key: value for key, value in table.items() if key != "kind"}
            try:
                add(name, make(group, str(table.get("kind") or name), section[:-1], **options))
            except InvalidInput as error:
                log.error("%s.%s is not used: %s; %s", section, name, error.message, error.hint)


def instant_node(offer: VirtualNode) -> Node:
    fields = {name: value for name, value in msgspec.structs.asdict(offer).items() if name != "cpus"}
    return Node(backend="instant", kind="instant", **fields)


def make_service(
    home: Path,
    config: Config,
    *,
    instant: bool = False,
    trust_clock: bool = False,
    reread: Callable[[], Config] = no_config_file,
) -> Service:
    """Opens the store in `home` and creates the controller and the backends; call `start` on the result. `reread` reads the
    configuration file again. A wrong configuration raises InvalidInput before anything on disk is changed."""
    check_config(config, starting=True)
    offers = tuple(node_offer(node) for node in config.nodes)
    retention_ms = parse_duration_ms(config.server.retention)
    audit_retention_ms = parse_duration_ms(config.server.audit_retention)
    keep_logs_s = (retention_ms or MAX_DURATION_MS) / 1000
    log_cap_bytes = parse_quantity(config.server.log_cap)
    max_bytes = parse_quantity(config.server.decision_log_size)
    log_path = decision_log_path(home, config.server.decision_log)
    clock = SystemClock(follows=True)
    store = make_store(config.server.store, home)
    opened = store.open()
    history = resolve_history(store, config.scheduling, clock.now_ms(), check_scheduling)
    file, config = config, msgspec.structs.replace(config, scheduling=history[-1].scheduling)
    backends: dict[str, Backend] = {}
    if instant:
        nodes = [instant_node(offer) for offer in offers]
        huge = {CPU: 2**38, MEMORY: 2**48, STORAGE: 2**48}
        backends["instant"] = InstantBackend("instant", nodes or [Node("instant", "instant", "instant", huge)], clock)
    else:
        backends["local"] = LocalBackend(
            "local",
            home=home / "agent",
            installation=opened.installation,
            epoch=opened.epoch,
            nodes=offers,
            keep_logs_s=keep_logs_s,
            log_cap_bytes=log_cap_bytes,
        )
    hub = AgentHub(AgentRegistry(clock.now_ms, note=load_agents(store)), clock.now_ms)
    context = BackendContext(
        opened.installation, opened.epoch, home / "backends", clock, log_cap_bytes, keep_logs_s, hub
    )
    for name, table in config.backends.items():
        if not common_of(name, table).enabled:
            backends.pop(name, None)
        elif name != "local" or instant:
            backends[name] = make_or_explain(name, table, context)
    decision_log = None
    if log_path is not None:
        try:
            decision_log = DecisionLog(log_path, config.scheduling, opened.last_event, max_bytes=max_bytes)
        except OSError as error:
            hint = 'choose another file, or none: decision_log = ""'
            raise InvalidInput(f"the decision log {log_path} cannot be written: {error.strerror}", hint=hint) from error
    service = Service(
        store,
        opened,
        make_controller(config.scheduling, opened.last_event),
        backends,
        clock,
        retention_ms=retention_ms,
        audit_retention_ms=audit_retention_ms,
        trust_clock=trust_clock,
        decision_log=decision_log,
        checks=lambda service: server_checks(service, store),
        scheduling=config.scheduling,
        trial_controller=lambda policy: trial_controller(policy, service.scheduling),
        health=health_policy(config.health),
        backend_factory=BackendFactory(
            lambda name, table: make_backend(name, table, context, known_code=set(imported_code(file).values())),
            node_defaults,
            {name: config.backends.get(name, {}) for name in backends},
        ),
    )
    service.agents = hub
    hub.registry.commit = partial(commit_agents, service)
    hub.event = lambda kind, detail: service.loop.enqueue([EventNoted(kind, detail=detail)])
    service.config_changes = ConfigChanges(
        service, history, file, read_config, check_scheduling, make_controller, reread
    )
    add_observers(service, file)
    return service


def decision_log_path(home: Path, name: str) -> Path | None:
    """The path of the log, None for none."""
    if not name:
        return None
    path = home / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InvalidInput(
            f"server.decision_log: {path} is not a regular file", hint="move it away, or choose another name"
        )
    return path


def health_policy(config: HealthConfig) -> HealthPolicy:
    pauses = Backoff(parse_duration_ms(config.pause), 2, parse_duration_ms(config.max_pause), 0)
    every_ms, timeout_ms = parse_duration_ms(config.interval), parse_duration_ms(config.timeout)
    return HealthPolicy(every_ms, timeout_ms, CircuitPolicy(config.failures, pauses))


async def server_checks(service: Service, store: Store) -> list[Check]:
    """The checks of `hodei doctor` that only the server can make."""
    out = [
        _check(what, ok, found, "see docs/how-to/troubleshooting.md", "problem")
        for what, ok, found in await service.read(store.check)
    ]
    behind_ms = service.clock.now_ms() - service.controller.beat_ms
    text = f"the last step was {behind_ms} ms ago"
    out.append(_check("scheduler", behind_ms < 15_000, text, "see the server's log", "problem"))
    fix = "see docs/how-to/troubleshooting.md#a-damaged-record"
    out.append(_check("store records", *service.damaged_records.status(), fix))
    fix = "if the clock is right: hodei down; hodei up --trust-clock"
    out.append(_check("retention", *service.retention.status(), fix))
    manager = service.backend_manager
    for name, error in manager.errors().items():
        own = isinstance(manager.status(name).backend, LocalBackend)
        fix = "see HOME/agent/agent.log" if own else f"see: hodei backend show {name}"
        out.append(_check(f"backend {name}", not error, error or "reachable", fix, "problem"))
    scheduling = service.scheduling
    missing = [name for name in scheduling.fallback if name not in manager.backends]
    if missing and scheduling.fallback_enabled:
        text = f"scheduling.fallback names backends that do not exist: {', '.join(missing)}"
        out.append(_check("fallback", False, text, f"add them, or use: {', '.join(sorted(manager.backends))}"))
    for what, by in enforcement().items():
        fix = "run as root, or delegate a cgroup to this user, for limits that hold"
        out.append(_check(f"limits: {what}", by.startswith("cgroup"), f"enforced by {by}", fix))
    return out


def _check(what: str, ok: bool, found: str, fix: str, level: str = "warning") -> Check:
    """`level` and `fix` apply if it is not ok."""
    return Check(what, "ok" if ok else level, found, "" if ok else fix)
