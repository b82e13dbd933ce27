"""What an operator can set, as values. `wiring` reads them from a file and makes objects of them."""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct


class ProfileConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A named scheduler: its queue, its plugins and their weights.

    `worker_selection` names the strategy that takes the place of the resource and load scores; `scores` replaces all
    weights; `plugins` adds (built-in names, announced ones, or module:Class), `disable` takes away.
    """

    queue: str = "priority"
    tenant_key: str = "project"
    weights: dict[str, int] = {}
    quantum: str = "1m"
    max_pending: int = 1_000_000
    worker_selection: str = ""
    plugins: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    scores: dict[str, int] | None = None
    options: dict[str, dict[str, Any]] = {}


class BackoffConfig(Struct, frozen=True, forbid_unknown_fields=True):
    base: str = "1s"
    factor: int = 2
    max: str = "1m"
    jitter: float = 0.1


class AdmissionConfig(Struct, frozen=True, forbid_unknown_fields=True):
    oversized: Literal["reject", "wait"] = "reject"
    max_members: int = 100_000


class SchedulingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """All that decisions depend on; a decision log carries it so that it can be replayed."""

    profiles: dict[str, ProfileConfig] = {}
    retry: BackoffConfig = BackoffConfig()
    max_losses: int = 3
    admission: AdmissionConfig = AdmissionConfig()


class NodeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """A slice of this machine, offered as a node of its own."""

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


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    host: str = "127.0.0.1"
    port: int = 7680
    names: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    metrics_public: bool = False
    decision_log: str = ""
    retention: str = "30d"
    log_cap: str = "64Mi"


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    server: ServerConfig = ServerConfig()
    scheduling: SchedulingConfig = SchedulingConfig()
    nodes: tuple[NodeConfig, ...] = ()
