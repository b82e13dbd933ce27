"""Configuration to objects; the only module that knows every implementation."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Collection
from contextlib import suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import msgspec

from hodei.agent.limits import enforcement
from hodei.api.config import parse_config, read_toml, read_yaml
from hodei.api.views import Check
from hodei.backends.base import BackendContext
from hodei.backends.instant import InstantBackend
from hodei.backends.local import LocalBackend, VirtualNode
from hodei.backends.registry import KindBroken, common_of, make_backend, make_or_explain, node_defaults, settings_of
from hodei.backends.remote.hub import AgentHub
from hodei.backends.remote.registry import AgentRegistry
from hodei.control.accounting.accounts import accounts_policy
from hodei.control.admission.config import batch_of, build_router, find_problems
from hodei.control.admission.gate import AdmissionPolicy
from hodei.control.capacity.scaling import capacity_policy
from hodei.control.controller import Controller
from hodei.control.lifecycle.preemption import PreemptionPolicy
from hodei.control.lifecycle.retry import Backoff, CircuitPolicy, RetryPolicy
from hodei.extensions import COLLECTORS, ESTIMATORS, SINKS, STORES, make
from hodei.jobfile.check import refuse
from hodei.jobfile.values import parse_numbers
from hodei.model.config import Config, EstimatesConfig, HealthConfig, NodeConfig, SchedulingConfig, SocketConfig
from hodei.model.dependency import AllowedData
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.facts import EventNoted
from hodei.model.names import word
from hodei.model.node import Location, Node, Socket, Taint
from hodei.model.resources import (
    CPU,
    GPU,
    MAX_DURATION_MS,
    MEMORY,
    STORAGE,
    human_amount,
    parse_duration_ms,
    parse_quantity,
    parse_resources,
)
from hodei.plugins.registry import BASES, build_profiles, check_trial_policy, plugins_in_use
from hodei.ports import Backend, Estimator, Store
from hodei.runtime.agent_records import commit_agents, load_agents
from hodei.runtime.backend_manager import BackendFactory
from hodei.runtime.clock import SystemClock
from hodei.runtime.config_changes import ConfigChanges, no_config_file, resolve_history
from hodei.runtime.decision_log import DecisionLog
from hodei.runtime.service import Service
from hodei.runtime.watcher import HealthPolicy

log = logging.getLogger("hodei.wiring")
MAX_COST = 1_000_000
_MIN_DECISION_LOG = 1 << 20
YAML = (".yaml", ".yml")
_LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_HOST = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.-]{0,251}[0-9A-Za-z])?")
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(?:=(?P<value>[^:\s]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)")


def load_config(path: Path | None) -> Config:
    """The file over the defaults; InvalidInput lists every mistake with its line."""
    if path is None:
        return Config()
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read the configuration {path}: {error.strerror}") from error
    found, lines = (read_yaml if path.suffix in YAML else read_toml)(raw, str(path))
    try:
        return parse_config(found, lines, full=True)[0]
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=error.hint, problems=error.problems) from None


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


def make_estimator(config: EstimatesConfig, trusted: Collection[str] | None = None) -> Estimator:
    own = {
        "user": {},
        "learned": {"percent": config.quantile, "window": config.window},
        "corrected": {"window": config.window},
    }
    options = own.get(config.source, config.options)
    estimator: Estimator = make(ESTIMATORS, config.source, "estimator", trusted=trusted, **options)
    return estimator


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


def node_offer(config: NodeConfig) -> VirtualNode:
    amounts = {CPU: config.cpu, MEMORY: config.memory, GPU: config.gpu, **config.resources}
    if parse_quantity(config.storage):
        amounts[STORAGE] = config.storage
    try:
        capacity = parse_resources(amounts)
        taints = tuple(parse_taint(taint) for taint in config.taints)
        data = tuple(word(name) for name in config.data)
        overcommit = _overcommit(config.overcommit, {*capacity, STORAGE})
        sockets = _sockets(config.sockets, capacity[CPU], capacity[GPU])
        address = _address(config.address)
        place = Location(config.region, config.zone, config.datacenter, config.rack).with_coordinates(
            config.lat, config.lng
        )
        if not 0 <= config.cost <= MAX_COST:
            raise InvalidInput(f"a cost of {config.cost}", hint=f"the cost of one hour, from 0 to {MAX_COST}")
    except InvalidInput as error:
        raise InvalidInput(f"node {config.name!r}: {error.message}", hint=error.hint) from error
    return VirtualNode(
        name=config.name,
        capacity=capacity,
        labels=config.labels,
        taints=taints,
        arch=config.arch,
        gpu_type=config.gpu_type,
        location=place,
        data=data,
        cost_milli=round(config.cost * 1000),
        overcommit_percent=overcommit,
        sockets=sockets,
        address=address,
    )


def _sockets(given: tuple[SocketConfig, ...], cpu_milli: int, gpu_milli: int) -> tuple[Socket, ...]:
    """InvalidInput for a core or GPU in two sockets, or more of them than the node has."""
    sockets = tuple(Socket(parse_numbers(one.cpus), parse_numbers(one.gpus)) for one in given)
    cpus = [cpu for socket in sockets for cpu in socket.cpus]
    gpus = [gpu for socket in sockets for gpu in socket.gpus]
    if any(not socket.cpus and not socket.gpus for socket in sockets):
        raise InvalidInput("a socket has neither cpus nor gpus", hint='write sockets = [{cpus = "0-3", gpus = "0"}]')
    for what, numbers, milli in (("cpu", cpus, cpu_milli), ("gpu", gpus, gpu_milli)):
        if len(set(numbers)) < len(numbers):
            raise InvalidInput(f"the sockets name a {what} twice", hint="each belongs to exactly one socket")
        if len(numbers) * 1000 >= milli + 1000:
            raise InvalidInput(
                f"the sockets have more {what}s ({len(numbers)}) than {what} = {human_amount(what, milli)}",
                hint=f"write {what} = {len(numbers)}, or name fewer",
            )
    return sockets


def _address(text: str) -> str:
    """A host name or an IP address."""
    if text and not _HOST.fullmatch(text):
        try:
            ip_address(text)
        except ValueError:
            hint = "write a host name or an IP address, without a port"
            raise InvalidInput(f"{text[:80]!r} is not an address", hint=hint) from None
    return text


def _overcommit(ratios: dict[str, float], known: set[str]) -> dict[str, int]:
    """Percent by resource. InvalidInput for a resource that the node does not have."""
    out = {}
    for given, ratio in ratios.items():
        (resource,) = parse_resources({given: 1})
        if resource not in known or resource in out:
            problem = "given twice" if resource in out else f"the node does not have it{did_you_mean(given, known)}"
            raise InvalidInput(f"overcommit of {given!r}: {problem}")
        if not 0.1 <= ratio <= 100:
            raise InvalidInput(f"an overcommit of {ratio} for {given}", hint="a ratio from 0.1 to 100")
        out[resource] = round(ratio * 100)
    return out


def parse_taint(text: str) -> Taint:
    found = _TAINT.fullmatch(text)
    if found is None:
        raise InvalidInput(f"{text!r} is not a taint", hint="write key=value:NoSchedule")
    return Taint(found["key"], found["value"] or "", found["effect"])  # type: ignore[arg-type]


def instant_node(offer: VirtualNode) -> Node:
    fields = {name: value for name, value in msgspec.structs.asdict(offer).items() if name != "cpus"}
    return Node(backend="instant", kind="instant", **fields)


def check_scheduling(config: SchedulingConfig) -> None:
    """InvalidInput with every mistake and its path."""
    problems: list[tuple[str, str]] = []
    for name, profile in sorted(config.profiles.items()):
        try:
            build_profiles(SchedulingConfig(profiles={name: profile}))
        except InvalidInput as error:
            text = error.message.removeprefix(f"profile {name!r}: ")
            problems.append((f"scheduling.profiles.{name}", f"{text}{'; ' + error.hint if error.hint else ''}"))
    for path in ("retry.base", "retry.max", "preemption.min_runtime", "preemption.interval", "forecast.every"):
        section, key = path.split(".")
        try:
            parse_duration_ms(getattr(getattr(config, section), key))
        except InvalidInput as error:
            problems.append((f"scheduling.{path}", error.message))
    named = {*BASES, *config.profiles}
    problems += [(f"scheduling.{path}", text) for path, text in find_problems(config, named)]
    if not problems:
        try:
            make_controller(config)
        except InvalidInput as error:
            problems += error.problems or [("scheduling", error.message)]
    if problems:
        refusal = refuse(problems, "the configuration")
        refusal.hint = "nothing was changed; docs/reference/configuration.md"
        raise refusal


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
    make_controller(config.scheduling)
    AllowedData(config.scheduling.data.allow)
    health_policy(config.health)
    for name, table in config.backends.items():
        if name == "local" and table.get("kind") != "local":
            hint = 'write kind = "local", or use another name'
            raise InvalidInput("backends.local: the name `local` is reserved for this machine", hint=hint)
        with suppress(KindBroken):
            settings_of(name, table)
    offers = tuple(node_offer(node) for node in config.nodes)
    retention_ms = parse_duration_ms(config.server.retention)
    audit_retention_ms = parse_duration_ms(config.server.audit_retention)
    keep_logs_s = (retention_ms or MAX_DURATION_MS) / 1000
    log_cap_bytes = parse_quantity(config.server.log_cap)
    max_bytes = parse_quantity(config.server.decision_log_size)
    if max_bytes < _MIN_DECISION_LOG:
        raise InvalidInput(
            f"server.decision_log_size: {config.server.decision_log_size} is less than 1Mi",
            hint='for no decision log: decision_log = ""',
        )
    log_path = decision_log_path(home, config.server.decision_log)
    clock = SystemClock(follows=True)
    store = make_store(config.server.store, home)
    opened = store.open()
    history = resolve_history(store, config.scheduling, clock.now_ms(), make_controller)
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
            lambda name, table: make_backend(name, table, context),
            node_defaults,
            {name: config.backends.get(name, {}) for name in backends},
        ),
    )
    service.agents = hub
    hub.registry.commit = partial(commit_agents, service)
    hub.event = lambda kind, detail: service.loop.enqueue([EventNoted(kind, detail=detail)])
    service.config_changes = ConfigChanges(service, history, file, check_scheduling, make_controller, reread)
    add_observers(service, file)
    return service


def decision_log_path(home: Path, name: str) -> Path | None:
    """The path of the log, None for none. The server renames an existing file of that name, so names of other files in the
    home, such as the store or the tokens, are refused."""
    if not name:
        return None
    if not _LOG_NAME.fullmatch(name):
        raise InvalidInput(
            f"server.decision_log: {name[:100]!r} is not a name for a decision log",
            hint='use a file name in the home that ends in .jsonl, such as "decisions.jsonl"; "" for none',
        )
    path = home / name
    if path.is_symlink() or (path.exists() and not path.is_file()):
        raise InvalidInput(
            f"server.decision_log: {path} is not a regular file", hint="move it away, or choose another name"
        )
    return path


def health_policy(config: HealthConfig) -> HealthPolicy:
    if not 1 <= config.failures <= 100:
        raise InvalidInput(f"health.failures must be from 1 to 100, not {config.failures}")
    pauses = Backoff(parse_duration_ms(config.pause), 2, parse_duration_ms(config.max_pause), 0)
    every_ms, timeout_ms = parse_duration_ms(config.interval), parse_duration_ms(config.timeout)
    if not timeout_ms or not pauses.base_ms:
        raise InvalidInput(
            "health.timeout and health.pause must be longer than 0s", hint="docs/reference/configuration.md"
        )
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
