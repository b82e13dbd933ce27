"""Small machines with one pool of processors, run by the real scheduler: common helpers of this folder."""

from __future__ import annotations

from pathlib import Path

from hodei.sim.driver import Simulation
from hodei.sim.metrics import Result
from hodei.sim.policies import policy
from hodei.sim.traces import Workload
from hodei.sim.traces.workload import Arrival, JobSizes, SpecCache, sort_arrivals, uniform_nodes
from hodei.wiring import make_controller
from sim.reference import Job

# Published results and their traces are not part of the repository.
SHARED = Path(__file__).parents[3] / "shared"


def run(workload: Workload, name: str) -> Result:
    return Simulation(workload, make_controller(policy(name)), policy=name).run()


def pool(jobs: list[Job], procs: int) -> Workload:
    sizes, specs, arrivals = JobSizes(), SpecCache(), []
    for job in jobs:
        estimate_ms = job.estimate * 1000
        spec = specs.spec(sizes.tasks(job.procs), name="job", user="", project="default", estimate_ms=estimate_ms)
        arrivals.append(Arrival(job.submit * 1000, job.id, spec, job.run * 1000))
    return Workload("pool", sort_arrivals(arrivals), uniform_nodes(procs))


def waits_s(result: Result) -> dict[int, float]:
    """The wait of each job by id; -1 for a job that never started."""
    return {o.id: o.wait_ms / 1000 if o.started_ms >= 0 else -1 for o in result.outcomes}
