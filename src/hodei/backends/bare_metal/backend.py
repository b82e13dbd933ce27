"""Nodes of machines with BMCs."""

from __future__ import annotations

from msgspec import structs

from hodei.backends.bare_metal.bmc import make_bmc
from hodei.backends.bare_metal.provider import BmcProvider
from hodei.backends.bare_metal.settings import MachineSettings, Settings, machines_of
from hodei.backends.base import BackendContext
from hodei.backends.remote.backend import Patience
from hodei.backends.remote.machines import Machine, MachineBackend
from hodei.model.backend import NodeUsage
from hodei.model.errors import InvalidInput
from hodei.model.ids import NodeName
from hodei.model.node import Node
from hodei.model.resources import parse_duration_ms

WATTS = "watts"


class BareMetalBackend(MachineBackend):
    kind = "bare_metal"

    def __init__(
        self,
        name: str,
        context: BackendContext,
        patience: Patience,
        provider: BmcProvider,
        machines: list[MachineSettings],
    ) -> None:
        super().__init__(name, context, patience, provider)
        self._bmcs, self._configured = provider, {machine.name: machine for machine in machines}

    async def close(self) -> None:
        await super().close()
        await self._bmcs.close()

    def _offer(self, machine: Machine) -> Node:
        """With what its agent found when it was last connected: a BMC knows less, and counts sockets as processors."""
        node, agent = super()._offer(machine), self._nodes.get(machine.name)
        if agent is None or not agent.joined.facts:
            return node
        found, settings = self.node_of(agent), self._configured[machine.name]
        configured = {key for key in ("cpu", "memory", "gpu") if getattr(settings, key)} | settings.resources.keys()
        capacity = machine.capacity | {key: n for key, n in found.capacity.items() if key not in configured}
        return structs.replace(
            node,
            capacity=capacity,
            arch=node.arch or found.arch,
            gpu_type=node.gpu_type or found.gpu_type,
            labels={**found.labels, **node.labels},
            taints=(*found.taints, *machine.taints),
        )

    async def usage(self) -> dict[NodeName, NodeUsage]:
        """Also the power draw, in watts, as it was when the machines were last listed."""
        found = await super().usage()
        for name, watts in self._bmcs.watts.items():
            found[name] = NodeUsage({**(found[name].used if name in found else {}), WATTS: watts})
        return found


def make(name: str, settings: Settings, context: BackendContext) -> BareMetalBackend:
    timeout_ms = parse_duration_ms(settings.timeout)
    if not 1000 <= timeout_ms <= 10_000:
        raise InvalidInput(f"backends.{name}.timeout is from 1s to 10s")
    machines = machines_of(name, settings)
    if not machines:
        raise InvalidInput(f"backends.{name}.machines is empty", hint="docs/how-to/bare-metal.md")
    patience = Patience(parse_duration_ms(settings.away_after), parse_duration_ms(settings.lost_after))
    provider = BmcProvider(
        [(machine, make_bmc(machine, timeout_ms / 1000)) for machine in machines],
        timeout_s=timeout_ms / 1000,
        now_ms=context.clock.now_ms,
        state_file=context.home / name / "machines.json",
    )
    return BareMetalBackend(name, context, patience, provider, machines)
