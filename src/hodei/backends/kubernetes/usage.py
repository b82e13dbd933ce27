"""What is used on the nodes as the cluster measures it, where it does: the API `metrics.k8s.io` of a metrics-server."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec
from msgspec import Struct, field

from hodei.kube.api.client import Api, ApiError
from hodei.kube.api.objects import Meta, Quantity, Slim
from hodei.kube.api.quantities import readable
from hodei.model.backend import NodeUsage
from hodei.model.errors import BackendError, Unsupported
from hodei.model.ids import NodeName
from hodei.model.node import Node
from hodei.model.resources import CPU, MEMORY

PATH = "/apis/metrics.k8s.io/v1beta1/nodes"
_MEASURED = (CPU, MEMORY)


class _NodeMetrics(Slim, frozen=True):
    metadata: Meta = field(default_factory=Meta)
    usage: Mapping[str, Quantity] = {}


class _List(Struct):
    items: tuple[_NodeMetrics, ...] = ()


async def node_usage(api: Api, backend: str, prefix: str, nodes: Iterable[Node]) -> dict[NodeName, NodeUsage]:
    """Of the nodes that are ours to use. Unsupported if nobody measures in this cluster."""
    try:
        answer = await api.request("GET", PATH, timeout_s=15, attempts=2)
    except ApiError as error:
        if error.status == 404:
            raise Unsupported(
                f"the cluster of backend {backend} does not measure what is used on its nodes",
                hint="install metrics-server there; see what is promised with `hodei nodes`",
            ) from None
        hint = "the backend's account needs list on nodes of metrics.k8s.io: see deploy/backend-rbac.yaml"
        raise BackendError(error.message[:1000], hint=hint if error.status == 403 else error.hint) from error
    ours = {node.name for node in nodes}
    out = {}
    for measured in msgspec.json.decode(answer, type=_List).items:
        name = prefix + measured.metadata.name
        if name in ours:
            found, _ = readable({what: amount for what, amount in measured.usage.items() if what in _MEASURED})
            out[name] = NodeUsage(found)
    return out
