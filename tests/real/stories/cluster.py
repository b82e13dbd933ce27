"""Words for the stories: a whole Hodei whose one machine is sliced into virtual nodes, and jobs that stay until told to end."""

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


def one_job_per_node(*names: str) -> list[str]:
    """Nodes with a single core each: a job of the stories (one core) fills one."""
    return [node(name, cpu=1, memory="64Mi") for name in names]


class Cluster(Installation):
    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self._ends = home.parent / "ends"

    def of(self, *nodes: str, config: str = "") -> Cluster:
        """A server that is up, with these nodes and further configuration."""
        self.configure(config + "".join(nodes)).up()
        return self

    def want(self, name: str, cpu: int | str = 1, **fields: Any) -> int:
        """Submit a job that goes on until `finish`; one core unless said otherwise."""
        self._ends.mkdir(exist_ok=True)
        stay = f"while [ ! -e {self._ends}/{name} ]; do sleep 0.05; done"
        fields.setdefault("command", ["sh", "-c", stay])
        with self.client() as client:
            return client.submit({"name": name, "cpu": cpu, "memory": "1Mi", "grace": "1s", **fields}).id

    def run(self, name: str, cpu: int | str = 1, **fields: Any) -> int:
        """The same, and it runs when this returns."""
        return self.until_running(self.want(name, cpu, **fields))

    def fill(self, name: str, cpu: int | str = 1, **fields: Any) -> int:
        """A job that runs on the node named so."""
        return self.run(f"on-{name}", cpu, node_selector={HOSTNAME: name}, **fields)

    def run_stubborn(self, name: str, **fields: Any) -> int:
        """A job that runs until `finish`; told to go before that, it does not go until then either."""
        ready, done = self._ends / f"{name}.ready", self._ends / name
        wait = f"while [ ! -e {done} ]; do sleep 0.05; done; exit 143"
        stay = f"trap '{wait}' TERM; touch {ready}; while [ ! -e {done} ]; do sleep 0.05; done"
        job = self.run(name, grace="60s", command=["sh", "-c", stay], **fields)
        until(ready.exists, f"{name} has set its trap")
        return job

    def finish(self, *names: str) -> None:
        """Tell the jobs of these names to end well, now or whenever they run."""
        for name in names:
            (self._ends / name).touch()

    def delete(self, *ids: int) -> None:
        self.ok("cancel", *map(str, ids))
        self.ended(*ids)

    def members(self, id: int) -> list[RunView]:
        """Its runs that have not ended, in order of members."""
        live = [run for run in self.job(id).runs if run.state in ("placed", "running")]
        return sorted(live, key=lambda run: run.member)

    def until_running(self, id: int) -> int:
        """It runs, with all members that have a node."""

        def all_run() -> bool:
            members = self.members(id)
            return self.state(id) == "running" and bool(members) and all(run.state == "running" for run in members)

        until(all_run, f"job {id} runs")
        return id

    def until_refused(self, id: int) -> Explanation:
        """The scheduler has looked at it and said no; nothing of it was started."""

        def refused() -> Explanation | None:
            detail, said = self.job(id), self.why(id)
            assert detail.runs == [], f"job {id} was started"
            return said if said.attempts and detail.job.reason_code else None

        said = until(refused, f"job {id} was looked at and refused")
        assert self.state(id) == "pending"
        return said

    def why(self, id: int, node: str = "") -> Explanation:
        with self.client() as client:
            return client.why(id, node)

    def nodes_of(self, id: int) -> list[str]:
        """Where its members are now."""
        return sorted(run.node for run in self.members(id))

    def node_of(self, id: int) -> str:
        (name,) = self.nodes_of(id)
        return name

    def decision(self, id: int) -> Decision:
        """Why its first member landed where it did."""
        decision = self.why(id).placements[0].decision
        assert decision is not None
        return decision

    def history(self, id: int) -> list[str]:
        """The kinds of its events, in order."""
        return [event.kind for event in self.events(id)]

    def events(self, id: int) -> list[Event]:
        with self.client() as client:
            return list(client.events(job=id))

    def untouched(self, *ids: int) -> bool:
        """They run, at their first attempt, and nobody has told them to go."""
        return all(
            self.state(id) == "running" and self.job(id).job.attempt == 1 and "job.preempted" not in self.history(id)
            for id in ids
        )


def scores(decision: Decision) -> dict[str, int]:
    """The total of each node that could have taken it, in whole points."""
    return {candidate.node: candidate.score // 100 for candidate in (decision.chosen, *decision.runners_up)}


def weights(candidate: Candidate) -> dict[str, int]:
    """Which plugins took part in a score, and their weights."""
    return {term.plugin: term.weight for term in candidate.terms}


def refusing(said: Explanation, code: str) -> set[str]:
    """The nodes that gave this reason."""
    return {name for blocker in said.blockers if blocker.code == code for name in blocker.nodes}
