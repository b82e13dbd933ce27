"""Victims whose going helps nobody any more: they stay, if they have not been told to stop yet.

The order to stop is stored before it is sent, so only the driver that sends it knows whether it is too late. It is asked
with a `Spare`; if it still had the order it drops it and says so (`RunSpared`), else it says nothing and the run ends as
told. Until the answer comes the run counts as going. A gang stays only if none of its members was told.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from msgspec import Struct

from hodei.control.lifecycle.run_orders import stop_order
from hodei.control.state import ClusterState
from hodei.model.effects import Spare
from hodei.model.ids import JobId, RunId
from hodei.model.job import Run
from hodei.model.lifecycle import RUN_ENDED


class _Asked(Struct):
    """The runs of one gang that need not stop any more, with why they were told to; those whose order was dropped."""

    runs: dict[RunId, str]
    dropped: set[RunId]


class SparedVictims:
    """`wanted`: whether somebody waits for the end of a run. `gang`: what the gang of a job is known by."""

    def __init__(self, world: ClusterState, wanted: Callable[[RunId], bool], gang: Callable[[JobId], JobId]) -> None:
        self._world, self._wanted, self._gang = world, wanted, gang
        self._asked: dict[JobId, _Asked] = {}
        self._needless: dict[RunId, None] = {}

    def __contains__(self, run: object) -> bool:
        """Whether its order to stop may have been dropped: if it is to stop after all, it has to be told again."""
        return any(run in asked.runs for asked in self._asked.values())

    def needless(self, runs: Iterable[RunId]) -> None:
        """These were told to go for one who does not need their room any more."""
        self._needless.update(dict.fromkeys(runs))

    def dropped(self, id: RunId) -> None:
        """The driver had not sent the order yet, and will not."""
        for asked in self._asked.values():
            if id in asked.runs:
                asked.dropped.add(id)
                return
        run = self._world.run(id)
        if run is not None and run.state not in RUN_ENDED and run.stop_requested:
            self._tell_again(run)

    def ask(self) -> None:
        """At the end of a step: ask for those whose end nobody has come to wait for meanwhile."""
        if not self._needless:
            return
        needless, self._needless = self._needless, {}
        for id in needless:
            run = self._world.run(id)
            if run is None or run.state in RUN_ENDED or not run.stop_requested or self._wanted(id):
                continue
            asked = self._asked.setdefault(self._gang(run.job), _Asked({}, set()))
            asked.runs[id] = run.stop_requested
            self._world.act(Spare(id, run.backend))

    def settle(self, now_ms: int) -> None:
        """Whose orders have all been dropped stays. If one member went, or somebody has come to wait for one, or the job
        is to stop for another reason, then all go after all."""
        for gang, asked in list(self._asked.items()):
            runs = {id: self._world.run(id) for id in asked.runs}
            live = [run for run in runs.values() if run is not None and run.state not in RUN_ENDED]
            as_told = all(run.stop_requested == asked.runs[run.id] for run in live)
            if len(live) < len(runs) or not as_told or any(self._wanted(id) for id in runs):
                del self._asked[gang]
                for run in live:
                    if run.id in asked.dropped and run.stop_requested == asked.runs[run.id]:
                        self._tell_again(run)
            elif len(asked.dropped) == len(runs):
                del self._asked[gang]
                for run in live:
                    self._world.change_run(run, stop_requested="")
                for job in sorted({run.job for run in live}):
                    self._world.tell("job.spared", now_ms, job=job, reason="its room is not needed any more")

    def _tell_again(self, run: Run) -> None:
        self._world.act(stop_order(self._world.jobs[run.job], run, run.stop_requested))
