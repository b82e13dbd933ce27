"""What every store promises. A new store joins by adding its opener to `Place`."""

from __future__ import annotations

import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import structs

from builders import NOW_MS, a_job, a_key, a_record, a_run, an_event
from hodei.model.decision import Candidate, Decision, Reason, Term, Verdict
from hodei.model.effects import Record, Save, SaveJob, SaveMarks, SaveRun
from hodei.model.errors import Conflict, InvalidInput, NotFound, StaleEpoch, Unavailable
from hodei.model.job import (
    Affinity,
    BackendChoice,
    DataProcessing,
    Interactive,
    JobSpec,
    LongRunning,
    NodeTerm,
    PreferredTerm,
    Serverless,
    Toleration,
)
from hodei.model.lifecycle import JOB_ENDED, JOB_STEPS
from hodei.model.node import Location, NodeMarks, Taint
from hodei.model.selector import Requirement, parse_selector
from hodei.ports import JobQuery, Store
from hodei.store import MemoryStore, SqliteStore

DAY_MS = 86_400_000


class Place:
    """Somewhere to remember: every `store()` is one more program that looks at the same things."""

    def __init__(self, kind: str, directory: Path) -> None:
        self.kind = kind
        self.path = directory / "hodei.db"
        self.stores: list[MemoryStore | SqliteStore] = []

    def store(self) -> Store:
        if self.kind == "sqlite":
            self.stores.append(SqliteStore(self.path))
        else:
            self.stores.append(MemoryStore(of=self.stores[0] if self.stores else None))  # type: ignore[arg-type]
        return self.stores[-1]

    def close(self) -> None:
        for store in self.stores:
            store.close()


@pytest.fixture(params=["memory", "sqlite"])
def place(request: pytest.FixtureRequest, tmp_path: Path):
    place = Place(request.param, tmp_path)
    yield place
    place.close()


@pytest.fixture
def store(place: Place) -> Store:
    store = place.store()
    store.open()
    return store


def new(*ids: int, **fields) -> list[Save]:
    return [SaveJob(a_job(id, **fields), new=True) for id in ids]


def all_pages(store: Store, **query) -> list[int]:
    ids, after = [], 0
    while True:
        page = store.jobs(JobQuery(after=after, **query))
        ids += [job.id for job in page.jobs]
        after = page.next_after
        if not after:
            return ids


# ------------------------------------------------------------------------------------------ opening


def test_a_new_store_is_empty_and_has_an_installation_of_its_own(place: Place):
    opened = place.store().open()
    assert (opened.epoch, opened.last_job, opened.last_event) == (1, 0, 0)
    assert len(opened.installation) == 8
    assert set(opened.installation) <= set("abcdefghijklmnopqrstuvwxyz234567")
    store = place.stores[0]
    assert store.active() == store.marks() == store.jobs(JobQuery()).jobs == store.events() == store.runs(1) == []
    assert store.job(1) is store.run("1.0.1") is store.key("k") is None
    assert not any(store.counts().values())


def test_every_opening_takes_the_next_epoch_and_keeps_the_installation(place: Place):
    first, second = place.store().open(), place.store().open()
    assert second.epoch == first.epoch + 1
    assert second.installation == first.installation


def test_an_older_writer_is_shut_out_and_changes_nothing(place: Place):
    older, newer = place.store(), place.store()
    older.open()
    older.commit(new(1))
    newer.open()
    with pytest.raises(StaleEpoch):
        older.commit(new(2))
    with pytest.raises(StaleEpoch):
        older.prune(ended_before_ms=NOW_MS)
    newer.commit(new(3))
    assert all_pages(newer) == all_pages(older) == [3, 1]


def test_writing_before_opening_is_refused(place: Place):
    with pytest.raises(Unavailable):
        place.store().commit(new(1))


def test_a_closed_store_can_be_opened_again_and_remembers_everything(place: Place):
    store = place.store()
    store.open()
    marks = NodeMarks("n1", cordoned=True)
    key = a_key(jobs=(1, 2))
    store.commit([*new(1, 2), SaveRun(a_run(1), new=True), a_record(7, job=1), SaveMarks(marks), key])
    store.close()
    with pytest.raises(Unavailable):
        store.commit(new(3))
    again = place.store()
    opened = again.open()
    assert (opened.epoch, opened.last_job, opened.last_event) == (2, 2, 7)
    assert again.job(2) == a_job(2)
    assert again.run("1.0.1") == a_run(1)
    assert again.events() == [an_event(7, job=1)]
    assert (again.marks(), again.key("key-1")) == ([marks], key)
    assert again.counts()["pending"] == 2


