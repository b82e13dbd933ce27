"""Reads and checks configurations: for `up`, `reload`, a configuration that was sent, and `config check`.

Every way comes through `read_config`, which reports all mistakes at once: `api.config` those that values show on their own
(`model.config` has the rules), `find_problems` those that need plugins, backends or several settings.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import msgspec

from hodei.api.config import parse_config, read_toml, read_yaml
from hodei.backends.local import VirtualNode
from hodei.backends.registry import KindBroken, settings_of
from hodei.control.accounting import accounts
from hodei.control.admission import config as admission
from hodei.extensions import AUTHENTICATORS, ESTIMATORS, STORES, ExtensionMissing, load, make
from hodei.jobfile.check import join_path
from hodei.jobfile.values import Problems, error_text, parse_numbers, try_parse
from hodei.model.config import (
    MAX_COST,
    Config,
    EstimatesConfig,
    NodeConfig,
    SchedulingConfig,
    SocketConfig,
    imported_code,
)
from hodei.model.dependency import AllowedData
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.names import label_key, label_value, parse_labels, safe_repr, word
from hodei.model.node import Location, Socket, Taint
from hodei.model.resources import (
    CPU,
    GPU,
    MEMORY,
    STORAGE,
    Resources,
    human_amount,
    parse_quantity,
    parse_resources,
    scale_of,
)
from hodei.plugins import registry
from hodei.ports import Estimator

YAML = (".yaml", ".yml")
_MIN_DECISION_LOG = 1 << 20
_LOG_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}\.jsonl")
_HOST = re.compile(r"[0-9A-Za-z](?:[0-9A-Za-z.-]{0,251}[0-9A-Za-z])?")
_NODE_NAME = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9])?")
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(?:=(?P<value>[^:\s]*))?:(?P<effect>NoSchedule|PreferNoSchedule|NoExecute)")


def load_config(path: Path | None, *, starting: bool = False) -> Config:
    """The file over the defaults; InvalidInput lists every mistake with its line. `starting`: see `read_config`."""
    if path is None:
        return Config()
    found, lines = read_file(path)
    try:
        return read_config(found, lines, full=True, starting=starting)[0]
    except InvalidInput as error:
        raise InvalidInput(f"{path}: {error.message}", hint=error.hint, problems=error.problems) from None


def read_file(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """The values of a TOML or YAML file, and the line of each path."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise InvalidInput(f"cannot read the configuration {path}: {error.strerror}") from error
    return (read_yaml if path.suffix in YAML else read_toml)(raw, str(path))


def read_config(
    found: dict[str, Any],
    lines: Mapping[str, int] | None = None,
    *,
    full: bool = False,
    known_code: Collection[str] | None = None,
    starting: bool = False,
) -> tuple[Config, bool]:
    """See `parse_config`. `known_code`: the only code by a path (`module:attribute`) that may be loaded; None for any.
    `starting`: a server with `unavailable_profile = "fallback"` starts without profiles whose plugins fail."""
    check = partial(find_problems, known_code=known_code, starting=starting)
    return parse_config(found, lines, full=full, check=check)


def check_config(config: Config, *, starting: bool = False) -> None:
    """InvalidInput with every mistake of a configuration that was not read from a document."""
    read_config(msgspec.to_builtins(config), full=True, starting=starting)


def check_scheduling(scheduling: SchedulingConfig) -> None:
    check_config(Config(scheduling=scheduling))


def find_problems(config: Config, *, known_code: Collection[str] | None = None, starting: bool = False) -> Problems:
    """The mistakes that values do not show on their own. See `read_config`."""
    if known_code is not None:
        text = "is code that the server's configuration file does not name; add it there, then: hodei reload"
        code = imported_code(config).items()
        if new := [(path, f"{name[:80]!r} {text}") for path, name in code if name not in known_code]:
            return new  # none of it may be loaded
    return [*_server_problems(config), *_scheduling_problems(config.scheduling, starting), *_node_problems(config.nodes),
            *_backend_problems(config)]  # fmt: skip


def _server_problems(config: Config) -> Problems:
    problems: Problems = []
    server = config.server
    _check(problems, "server.decision_log", check_log_name, server.decision_log)
    if parse_quantity(server.decision_log_size) < _MIN_DECISION_LOG:
        text = f'{server.decision_log_size} is less than 1Mi; for no decision log: decision_log = ""'
        problems.append(("server.decision_log_size", text))
    scheme = server.store.partition(":")[0]
    if scheme:
        _check(problems, "server.store", partial(load, STORES, what="store"), scheme)
    _check(problems, "server.authenticator", partial(load, AUTHENTICATORS, what="authenticator"), server.authenticator)
    return problems


def _scheduling_problems(config: SchedulingConfig, starting: bool) -> Problems:
    problems: Problems = []
    for name in sorted(config.profiles):
        if starting and config.unavailable_profile == "fallback" and name != "default":
            continue
        at = join_path("profiles", name)
        problems += [(f"{at}.{key}" if key else at, text) for key, text in registry.find_problems(config, name)]
    for number, rule in enumerate(config.spill):
        _check(problems, f"spill[{number}]", registry.spill_rule, rule)
    problems += admission.find_problems(config, {*registry.BASES, *config.profiles})
    problems += accounts.find_problems(config)
    try:
        make_estimator(config.estimates)
    except ExtensionMissing as error:
        problems.append(("estimates.source", error_text(error)))
    except InvalidInput as error:
        problems.append(("estimates", error_text(error)))
    _check(problems, "data.allow", AllowedData, config.data.allow)
    return [(f"scheduling.{path}", text) for path, text in problems]


