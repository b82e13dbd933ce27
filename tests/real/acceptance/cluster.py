"""An installation whose machine is divided into virtual nodes, and jobs that run until the test finishes them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hodei.api.views import RunView
from hodei.model.effects import Event
from hodei.model.explanation import Explanation
from hodei.model.job import Candidate, Decision
from real.installation import Installation, until

HOSTNAME = "kubernetes.io/hostname"


def node(name: str, cpu: int = 4, memory: str = "4Gi", **fields: Any) -> str:
    """A `[[nodes]]` table of the configuration."""
    lines = ["[[nodes]]"]
    for key, value in {"name": name, "cpu": cpu, "memory": memory, **fields}.items():
        if isinstance(value, dict):
            pairs = ", ".join(f"{json.dumps(k)} = {json.dumps(v)}" for k, v in value.items())
            lines.append(f"{key} = {{{pairs}}}")
        else:
            lines.append(f"{key} = {json.dumps(value)}")
    return "\n".join(lines) + "\n"


def single_core_nodes(*names: str) -> list[str]:
    """Nodes that one job of `Cluster.submit_job` fills."""
    return [node(name, cpu=1, memory="64Mi") for name in names]


class Cluster(Installation):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._finished = home.parent / "finished"

    def up_with(self, *nodes: str, config: str = "") -> Cluster:
        """Start a server with these nodes and additional configuration."""
        self.configure(config + "".join(nodes)).up()
        return self

    def submit_job(self, name: str, cpu: int | str = 1, **fields: Any) -> int:
        """Submit a job that runs until `finish`."""
        self._finished.mkdir(exist_ok=True)
        script = f"while [ ! -e {self._finished}/{name} ]; do sleep 0.05; done"
        fields.setdefault("command", ["sh", "-c", script])
        with self.client() as client:
            return client.submit({"name": name, "cpu": cpu, "memory": "1Mi", "grace": "1s", **fields}).id

    def run_job(self, name: str, cpu: int | str = 1, **fields: Any) -> int:
        """Submit a job and wait until it runs."""
        return self.until_running(self.submit_job(name, cpu, **fields))

    def run_on(self, node: str, cpu: int | str = 1, **fields: Any) -> int:
        """Run a job on this node."""
        return self.run_job(f"on-{node}", cpu, node_selector={HOSTNAME: node}, **fields)

    def run_ignoring_term(self, name: str, **fields: Any) -> int:
        """Run a job that ends only after `finish`, even when it is stopped before."""
        ready, finished = self._finished / f"{name}.ready", self._finished / name
        wait = f"while [ ! -e {finished} ]; do sleep 0.05; done"
        script = f"trap '{wait}; exit 143' TERM; touch {ready}; {wait}"
        job = self.run_job(name, grace="5m", command=["sh", "-c", script], **fields)
        until(ready.exists, f"{name} has set its trap")
        return job

    def finish(self, *names: str) -> None:
        """Let the jobs with these names succeed, now or as soon as they run."""
        for name in names:
            (self._finished / name).touch()

    def cancel(self, *ids: int) -> None:
        self.ok("cancel", *map(str, ids))
        self.ended(*ids)

    def members(self, id: int) -> list[RunView]:
        """Its live runs, in order of members."""
        live = [run for run in self.job(id).runs if run.state in ("placed", "running")]
        return sorted(live, key=lambda run: run.member)

    def until_running(self, id: int) -> int:
        """Wait until the job and all its placed members run."""

        def all_run() -> bool:
            members = self.members(id)
            return self.state(id) == "running" and bool(members) and all(run.state == "running" for run in members)

        until(all_run, f"job {id} runs")
        return id

    def until_refused(self, id: int) -> Explanation:
        """Wait until the scheduler has tried to place the job and failed; returns why. No member may have started."""

        def refused() -> Explanation | None:
            detail, explanation = self.job(id), self.why(id)
            assert detail.runs == [], f"job {id} was started"
            return explanation if explanation.attempts and detail.job.reason_code else None

        explanation = until(refused, f"job {id} was tried and refused")
        assert self.state(id) == "pending"
        return explanation

    def why(self, id: int, node: str = "") -> Explanation:
        with self.client() as client:
            return client.why(id, node)

    def nodes_of(self, id: int) -> list[str]:
        """The nodes of its live members."""
        return sorted(run.node for run in self.members(id))

    def node_of(self, id: int) -> str:
        (name,) = self.nodes_of(id)
        return name

    def decision(self, id: int) -> Decision:
        """The placement decision of its first member."""
        decision = self.why(id).placements[0].decision
        assert decision is not None
        return decision

    def history(self, id: int) -> list[str]:
        """The kinds of its events, in order."""
        return [event.kind for event in self.events(id)]

    def events(self, id: int) -> list[Event]:
        with self.client() as client:
            return list(client.events(job=id))

    def undisturbed(self, *ids: int) -> bool:
        """Whether these jobs run in their first attempt and were never preempted."""
        return all(
            self.state(id) == "running" and self.job(id).job.attempt == 1 and "job.preempted" not in self.history(id)
            for id in ids
        )


def scores(decision: Decision) -> dict[str, int]:
    """The score of each feasible node, in whole points."""
    return {candidate.node: candidate.score // 100 for candidate in (decision.chosen, *decision.runners_up)}


def weights(candidate: Candidate) -> dict[str, int]:
    """The plugins of a score and their weights."""
    return {term.plugin: term.weight for term in candidate.terms}


def nodes_refusing(explanation: Explanation, code: str) -> set[str]:
    """The nodes that were refused with this reason."""
    return {name for blocker in explanation.blockers if blocker.code == code for name in blocker.nodes}