# ------------------------------------------------------------------------------------------- values


def a_job_with_everything(id: int) -> JobSpec:
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


def test_a_job_comes_back_as_it_was(store: Store):
    job = a_job_with_everything(1)
    store.commit([SaveJob(job, new=True)])
    assert store.job(1) == job
    assert store.jobs(JobQuery()).jobs == [job]
    assert store.active() == [(job, ())]
    assert store.job(1).cancel_requested is True  # a real bool, also in JSON


@pytest.mark.parametrize(
    "workload", [LongRunning(5), Serverless(False), Interactive(7)], ids=lambda w: type(w).__name__
)
def test_every_kind_of_workload_comes_back(store: Store, workload):
    store.commit(new(1, workload=workload))
    assert store.job(1).spec.workload == workload


def test_a_run_comes_back_as_it_was(store: Store):
    terms = (Term("fit", 9000, 40), Term("load", 100, 30))
    decision = Decision(Candidate("n1", 8000, terms), (Candidate("n2", 7000, terms),), 2, 5, "compute")
    run = a_run(
        1, 2, 3, state="failed", started_ms=1, finished_ms=2, exit_code=-9, reason_code="oom", reason="too\nbig",
        stop_requested="cancelled", decision=decision, task="worker",
    )  # fmt: skip
    store.commit([*new(1), SaveRun(run, new=True)])
    assert store.run("1.2.3") == run
    assert store.runs(1) == [run]


def test_events_marks_and_keys_come_back_as_they_were(store: Store):
    verdict = Verdict(Reason("fit", "NO_ROOM", "no room"), 2, ("n1", "n2"))
    event = an_event(
        1, "job.refused", job=1, run="1.0.1", node="n1", detail={"verdicts": [{"code": verdict.reason.code}]}
    )
    marks = NodeMarks("n1", True, {"a": "b"}, ("c",), (Taint("k", "v", "NoExecute"),), (Taint("old"),))
    store.commit(
        [Record(event), Record(an_event(2, "node.joined", node="n1")), SaveMarks(marks), a_key("k", (1, 2, 3))]
    )
    assert store.events() == [event, an_event(2, "node.joined", node="n1")]
    assert store.marks() == [marks]
    assert store.key("k") == a_key("k", (1, 2, 3))


def test_the_last_marks_of_a_node_count_and_empty_ones_are_forgotten(store: Store):
    store.commit([SaveMarks(NodeMarks("b", cordoned=True)), SaveMarks(NodeMarks("a", labels={"x": "1"}))])
    assert [marks.node for marks in store.marks()] == ["a", "b"]
    store.commit([SaveMarks(NodeMarks("b", labels={"y": "2"})), SaveMarks(NodeMarks("a"))])
    assert store.marks() == [NodeMarks("b", labels={"y": "2"})]


@pytest.mark.parametrize("id", ["", "x", "1", "1.0", "1.0.x", "1.0.1.1", "1.0.99"])
def test_an_unknown_run_id_finds_nothing(store: Store, id: str):
    store.commit([*new(1), SaveRun(a_run(1), new=True)])
    assert store.run(id) is None


# ------------------------------------------------------------------------------------------- commit


def test_later_saves_change_where_a_job_stands_and_never_its_spec(store: Store):
    job = a_job(1, name="first")
    store.commit([SaveJob(job, new=True)])
    changed = a_job(1, name="second", state="scheduled", attempt=1, version=2)
    store.commit([SaveJob(changed)])
    assert store.job(1) == structs.replace(changed, spec=job.spec)
    assert all_pages(store, name="first") == [1]


def test_a_later_save_of_a_run_keeps_the_decision_it_was_placed_with(store: Store):
    decision = Decision(Candidate("n1", 8000))
    store.commit([*new(1), SaveRun(a_run(1, decision=decision), new=True)])
    store.commit([SaveRun(a_run(1, state="running", started_ms=5))])
    assert store.run("1.0.1") == a_run(1, state="running", started_ms=5, decision=decision)


def test_of_several_saves_in_one_batch_the_last_one_counts(store: Store):
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


HALF_GOOD = {
    "a new job that is there": (SaveJob(a_job(1), new=True), Conflict),
    "a job created twice in the batch": (SaveJob(a_job(50), new=True), Conflict),
    "a change of an unknown job": (SaveJob(a_job(99)), NotFound),
    "a new run that is there": (SaveRun(a_run(1), new=True), Conflict),
    "a change of an unknown run": (SaveRun(a_run(99)), NotFound),
    "a run with a name of its own": (SaveRun(a_run(1, 5, id="mine"), new=True), InvalidInput),
    "an event that is there": (a_record(1), Conflict),
    "a key that is there": (a_key("used"), Conflict),
}


