"""The contract of every store: pages, filters, events and retention."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest

from hodei.model.affinity import parse_selector
from hodei.model.effects import Save, SaveJob, SaveRun
from hodei.model.errors import NotFound
from hodei.model.job import JOB_ENDED, JOB_TRANSITIONS
from hodei.ports import JobQuery
from hodei.testing.builders import NOW_MS, Connect, a_job, a_key, a_record, a_run, all_pages, new_jobs

DAY_MS = 86_400_000


QUERIES = {
    "one state": ({"states": ("running",)}, lambda job: job.state == "running"),
    "two states": ({"states": ("running", "failed")}, lambda job: job.state in ("running", "failed")),
    "every state": ({"states": tuple(JOB_TRANSITIONS)}, lambda job: True),
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


def ended(id: int, at_ms: int, state: str = "succeeded") -> list[Save]:
    job = a_job(id, state=state, attempt=1, changed_ms=at_ms, finished_ms=at_ms)
    return [SaveJob(job, new=True), SaveRun(a_run(id, state="succeeded"), new=True), a_record(id, job=id, at_ms=at_ms)]


class StoreQueries:
    """Pages, filters, events and retention; and all of them together at random."""

    def test_pages_hold_every_job_exactly_once_while_new_ones_arrive(self, store: Any) -> None:
        store.commit(new_jobs(*range(1, 26)))
        seen, after, arriving = [], 0, 26
        while True:
            page = store.jobs(JobQuery(after=after, limit=4))
            seen += [job.id for job in page.jobs]
            store.commit(new_jobs(arriving))
            arriving += 1
            after = page.next_after
            if not after:
                break
        assert seen == list(range(25, 0, -1))

    def test_a_page_that_ends_exactly_at_the_last_job_says_so(self, store: Any) -> None:
        store.commit(new_jobs(1, 2, 3))
        assert store.jobs(JobQuery(limit=3)).next_after == 0
        assert store.jobs(JobQuery(limit=2)).next_after == 2

    def test_a_page_has_at_least_one_job(self, store: Any) -> None:
        store.commit(new_jobs(1, 2))
        assert [job.id for job in store.jobs(JobQuery(limit=0)).jobs] == [2]

    @pytest.fixture
    def filled(self, store: Any) -> Any:
        """Forty jobs that differ in every field of a query."""
        states = sorted(JOB_TRANSITIONS)
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

    @pytest.mark.parametrize("limit", [1, 3, 100])
    @pytest.mark.parametrize(("query", "answers"), QUERIES.values(), ids=QUERIES.keys())
    def test_a_filter_finds_what_it_names_newest_first(
        self, filled: Any, query: dict[str, Any], answers: Any, limit: int
    ) -> None:
        expected = [job.id for job in filled.jobs(JobQuery(limit=1000)).jobs if answers(job)]
        assert all_pages(filled, limit=limit, **query) == expected
        assert expected == sorted(expected, reverse=True)

    def test_active_holds_unfinished_jobs_with_the_runs_since_their_first_attempt(self, store: Any) -> None:
        store.commit(
            [
                *new_jobs(3, state="running", attempt=3, first_attempt=2, count=2),
                *new_jobs(1),
                *new_jobs(2, state="succeeded", attempt=1),
                *(
                    SaveRun(run, new=True)
                    for run in (
                        a_run(3, 1, 2),
                        a_run(3, 0, 1, state="lost"),
                        a_run(3, 0, 2, state="lost"),
                        a_run(3, 0, 3),
                        a_run(2),
                    )
                ),
            ]
        )
        found = [(job.id, [run.id for run in runs]) for job, runs in store.active()]
        assert found == [(1, []), (3, ["3.0.2", "3.1.2", "3.0.3"])]
        assert [run.id for run in store.runs(3)] == ["3.0.1", "3.0.2", "3.1.2", "3.0.3"]

    def test_a_requeued_job_is_active_again(self, store: Any) -> None:
        store.commit(new_jobs(1, state="failed", attempt=1))
        assert store.active() == []
        store.commit([SaveJob(a_job(1, state="pending", attempt=1))])
        assert [job.id for job, _ in store.active()] == [1]
        assert (store.counts()["failed"], store.counts()["pending"]) == (0, 1)

    def test_counts_name_every_state(self, store: Any) -> None:
        assert set(store.counts()) == set(JOB_TRANSITIONS)

    def test_events_come_in_order_and_resume_after_any_of_them(self, store: Any) -> None:
        for seq in range(1, 21, 2):
            store.commit([a_record(seq + 1, job=seq % 3), a_record(seq, job=1)])
        assert [event.seq for event in store.events()] == list(range(1, 21))
        assert [event.seq for event in store.events(after=17)] == [18, 19, 20]
        seen, after = [], 0
        while page := store.events(after=after, limit=3):
            seen += [event.seq for event in page]
            after = seen[-1]
        assert seen == list(range(1, 21))

    def test_events_of_one_job_leave_out_the_others(self, store: Any) -> None:
        store.commit([a_record(seq, job=seq % 4) for seq in range(1, 21)])
        assert [event.seq for event in store.events(job=3)] == [3, 7, 11, 15, 19]
        assert [event.seq for event in store.events(job=3, after=7, limit=2)] == [11, 15]
        assert store.events(job=77) == []

    def test_prune_deletes_old_ended_jobs_with_their_runs_and_events_and_nothing_else(self, store: Any) -> None:
        old, young = NOW_MS - 10, NOW_MS + 10
        store.commit([*ended(1, old), *ended(2, young), *ended(3, old, "failed"), *new_jobs(4, changed_ms=old)])
        assert store.prune(ended_before_ms=NOW_MS) == [1, 3]
        assert all_pages(store) == [4, 2]
        assert (store.runs(1), store.run("3.0.1"), store.job(1)) == ([], None, None)
        assert [event.seq for event in store.events()] == [2]
        assert (store.counts()["succeeded"], store.counts()["failed"], store.counts()["pending"]) == (1, 0, 1)
        assert store.prune(ended_before_ms=NOW_MS) == []

    def test_prune_takes_the_oldest_first_and_no_more_than_its_limit(self, store: Any) -> None:
        store.commit([save for id in range(1, 8) for save in ended(id, NOW_MS - id)])
        assert store.prune(ended_before_ms=NOW_MS, limit=3) == [7, 6, 5]
        assert store.prune(ended_before_ms=NOW_MS, limit=3) == [4, 3, 2]
        assert all_pages(store) == [1]

    def test_the_highest_numbers_ever_used_survive_pruning(self, connect: Connect, store: Any) -> None:
        store.commit([*ended(5, NOW_MS - 1), a_record(9, "node.joined", at_ms=NOW_MS - 1)])
        store.prune(ended_before_ms=NOW_MS)
        store.prune_unattached(before_ms=NOW_MS)
        assert all_pages(store) == store.events() == []
        opened = connect().open()
        assert (opened.last_job, opened.last_event) == (5, 9)

    def test_a_pruned_job_cannot_be_changed_any_more(self, store: Any) -> None:
        store.commit(ended(1, NOW_MS - 1))
        store.prune(ended_before_ms=NOW_MS)
        with pytest.raises(NotFound):
            store.commit([SaveJob(a_job(1))])

    def test_a_key_is_kept_a_day_longer_than_other_records(self, store: Any) -> None:
        store.commit([a_key("ancient", at_ms=NOW_MS - DAY_MS - 1), a_key("old", at_ms=NOW_MS - DAY_MS), a_key("new")])
        assert store.prune_unattached(before_ms=NOW_MS) == 1
        assert store.key("ancient") is None
        assert store.key("old") is not None
        assert store.key("new") is not None

    def test_events_of_no_job_are_pruned_by_age(self, store: Any) -> None:
        store.commit([a_record(1, "node.joined", at_ms=NOW_MS - 1), a_record(2, "node.lost", at_ms=NOW_MS)])
        assert store.prune_unattached(before_ms=NOW_MS) == 1
        assert [event.seq for event in store.events()] == [2]

    def test_unattached_records_are_pruned_in_steps_that_say_whether_more_may_follow(self, store: Any) -> None:
        old = NOW_MS - 2 * DAY_MS
        store.commit([a_record(seq, "node.joined", at_ms=old) for seq in range(1, 6)])
        store.commit([a_key(f"k{number}", at_ms=old) for number in range(5)])
        pruned = [store.prune_unattached(before_ms=NOW_MS, limit=4) for _ in range(4)]
        assert pruned == [4, 4, 2, 0]
        assert store.events() == []
        assert all(store.key(f"k{number}") is None for number in range(5))

    @pytest.mark.parametrize("seed", range(25))
    def test_after_random_commits_the_store_agrees_with_a_dict(self, connect: Connect, store: Any, seed: int) -> None:
        chance = random.Random(seed)
        jobs: dict[int, str] = {}
        changed: dict[int, int] = {}
        steps: dict[Any, Any] = JOB_TRANSITIONS
        last = 0
        for step in range(12):
            if chance.random() < 0.15:
                old = [id for id, state in jobs.items() if state in JOB_ENDED and changed[id] < step - 2]
                assert sorted(store.prune(ended_before_ms=step - 2)) == sorted(old)
                for id in old:
                    del jobs[id]
            elif chance.random() < 0.1:
                store.close()
                store = connect()
                assert store.open().last_job == last
            else:
                saves, after = [], dict(jobs)
                for _ in range(chance.randrange(12)):
                    if chance.random() < 0.5 or not after:
                        last += 1
                        after[last] = chance.choice(sorted(JOB_TRANSITIONS))
                        saves.append(SaveJob(a_job(last, state=after[last], changed_ms=step), new=True))
                        changed[last] = step
                    else:
                        id = chance.choice(sorted(after))
                        after[id] = chance.choice(sorted(steps[after[id]]))
                        saves.append(SaveJob(a_job(id, state=after[id], changed_ms=step)))
                        changed[id] = step
                if chance.random() < 0.2:
                    with pytest.raises(NotFound):
                        store.commit([*saves, SaveJob(a_job(10_000))])
                store.commit(saves)
                jobs = after
            recount = Counter(jobs.values())
            assert store.counts() == {state: recount[state] for state in JOB_TRANSITIONS}
            assert {job.id: job.state for job in store.jobs(JobQuery(limit=1000)).jobs} == jobs
            assert [job.id for job, _ in store.active()] == sorted(id for id in jobs if jobs[id] not in JOB_ENDED)

    def test_check_finds_no_problem(self, store: Any) -> None:
        assert [line for line in store.check() if not line[1]] == []
