"""The contract of every store (`hodei.ports.Store`): opening, atomic commits, values that come back unchanged."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from hodei.model.affinity import NodeTerm, Requirement, parse_selector
from hodei.model.capacity import NodeOrder
from hodei.model.effects import Save, SaveEvent, SaveJob, SaveNodeOrder, SaveOverrides, SaveRun, SaveValue
from hodei.model.errors import Conflict, InvalidInput, NotFound, StaleEpoch, Unavailable
from hodei.model.job import (
    Affinity,
    BackendChoice,
    Candidate,
    DataProcessing,
    Decision,
    EscalationState,
    Interactive,
    Job,
    LongRunning,
    Move,
    PreferredTerm,
    Reason,
    ScoreTerm,
    Serverless,
    Toleration,
    Verdict,
)
from hodei.model.node import Location, Node, NodeOverrides, Taint
from hodei.model.outcome import StopReason
from hodei.model.usage import RunUsage
from hodei.ports import JobQuery, NodeRunsQuery, Store
from hodei.testing.builders import NOW_MS, Connect, a_job, a_key, a_record, a_run, all_pages, an_event, new_jobs
from hodei.testing.store_queries import StoreQueries
from hodei.testing.store_records import StoreRecords


def a_job_with_everything(id: int) -> Job:
    term = NodeTerm(parse_selector("disk=ssd, cores>8, !spot"), (Requirement("metadata.name", "In", ("n1", "n2")),))
    return a_job(
        id,
        state="running",
        reason_code="R",
        reason='a "quoted" reason,\nä new line, a \x00 byte and 日本語',
        attempt=2,
        failures=1,
        losses=3,
        cancel_requested=True,
        requeue_requested=True,
        queued_ms=4,
        not_before_ms=5,
        scheduled_ms=6,
        started_ms=7,
        finished_ms=8,
        exit_code=137,
        version=9,
        move=Move(off=("n1", "n2")),
        escalation_state=EscalationState(rules=("spread",), relaxed_ms=3, failed_on=("a",)),
        project="p",
        user="ada",
        labels={"app": "x", "empty": ""},
        annotations={"note": "line\nline"},
        priority="critical",
        backend=BackendChoice("preferred", ("a", "b")),
        near=Location(zone="z", lat_micro=-1),
        workload=DataProcessing(2**40, 1),
        count=3,
        env={"A": "\u2028"},
        limits={"memory": 2**40},
        affinity=Affinity((term,), (PreferredTerm(5, term),)),
        tolerations=(Toleration("k", "Exists", effect="NoExecute", seconds=30), Toleration(operator="Exists")),
    )


FAILING = {
    "a new job that is there": (SaveJob(a_job(1), new=True), Conflict),
    "a job created twice in the batch": (SaveJob(a_job(50), new=True), Conflict),
    "a change of an unknown job": (SaveJob(a_job(99)), NotFound),
    "a new run that is there": (SaveRun(a_run(1), new=True), Conflict),
    "a change of an unknown run": (SaveRun(a_run(99)), NotFound),
    "a run with a name of its own": (SaveRun(a_run(1, 5, id="mine"), new=True), InvalidInput),
    "an event that is there": (a_record(1), Conflict),
    "a key that is there": (a_key("used"), Conflict),
}


class StoreConformance(StoreQueries, StoreRecords):
    """Subclass it, name the subclass `Test...`, and define `make_store`."""

    def make_store(self, directory: Path) -> Store:
        """A new store, not open, over the same data at each call in one test: one more program that uses it.
        `directory` is empty at the first call."""
        raise TypeError(f"{type(self).__name__} does not define make_store")

    @pytest.fixture
    def connect(self, tmp_path: Path) -> Iterator[Connect]:
        stores: list[Store] = []

        def connect() -> Store:
            stores.append(self.make_store(tmp_path))
            return stores[-1]

        yield connect
        for store in stores:
            store.close()

    @pytest.fixture
    def store(self, connect: Connect) -> Store:
        store = connect()
        store.open()
        return store

    def test_a_new_store_is_empty_and_has_an_installation_of_its_own(self, connect: Connect) -> None:
        store: Any = connect()
        opened = store.open()
        assert (opened.epoch, opened.last_job, opened.last_event) == (1, 0, 0)
        assert len(opened.installation) == 8
        assert set(opened.installation) <= set("abcdefghijklmnopqrstuvwxyz234567")
        assert (
            store.active() == store.overrides() == store.jobs(JobQuery()).jobs == store.events() == store.runs(1) == []
        )
        assert store.job(1) is store.run("1.0.1") is store.key("k") is None
        assert not any(store.counts().values())

    def test_every_opening_takes_the_next_epoch_and_keeps_the_installation(self, connect: Connect) -> None:
        first, second = connect().open(), connect().open()
        assert second.epoch == first.epoch + 1
        assert second.installation == first.installation

    def test_an_older_writer_is_fenced_off_and_changes_nothing(self, connect: Connect) -> None:
        older, newer = connect(), connect()
        older.open()
        older.commit(new_jobs(1))
        newer.open()
        with pytest.raises(StaleEpoch):
            older.commit(new_jobs(2))
        with pytest.raises(StaleEpoch):
            older.prune(ended_before_ms=NOW_MS)
        with pytest.raises(StaleEpoch):
            older.prune_unattached(before_ms=NOW_MS)
        newer.commit(new_jobs(3))
        assert all_pages(newer) == all_pages(older) == [3, 1]

    def test_writing_before_opening_is_refused(self, connect: Connect) -> None:
        with pytest.raises(Unavailable):
            connect().commit(new_jobs(1))

    def test_a_closed_store_can_be_opened_again_and_has_everything(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        overrides = NodeOverrides("n1", cordoned=True)
        key = a_key(jobs=(1, 2))
        store.commit([*new_jobs(1, 2), SaveRun(a_run(1), new=True), a_record(7, job=1), SaveOverrides(overrides), key])
        store.close()
        with pytest.raises(Unavailable):
            store.commit(new_jobs(3))
        again: Any = connect()
        opened = again.open()
        assert (opened.epoch, opened.last_job, opened.last_event) == (2, 2, 7)
        assert again.job(2) == a_job(2)
        assert again.run("1.0.1") == a_run(1)
        assert again.events() == [an_event(7, job=1)]
        assert (again.overrides(), again.key("key-1")) == ([overrides], key)
        assert again.counts()["pending"] == 2

    def test_a_job_comes_back_as_it_was(self, store: Any) -> None:
        job = a_job_with_everything(1)
        store.commit([SaveJob(job, new=True)])
        assert store.job(1) == job
        assert store.jobs(JobQuery()).jobs == [job]
        assert store.active() == [(job, ())]
        assert store.job(1).cancel_requested is True  # a real bool, also in JSON

    @pytest.mark.parametrize(
        "workload", [LongRunning(5), Serverless(False), Interactive(7)], ids=lambda w: type(w).__name__
    )
    def test_every_kind_of_workload_comes_back(self, store: Any, workload: Any) -> None:
        store.commit(new_jobs(1, workload=workload))
        assert store.job(1).spec.workload == workload

    def test_a_run_comes_back_as_it_was(self, store: Any) -> None:
        terms = (ScoreTerm("fit", 9000, 40), ScoreTerm("load", 100, 30))
        decision = Decision(Candidate("n1", 8000, terms), (Candidate("n2", 7000, terms),), 2, 5, "compute")
        run = a_run(
            1, 2, 3, state="failed", started_ms=1, finished_ms=2, exit_code=-9, reason_code="oom", reason="too\nbig",
            stop_reason=StopReason("drained", "n1", gang="repair"), decision=decision, task="worker",
        )  # fmt: skip
        store.commit([*new_jobs(1), SaveRun(run, new=True)])
        assert store.run("1.2.3") == run
        assert store.runs(1) == [run]

    @pytest.mark.parametrize(
        "usage", [RunUsage(), RunUsage(cpu_ms=0), RunUsage(7_200_000, 2**40, 2**50, 0)], ids=["none", "zero", "all"]
    )
    def test_the_usage_of_a_run_comes_back_as_it_was_saved_with_its_end(self, store: Any, usage: RunUsage) -> None:
        store.commit([*new_jobs(1), SaveRun(a_run(1, state="running", started_ms=5), new=True)])
        assert store.run("1.0.1").usage is None
        ended = a_run(1, state="succeeded", started_ms=5, finished_ms=9, usage=usage)
        store.commit([SaveRun(ended)])
        assert store.run("1.0.1") == ended

    def test_events_overrides_and_keys_come_back_as_they_were(self, store: Any) -> None:
        verdict = Verdict(Reason("fit", "INSUFFICIENT", "too little is free"), 2, ("n1", "n2"))
        event = an_event(
            1, "job.refused", job=1, run="1.0.1", node="n1", detail={"verdicts": [{"code": verdict.reason.code}]}
        )
        overrides = NodeOverrides("n1", True, {"a": "b"}, ("c",), (Taint("k", "v", "NoExecute"),), (Taint("old"),))
        store.commit(
            [
                SaveEvent(event),
                SaveEvent(an_event(2, "node.joined", node="n1")),
                SaveOverrides(overrides),
                a_key("k", (1, 2, 3)),
            ]
        )
        assert store.events() == [event, an_event(2, "node.joined", node="n1")]
        assert store.overrides() == [overrides]
        assert store.key("k") == a_key("k", (1, 2, 3))

    def test_costs_of_runs_are_summed_within_a_time(self, store: Any) -> None:
        store.open()
        hour = 3_600_000
        first = a_run(1, cost_milli=2000, placed_ms=hour, finished_ms=3 * hour, state="succeeded")
        second = a_run(2, cost_milli=1000, placed_ms=2 * hour)
        store.commit([*new_jobs(1, 2), SaveRun(first, new=True), SaveRun(second, new=True)])
        (row,) = store.costs(0, 4 * hour)
        assert (row.runs, round(row.cost, 6), row.backend) == (2, 6.0, first.backend)
        (row,) = store.costs(2 * hour, 3 * hour)
        assert (row.runs, round(row.cost, 6)) == (2, 3.0)
        assert store.costs(0, hour) == []

    def test_orders_of_nodes_come_back_until_they_are_deleted(self, store: Any) -> None:
        store.open()
        first = NodeOrder(Node("b", "rack", group="large", phase="potential"), "starting", 5, 5)
        second = NodeOrder(Node("a", "rack"), "ready", 5, 7, 7, 9)
        store.commit([SaveNodeOrder(first), SaveNodeOrder(second)])
        assert store.node_orders() == [second, first]
        store.commit([SaveNodeOrder(first, deleted=True)])
        assert store.node_orders() == [second]

    def test_the_last_overrides_of_a_node_count_and_empty_ones_are_deleted(self, store: Any) -> None:
        store.commit(
            [SaveOverrides(NodeOverrides("b", cordoned=True)), SaveOverrides(NodeOverrides("a", labels={"x": "1"}))]
        )
        assert [overrides.node for overrides in store.overrides()] == ["a", "b"]
        store.commit([SaveOverrides(NodeOverrides("b", labels={"y": "2"})), SaveOverrides(NodeOverrides("a"))])
        assert store.overrides() == [NodeOverrides("b", labels={"y": "2"})]

    @pytest.mark.parametrize("id", ["", "x", "1", "1.0", "1.0.x", "1.0.1.1", "1.0.99"])
    def test_an_unknown_run_id_finds_nothing(self, store: Any, id: str) -> None:
        store.commit([*new_jobs(1), SaveRun(a_run(1), new=True)])
        assert store.run(id) is None

    def test_later_saves_change_the_status_of_a_job_and_never_its_spec(self, store: Any) -> None:
        job = a_job(1, name="first")
        store.commit([SaveJob(job, new=True)])
        changed = a_job(1, name="second", state="scheduled", attempt=1, version=2)
        store.commit([SaveJob(changed)])
        assert store.job(1) == structs.replace(changed, spec=job.spec)
        assert all_pages(store, name="first") == [1]

    def test_a_later_save_of_a_run_keeps_its_decision(self, store: Any) -> None:
        decision = Decision(Candidate("n1", 8000))
        store.commit([*new_jobs(1), SaveRun(a_run(1, decision=decision), new=True)])
        store.commit([SaveRun(a_run(1, state="running", started_ms=5))])
        assert store.run("1.0.1") == a_run(1, state="running", started_ms=5, decision=decision)

    def test_of_several_saves_in_one_batch_the_last_one_counts(self, store: Any) -> None:
        steps = [a_job(1, state=state) for state in ("pending", "scheduled", "running", "succeeded")]
        run = a_run(1, decision=Decision(Candidate("n1", 1)))
        store.commit(
            [
                SaveJob(steps[0], new=True),
                SaveJob(steps[1]),
                SaveRun(run, new=True),
                SaveJob(steps[2]),
                SaveJob(steps[3]),
                SaveRun(a_run(1, state="succeeded", exit_code=0)),
            ]
        )
        assert store.job(1) == steps[3]
        assert store.run("1.0.1") == structs.replace(run, state="succeeded", exit_code=0)
        assert {state: count for state, count in store.counts().items() if count} == {"succeeded": 1}

    @pytest.mark.parametrize(("bad", "error"), FAILING.values(), ids=FAILING.keys())
    def test_a_failing_batch_changes_nothing(
        self, connect: Connect, store: Any, bad: Save, error: type[Exception]
    ) -> None:
        store.commit([*new_jobs(1, 2), SaveRun(a_run(1), new=True), a_record(1), a_key("used")])
        good = [
            *new_jobs(50),
            SaveJob(a_job(2, state="held")),
            SaveRun(a_run(50), new=True),
            SaveRun(a_run(1, state="running")),
            a_record(2),
            SaveOverrides(NodeOverrides("n1", cordoned=True)),
            a_key("fresh"),
        ]
        with pytest.raises(error):
            store.commit([*good, bad])
        assert all_pages(store) == [2, 1]
        assert (store.job(2).state, store.run("1.0.1").state, store.run("50.0.1")) == ("pending", "placed", None)
        assert [event.seq for event in store.events()] == [1]
        assert (store.overrides(), store.key("fresh")) == ([], None)
        assert store.counts()["pending"] == 2
        store.commit(good)
        assert all_pages(store) == [50, 2, 1]
        opened = connect().open()
        assert (opened.last_job, opened.last_event) == (50, 2)

    def test_an_empty_batch_is_fine_but_still_needs_the_epoch(self, connect: Connect, store: Any) -> None:
        store.commit([])
        connect().open()
        with pytest.raises(StaleEpoch):
            store.commit([])

    def test_a_batch_of_any_size_is_stored_completely(self, store: Any) -> None:
        jobs = [a_job(id) for id in range(1, 2501)]
        store.commit([save for job in jobs for save in (SaveJob(job, new=True), a_record(job.id, job=job.id))])
        assert store.counts()["pending"] == len(store.active()) == len(store.events(limit=10_000)) == 2500
        store.commit([SaveJob(structs.replace(job, state="held")) for job in jobs])
        assert store.counts()["held"] == 2500
        assert {job.state for job, _ in store.active()} == {"held"}

    def test_a_commit_is_visible_to_every_thread_as_soon_as_it_returns(self, store: Any) -> None:
        with ThreadPoolExecutor(6) as threads:
            for id in range(1, 40):
                store.commit([*new_jobs(id), a_record(id, job=id)])
                seen = threads.map(lambda _, id=id: (store.job(id), store.events(after=id - 1)), range(6))
                assert all(job is not None and events[0].seq == id for job, events in seen)

    def test_readers_never_see_half_a_batch(self, store: Any) -> None:
        """Each batch moves one job to held and another back: a reader always sees one of each."""
        store.commit(new_jobs(1, state="held") + new_jobs(2))
        wrong, stop = [], threading.Event()

        def read() -> None:
            while not stop.is_set():
                counts = store.counts()
                if (counts["held"], counts["pending"]) != (1, 1):
                    wrong.append(counts)
                if sorted(job.state for job, _ in store.active()) != ["held", "pending"]:
                    wrong.append("active")

        threads = [threading.Thread(target=read) for _ in range(3)]
        for thread in threads:
            thread.start()
        for turn in range(60):
            held = 1 + turn % 2
            store.commit([SaveJob(a_job(held, state="pending")), SaveJob(a_job(3 - held, state="held"))])
        stop.set()
        for thread in threads:
            thread.join()
        assert wrong == []

    def test_the_last_note_of_a_name_counts_and_a_missing_one_is_empty(self, store: Any) -> None:
        assert store.note("forecasts") == ""
        store.commit([SaveValue("forecasts", "one"), SaveValue("other", "x")])
        store.commit([SaveValue("forecasts", "two"), SaveValue("forecasts", "three")])
        assert (store.note("forecasts"), store.note("other")) == ("three", "x")

    def test_runs_of_a_node_are_found_by_time_and_in_pages(self, store: Any) -> None:
        saves: list[Save] = []
        for id in range(1, 8):
            node, finished = "ab"[id % 2], 0 if id == 7 else NOW_MS + id * 1000 + 500
            run = a_run(job=id, node=node, placed_ms=NOW_MS + id * 1000, finished_ms=finished)
            saves += [SaveJob(a_job(id), new=True), SaveRun(run, new=True)]
        store.commit(saves)

        def found(**query: Any) -> list[int]:
            return [run.job for run in store.runs_on(NodeRunsQuery("b", **query)).runs]

        assert found() == [7, 5, 3, 1]
        assert found(since_ms=NOW_MS + 3600) == [7, 5], "3 has ended, 7 still runs"
        assert found(until_ms=NOW_MS + 3001) == [3, 1]
        assert found(since_ms=NOW_MS + 1500) == [7, 5, 3], "a run that ended at that moment holds nothing"
        assert store.runs_on(NodeRunsQuery("c")).runs == []
        first = store.runs_on(NodeRunsQuery("b", limit=3))
        assert [run.job for run in first.runs] == [7, 5, 3]
        rest = store.runs_on(NodeRunsQuery("b", limit=3, after=first.next_after))
        assert ([run.job for run in rest.runs], rest.next_after) == ([1], None)