@pytest.mark.parametrize(("bad", "error"), HALF_GOOD.values(), ids=HALF_GOOD.keys())
def test_a_batch_that_fails_half_way_leaves_nothing(place: Place, store: Store, bad: Save, error: type[Exception]):
    store.commit([*new(1, 2), SaveRun(a_run(1), new=True), a_record(1), a_key("used")])
    good = [
        *new(50),
        SaveJob(a_job(2, state="held")),
        SaveRun(a_run(50), new=True),
        SaveRun(a_run(1, state="running")),
        a_record(2),
        SaveMarks(NodeMarks("n1", cordoned=True)),
        a_key("fresh"),
    ]
    with pytest.raises(error):
        store.commit([*good, bad])
    assert all_pages(store) == [2, 1]
    assert (store.job(2).state, store.run("1.0.1").state, store.run("50.0.1")) == ("pending", "placed", None)
    assert [event.seq for event in store.events()] == [1]
    assert (store.marks(), store.key("fresh")) == ([], None)
    assert store.counts()["pending"] == 2
    store.commit(good)
    assert all_pages(store) == [50, 2, 1]
    opened = place.store().open()
    assert (opened.last_job, opened.last_event) == (50, 2)


def test_an_empty_batch_is_fine_but_still_needs_the_epoch(place: Place, store: Store):
    store.commit([])
    place.store().open()
    with pytest.raises(StaleEpoch):
        store.commit([])


def test_a_batch_of_any_size_is_stored_whole(store: Store):
    jobs = [a_job(id) for id in range(1, 2501)]
    store.commit([save for job in jobs for save in (SaveJob(job, new=True), a_record(job.id, job=job.id))])
    assert store.counts()["pending"] == len(store.active()) == len(store.events(limit=10_000)) == 2500
    store.commit([SaveJob(structs.replace(job, state="held")) for job in jobs])
    assert store.counts()["held"] == 2500
    assert {job.state for job, _ in store.active()} == {"held"}


def test_a_commit_is_visible_to_every_thread_as_soon_as_it_returns(store: Store):
    with ThreadPoolExecutor(6) as threads:
        for id in range(1, 40):
            store.commit([*new(id), a_record(id, job=id)])
            seen = threads.map(lambda _, id=id: (store.job(id), store.events(after=id - 1)), range(6))
            assert all(job is not None and events[0].seq == id for job, events in seen)


