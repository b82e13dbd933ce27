"""Workloads for the simulator. Each module reads one kind of trace or generates one; `open_workload` chooses among them."""

from hodei.sim.traces.open import open_workload
from hodei.sim.traces.workload import Arrival, Workload

__all__ = ["Arrival", "Workload", "open_workload"]