def _node_problems(nodes: Sequence[NodeConfig]) -> Problems:
    problems: Problems = []
    places: dict[str, int] = {}
    for number, node in enumerate(nodes):
        if (first := places.setdefault(node.name, number)) != number:
            text = f"there are two nodes {node.name[:80]!r}; nodes[{first}] is the other"
            problems.append((f"nodes[{number}].name", text))
        problems += [(f"nodes[{number}].{path}", text) for path, text in problems_of_node(node)]
    return problems


def problems_of_node(node: NodeConfig) -> Problems:
    problems: Problems = []
    _check(problems, "name", _check_node_name, node.name)
    for key, value in node.labels.items():
        _check(problems, join_path("labels", key), parse_labels, {key: value})
    for key in ("arch", "gpu_type", "region", "zone", "datacenter", "rack"):
        _check(problems, key, label_value, getattr(node, key))
    for number, taint in enumerate(node.taints):
        _check(problems, f"taints[{number}]", parse_taint, taint)
    for number, name in enumerate(node.data):
        _check(problems, f"data[{number}]", word, name)
    _check(problems, "address", _check_address, node.address)
    _check(problems, "lat", lambda place: place.with_coordinates(node.lat, node.lng), Location())
    amounts: Problems = []
    for resource, key in ((CPU, "cpu"), (MEMORY, "memory"), (GPU, "gpu"), (STORAGE, "storage")):
        _check(amounts, key, partial(parse_quantity, scale=scale_of(resource)), getattr(node, key))
    if not amounts:
        _check(amounts, "resources", _capacity, node)
    problems += amounts
    if not amounts:
        capacity = _capacity(node)
        _check(problems, "overcommit", partial(_overcommit, known={*capacity, STORAGE}), node.overcommit)
        sockets = partial(_sockets, cpu_milli=capacity[CPU], gpu_milli=capacity[GPU])
        _check(problems, "sockets", sockets, node.sockets)
    if not 0 <= node.cost <= MAX_COST:
        problems.append(("cost", f"a cost of {node.cost}; the cost of one hour is from 0 to {MAX_COST}"))
    return problems


def _backend_problems(config: Config) -> Problems:
    problems: Problems = []
    for name, table in config.backends.items():
        at = join_path("backends", name)
        if name == "local" and table.get("kind") != "local":
            text = 'the name `local` is reserved for this machine; write kind = "local", or use another name'
            problems.append((at, text))
            continue
        try:
            settings_of(name, table)
        except KindBroken:  # the other backends continue without it
            continue
        except InvalidInput as error:
            problems += error.problems
    return problems


def _check(problems: Problems, path: str, parse: Callable[[Any], object], value: Any) -> None:
    try_parse(problems, path, parse, value, None)


def check_log_name(name: str) -> None:
    """The server renames an existing decision log, so names of other files in the home are refused."""
    if name and not _LOG_NAME.fullmatch(name):
        raise InvalidInput(
            f"{name[:100]!r} is not a name for a decision log",
            hint='use a file name in the home that ends in .jsonl, such as "decisions.jsonl"; "" for none',
        )


def node_offer(config: NodeConfig) -> VirtualNode:
    """InvalidInput names the node and all of its mistakes."""
    if problems := problems_of_node(config):
        path, text = problems[0]
        hint = "docs/reference/configuration.md#nodes"
        raise InvalidInput(f"node {config.name[:80]!r}: {path}: {text}", hint=hint, problems=tuple(problems))
    capacity = _capacity(config)
    place = Location(config.region, config.zone, config.datacenter, config.rack)
    return VirtualNode(
        name=config.name,
        capacity=capacity,
        labels=config.labels,
        taints=tuple(parse_taint(taint) for taint in config.taints),
        arch=config.arch,
        gpu_type=config.gpu_type,
        location=place.with_coordinates(config.lat, config.lng),
        data=config.data,
        cost_milli=round(config.cost * 1000),
        overcommit_percent=_overcommit(config.overcommit, {*capacity, STORAGE}),
        sockets=_sockets(config.sockets, capacity[CPU], capacity[GPU]),
        address=config.address,
    )


def _capacity(config: NodeConfig) -> Resources:
    amounts = {CPU: config.cpu, MEMORY: config.memory, GPU: config.gpu, **config.resources}
    if parse_quantity(config.storage):
        amounts[STORAGE] = config.storage
    return parse_resources(amounts)


def _check_node_name(name: str) -> None:
    if not _NODE_NAME.fullmatch(name):
        rule = "up to 253 letters, digits, '-', '_' and '.', a letter or digit at both ends"
        raise InvalidInput(f"{safe_repr(name)} is not a node name: {rule}")


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


def _check_address(text: str) -> None:
    """A host name or an IP address."""
    if text and not _HOST.fullmatch(text):
        try:
            ip_address(text)
        except ValueError:
            hint = "write a host name or an IP address, without a port"
            raise InvalidInput(f"{text[:80]!r} is not an address", hint=hint) from None


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
        raise InvalidInput(f"{safe_repr(text)} is not a taint", hint="write key=value:NoSchedule")
    return Taint(label_key(found["key"]), label_value(found["value"] or ""), found["effect"])  # type: ignore[arg-type]


def make_estimator(config: EstimatesConfig, trusted: Collection[str] | None = None) -> Estimator:
    own = {
        "user": {},
        "learned": {"percent": config.quantile, "window": config.window},
        "corrected": {"window": config.window},
    }
    options = own.get(config.source, config.options)
    estimator: Estimator = make(ESTIMATORS, config.source, "estimator", trusted=trusted, **options)
    return estimator
