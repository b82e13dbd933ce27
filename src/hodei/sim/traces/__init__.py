"""WORKLOADS: what the simulator is fed with. One file reads one form of trace; `open_workload` chooses among them."""

from hodei.sim.traces.open import open_workload
from hodei.sim.traces.workload import Arrival, Workload

__all__ = ["Arrival", "Workload", "open_workload"]