def test_readers_never_see_half_a_batch(store: Store):
    """Each batch moves one job to held and another back: the sum never changes, whoever looks."""
    store.commit(new(1, state="held") + new(2))
    wrong, stop = [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            counts = store.counts()
            if (counts["held"], counts["pending"]) != (1, 1):
                wrong.append(counts)
            if sorted(job.state for job, _ in store.active()) != ["held", "pending"]:
                wrong.append("active")

    threads = [threading.Thread(target=look) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(60):
        held = 1 + turn % 2
        store.commit([SaveJob(a_job(held, state="pending")), SaveJob(a_job(3 - held, state="held"))])
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


# --------------------------------------------------------------------------------------------- jobs


def test_pages_hold_every_job_exactly_once_while_new_ones_arrive(store: Store):
    store.commit(new(*range(1, 26)))
    seen, after, arriving = [], 0, 26
    while True:
        page = store.jobs(JobQuery(after=after, limit=4))
        seen += [job.id for job in page.jobs]
        store.commit(new(arriving))
        arriving += 1
        after = page.next_after
        if not after:
            break
    assert seen == list(range(25, 0, -1))


def test_a_page_that_ends_exactly_at_the_last_job_says_so(store: Store):
    store.commit(new(1, 2, 3))
    assert store.jobs(JobQuery(limit=3)).next_after == 0
    assert store.jobs(JobQuery(limit=2)).next_after == 2


def test_a_page_has_room_for_one_job_at_least(store: Store):
    store.commit(new(1, 2))
    assert [job.id for job in store.jobs(JobQuery(limit=0)).jobs] == [2]


@pytest.fixture
def shelf(store: Store) -> Store:
    """Forty jobs that differ in everything that can be asked for."""
    states = sorted(JOB_STEPS)
    store.commit(
        [
            SaveJob(
                a_job(
                    id,
                    state=states[id % len(states)],
                    name=f"name-{id % 3}",
                    project=f"project-{id % 4}",
                    user=f"user-{id % 5}",
                    labels={"parity": str(id % 2)} | ({"rare": "yes"} if id % 13 == 0 else {}),
                    submitted_ms=NOW_MS + id,
                ),
                new=True,
            )
            for id in range(1, 41)
        ]
    )
    return store


QUESTIONS = {
    "one state": ({"states": ("running",)}, lambda job: job.state == "running"),
    "two states": ({"states": ("running", "failed")}, lambda job: job.state in ("running", "failed")),
    "every state": ({"states": tuple(JOB_STEPS)}, lambda job: True),
    "an unknown state": ({"states": ("asleep",)}, lambda job: False),
    "project": ({"project": "project-2"}, lambda job: job.spec.project == "project-2"),
    "user": ({"user": "user-1"}, lambda job: job.spec.user == "user-1"),
    "name": ({"name": "name-0"}, lambda job: job.spec.name == "name-0"),
    "a label": ({"labels": parse_selector("rare=yes")}, lambda job: job.id % 13 == 0),
    "no label": ({"labels": parse_selector("!rare, parity!=1")}, lambda job: job.id % 13 and job.id % 2 == 0),
    "ids": ({"ids": (3, 1, 99, 20)}, lambda job: job.id in (1, 3, 20)),
    "since": ({"since_ms": NOW_MS + 30}, lambda job: job.submitted_ms >= NOW_MS + 30),
    "all at once": (
        {"states": ("running", "held"), "project": "project-1", "labels": parse_selector("parity=1"), "since_ms": 1},
        lambda job: job.state in ("running", "held") and job.id % 4 == 1,
    ),
}  # fmt: skip


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize(("query", "answers"), QUESTIONS.values(), ids=QUESTIONS.keys())
def test_a_filter_finds_what_it_names_newest_first(shelf: Store, query: dict, answers, limit: int):
    expected = [job.id for job in shelf.jobs(JobQuery(limit=1000)).jobs if answers(job)]
    assert all_pages(shelf, limit=limit, **query) == expected
    assert expected == sorted(expected, reverse=True)


def test_active_holds_unfinished_jobs_with_the_runs_of_their_current_attempt(store: Store):
    store.commit(
        [
            *new(3, state="running", attempt=2, count=2),
            *new(1),
            *new(2, state="succeeded", attempt=1),
            *(
                SaveRun(run, new=True)
                for run in (a_run(3, 1, 2), a_run(3, 0, 1, state="lost"), a_run(3, 0, 2), a_run(2))
            ),
        ]
    )
    found = [(job.id, [run.id for run in runs]) for job, runs in store.active()]
    assert found == [(1, []), (3, ["3.0.2", "3.1.2"])]
    assert [run.id for run in store.runs(3)] == ["3.0.1", "3.0.2", "3.1.2"]


def test_a_requeued_job_is_active_again(store: Store):
    store.commit(new(1, state="failed", attempt=1))
    assert store.active() == []
    store.commit([SaveJob(a_job(1, state="pending", attempt=1))])
    assert [job.id for job, _ in store.active()] == [1]
    assert (store.counts()["failed"], store.counts()["pending"]) == (0, 1)


def test_counts_name_every_state(store: Store):
    assert set(store.counts()) == set(JOB_STEPS)


# ------------------------------------------------------------------------------------------- events


def test_events_come_in_order_and_resume_after_any_of_them(store: Store):
    for seq in range(1, 21, 2):
        store.commit([a_record(seq + 1, job=seq % 3), a_record(seq, job=1)])
    assert [event.seq for event in store.events()] == list(range(1, 21))
    assert [event.seq for event in store.events(after=17)] == [18, 19, 20]
    seen, after = [], 0
    while page := store.events(after=after, limit=3):
        seen += [event.seq for event in page]
        after = seen[-1]
    assert seen == list(range(1, 21))


def test_events_of_one_job_leave_out_the_others(store: Store):
    store.commit([a_record(seq, job=seq % 4) for seq in range(1, 21)])
    assert [event.seq for event in store.events(job=3)] == [3, 7, 11, 15, 19]
    assert [event.seq for event in store.events(job=3, after=7, limit=2)] == [11, 15]
    assert store.events(job=77) == []


# -------------------------------------------------------------------------------------------- prune


def ended(id: int, at_ms: int, state: str = "succeeded") -> list[Save]:
    job = a_job(id, state=state, attempt=1, changed_ms=at_ms, finished_ms=at_ms)
    return [SaveJob(job, new=True), SaveRun(a_run(id, state="succeeded"), new=True), a_record(id, job=id, at_ms=at_ms)]


def test_prune_forgets_old_ended_jobs_with_their_runs_and_events_and_nothing_else(store: Store):
    old, young = NOW_MS - 10, NOW_MS + 10
    store.commit([*ended(1, old), *ended(2, young), *ended(3, old, "failed"), *new(4, changed_ms=old)])
    assert store.prune(ended_before_ms=NOW_MS) == [1, 3]
    assert all_pages(store) == [4, 2]
    assert (store.runs(1), store.run("3.0.1"), store.job(1)) == ([], None, None)
    assert [event.seq for event in store.events()] == [2]
    assert (store.counts()["succeeded"], store.counts()["failed"], store.counts()["pending"]) == (1, 0, 1)
    assert store.prune(ended_before_ms=NOW_MS) == []


def test_prune_takes_the_oldest_first_and_no_more_than_its_limit(store: Store):
    store.commit([save for id in range(1, 8) for save in ended(id, NOW_MS - id)])
    assert store.prune(ended_before_ms=NOW_MS, limit=3) == [7, 6, 5]
    assert store.prune(ended_before_ms=NOW_MS, limit=3) == [4, 3, 2]
    assert all_pages(store) == [1]


def test_the_highest_numbers_ever_used_survive_pruning(place: Place, store: Store):
    store.commit([*ended(5, NOW_MS - 1), a_record(9, "node.joined", at_ms=NOW_MS - 1)])
    store.prune(ended_before_ms=NOW_MS)
    assert all_pages(store) == store.events() == []
    opened = place.store().open()
    assert (opened.last_job, opened.last_event) == (5, 9)


def test_a_pruned_job_cannot_be_changed_any_more(store: Store):
    store.commit(ended(1, NOW_MS - 1))
    store.prune(ended_before_ms=NOW_MS)
    with pytest.raises(NotFound):
        store.commit([SaveJob(a_job(1))])


def test_a_key_lives_a_day_longer_than_what_is_pruned(store: Store):
    store.commit([a_key("ancient", at_ms=NOW_MS - DAY_MS - 1), a_key("old", at_ms=NOW_MS - DAY_MS), a_key("new")])
    store.prune(ended_before_ms=NOW_MS)
    assert store.key("ancient") is None
    assert store.key("old") is not None
    assert store.key("new") is not None


def test_events_of_no_job_are_forgotten_by_age(store: Store):
    store.commit([a_record(1, "node.joined", at_ms=NOW_MS - 1), a_record(2, "node.lost", at_ms=NOW_MS)])
    store.prune(ended_before_ms=NOW_MS)
    assert [event.seq for event in store.events()] == [2]


# ------------------------------------------------------------------------------------ all of it, at random


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], print_blob=True)
@given(seed=st.integers(0, 2**32))
@pytest.mark.parametrize("kind", ["memory", "sqlite"])
def test_whatever_happens_the_store_agrees_with_a_plain_dict(kind: str, seed: int, tmp_path_factory):
    chance = random.Random(seed)
    place = Place(kind, tmp_path_factory.mktemp("store"))
    store = place.store()
    store.open()
    jobs: dict[int, str] = {}
    changed: dict[int, int] = {}
    last = 0
    for step in range(12):
        if chance.random() < 0.15:
            old = [id for id, state in jobs.items() if state in JOB_ENDED and changed[id] < step - 2]
            assert sorted(store.prune(ended_before_ms=step - 2)) == sorted(old)
            for id in old:
                del jobs[id]
        elif chance.random() < 0.1:
            store.close()
            store = place.store()
            assert store.open().last_job == last
        else:
            saves, after = [], dict(jobs)
            for _ in range(chance.randrange(12)):
                if chance.random() < 0.5 or not after:
                    last += 1
                    after[last] = chance.choice(sorted(JOB_STEPS))
                    saves.append(SaveJob(a_job(last, state=after[last], changed_ms=step), new=True))
                    changed[last] = step
                else:
                    id = chance.choice(sorted(after))
                    after[id] = chance.choice(sorted(JOB_STEPS[after[id]]))
                    saves.append(SaveJob(a_job(id, state=after[id], changed_ms=step)))
                    changed[id] = step
            if chance.random() < 0.2:
                with pytest.raises(NotFound):
                    store.commit([*saves, SaveJob(a_job(10_000))])
            store.commit(saves)
            jobs = after
        recount = Counter(jobs.values())
        assert store.counts() == {state: recount[state] for state in JOB_STEPS}
        assert {job.id: job.state for job in store.jobs(JobQuery(limit=1000)).jobs} == jobs
        assert [job.id for job, _ in store.active()] == sorted(id for id in jobs if jobs[id] not in JOB_ENDED)
    place.close()


def test_check_says_that_all_is_well(store: Store):
    assert [line for line in store.check() if not line[1]] == []
