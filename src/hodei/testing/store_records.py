"""The contract of every store: periodic jobs, the audit, usage, reservations and dependents."""

from __future__ import annotations

import random
from typing import Any

import pytest
from msgspec import structs

from hodei.model.accounting import UsageRow
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.cron import Periodic
from hodei.model.dependency import Dependencies, Dependency
from hodei.model.effects import SaveAudit, SaveJob, SavePeriodic, SaveReservation, SaveUsage
from hodei.model.reservation import Reservation
from hodei.testing.builders import NOW_MS, Connect, a_job, a_job_spec, amounts, new_jobs

NIGHTLY = Periodic("nightly", "0 3 * * *", a_job_spec("backup", env={"A": "1"}), "Europe/Madrid", by="ann", made_ms=5)


def entry(number: int, **fields: Any) -> AuditEntry:
    return AuditEntry(NOW_MS + number, **({"who": "ann", "role": "user", "verb": "jobs.cancel"} | fields))


HOUR = 3_600_000
ROW = UsageRow(("science", "physics", "ann"), "cpu", NOW_MS // HOUR * HOUR, HOUR, 7_200_000_000)


def saved(*rows: UsageRow) -> SaveUsage:
    return SaveUsage(rows)


RESERVED = Reservation(
    "nightly", "ml", NOW_MS, NOW_MS + 1000, (("n1", amounts(2, "1Gi")), ("n2", amounts(1))), "ann", NOW_MS - 5
)


def after(*jobs: int) -> Dependencies:
    return Dependencies((*(Dependency(job=job) for job in jobs), Dependency("exists", what="/data/x")))


class StoreRecords:
    """Periodic jobs, the audit, usage, reservations and dependents."""

    def test_periodic_jobs_come_back_as_they_were_by_name_and_survive_a_restart(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        hourly = structs.replace(NIGHTLY, name="hourly", schedule="@hourly", last_job=7, paused=True)
        store.commit([SavePeriodic(NIGHTLY), SavePeriodic(hourly), *new_jobs(1)])
        store.close()
        again: Any = connect()
        again.open()
        assert again.periodics() == [hourly, NIGHTLY]
        later = structs.replace(NIGHTLY, handled_ms=NOW_MS)
        again.commit([SavePeriodic(NIGHTLY), SavePeriodic(later), SavePeriodic(hourly, deleted=True)])
        assert again.periodics() == [later]
        again.commit([SavePeriodic(hourly, deleted=True)])  # deleting twice is no error
        assert again.periodics() == [later]

    def test_audit_rows_are_numbered_as_they_come_and_are_there_after_a_restart(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        store.commit([SaveAudit(entry(1)), *new_jobs(1), SaveAudit(entry(2, who="bob", code="CONFLICT", target="7"))])
        store.close()
        again: Any = connect()
        again.open()
        newest, oldest = again.audit(AuditQuery())
        assert newest == entry(2, who="bob", code="CONFLICT", target="7", seq=2)
        assert oldest == entry(1, seq=1)

    def test_the_audit_is_found_by_who_what_target_and_time(self, store: Any) -> None:
        store.commit([
            SaveAudit(entry(1, target="7")),
            SaveAudit(entry(2, who="bob", verb="nodes.change", target="n1")),
            SaveAudit(entry(3, verb="jobs.hold", target="7")),
            SaveAudit(entry(4, verb="arrays.cancel", target="8")),
        ])  # fmt: skip

        def found(**query: Any) -> list[int]:
            return [row.seq for row in store.audit(AuditQuery(**query))]

        assert found() == [4, 3, 2, 1]
        assert found(who="bob") == [2]
        assert found(what="jobs.cancel") == [1]
        assert found(what="jobs") == [3, 1]
        assert found(what="cancel") == [4, 1]
        assert found(what="can") == []
        assert found(target="7") == [3, 1]
        assert found(since_ms=NOW_MS + 3) == [4, 3]
        assert found(limit=2) == [4, 3]
        assert found(limit=2, before=3) == [2, 1]
        assert found(after=2) == [3, 4]
        assert found(after=0, limit=1) == [1]

    def test_the_oldest_rows_of_the_audit_are_pruned_and_no_number_is_used_twice(self, store: Any) -> None:
        store.commit([SaveAudit(entry(number)) for number in range(1, 6)])
        assert store.prune_audit(before_ms=NOW_MS + 4, limit=2) == 2
        assert store.prune_audit(before_ms=NOW_MS + 4) == 1
        assert store.prune_audit(before_ms=NOW_MS + 4) == 0
        assert store.prune_audit(before_ms=NOW_MS + 100) == 2
        store.commit([SaveAudit(entry(9))])
        assert [row.seq for row in store.audit(AuditQuery())] == [6]

    def test_a_range_of_jobs_is_counted_by_state(self, store: Any) -> None:
        store.commit([*new_jobs(1, 2, 3), SaveJob(a_job(4, state="running"), new=True), *new_jobs(5)])
        assert store.states_between(2, 4) == {"pending": 2, "running": 1}
        assert store.states_between(9, 10) == {}

    def test_usage_comes_back_as_it_was_and_survives_a_restart(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        assert store.usage() == []
        store.commit([saved(ROW), *new_jobs(1)])
        assert store.usage() == [ROW]
        store.close()
        again: Any = connect()
        again.open()
        assert again.usage() == [ROW]

    def test_the_last_save_of_a_row_counts(self, store: Any) -> None:
        store.commit([saved(ROW)])
        more = structs.replace(ROW, amount=ROW.amount + 1)
        wider = structs.replace(ROW, amount=ROW.amount + 2, width_ms=24 * HOUR)
        store.commit([saved(more)])
        assert store.usage() == [more]
        store.commit([saved(more), saved(wider)])
        assert store.usage() == [wider]

    def test_a_row_with_the_amount_0_is_deleted(self, store: Any) -> None:
        other = structs.replace(ROW, resource="gpu")
        store.commit([saved(ROW, other)])
        store.commit([saved(structs.replace(ROW, amount=0))])
        assert store.usage() == [other]
        store.commit([saved(structs.replace(ROW, amount=0))])  # deleting twice is no error
        assert store.usage() == [other]
        store.commit([saved(ROW)])
        assert store.usage() == [ROW, other]

    def test_a_row_may_be_deleted_and_created_in_one_commit(self, store: Any) -> None:
        store.commit([saved(ROW), saved(structs.replace(ROW, amount=0)), saved(ROW)])
        assert store.usage() == [ROW]
        store.commit([saved(structs.replace(ROW, amount=5)), saved(structs.replace(ROW, amount=0))])
        assert store.usage() == []

    @pytest.mark.parametrize(
        "amount", [1, 2**63 - 1, 2**63, 2**64 + 1, 10**40], ids=["one", "the largest of 64 bits", "one more", "twice", "far more"]
    )  # fmt: skip
    def test_amounts_beyond_64_bits_are_exact(self, store: Any, amount: int) -> None:
        store.commit([saved(structs.replace(ROW, amount=amount))])
        assert [row.amount for row in store.usage()] == [amount]

    def test_usage_is_sorted_by_account_resource_and_time(self, store: Any) -> None:
        paths = [("b",), ("a", "z"), ("a",), ("a", "b", "c"), ("a/b", "c"), ('"', "\\"), ("ä", "名")]
        rows = [
            UsageRow(path, resource, start, HOUR, 1)
            for path in paths
            for resource in ("memory", "billing", "cpu")
            for start in (2 * HOUR, 0, 10 * HOUR)
        ]
        random.Random(7).shuffle(rows)
        for at in range(0, len(rows), 5):
            store.commit([saved(*rows[at : at + 5])])
        assert store.usage() == sorted(rows, key=lambda row: (row.path, row.resource, row.start_ms))

    def test_nothing_of_a_refused_commit_is_stored(self, store: Any) -> None:
        store.commit(new_jobs(1))
        with pytest.raises(Exception, match=r"."):
            store.commit([saved(ROW), *new_jobs(1)])
        assert store.usage() == []

    def test_reservations_come_back_as_they_were_by_name_and_survive_a_restart(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        demo = structs.replace(RESERVED, name="demo", places=())
        store.commit([SaveReservation(RESERVED), SaveReservation(demo), *new_jobs(1)])
        assert store.reservations() == [demo, RESERVED]
        store.close()
        again: Any = connect()
        again.open()
        assert again.reservations() == [demo, RESERVED]

    def test_the_last_save_of_a_reservation_counts(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        longer = structs.replace(RESERVED, end_ms=NOW_MS + 9000)
        store.commit([SaveReservation(RESERVED), SaveReservation(longer)])
        assert store.reservations() == [longer]
        store.commit([SaveReservation(longer, deleted=True)])
        assert store.reservations() == []
        store.commit([SaveReservation(longer, deleted=True)])  # deleting twice is no error
        store.commit([SaveReservation(RESERVED, deleted=True), SaveReservation(RESERVED)])
        assert store.reservations() == [RESERVED]

    def test_dependents_are_found_by_the_job(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        twice = Dependencies((Dependency("succeeded", job=1), Dependency("checkpointed", job=1)))
        store.commit(
            [
                *new_jobs(1, 2),
                *new_jobs(3, 4, after=after(1, 2)),
                *new_jobs(5, after=after(3)),
                *new_jobs(6, after=twice),
            ]
        )
        assert store.dependents([1]) == [(1, 3), (1, 4), (1, 6)]
        assert store.dependents([3, 1, 9], limit=2) == [(1, 3), (1, 4)]
        assert store.dependents([2, 3]) == [(2, 3), (2, 4), (3, 5)]
        assert store.dependents([]) == []
        assert store.job(5).spec.after == after(3)

    def test_a_pruned_job_has_no_dependents(self, connect: Connect) -> None:
        store: Any = connect()
        store.open()
        store.commit([*new_jobs(1, state="succeeded", at_ms=NOW_MS - 1000), *new_jobs(2, after=after(1))])
        assert store.prune(ended_before_ms=NOW_MS) == [1]
        assert store.dependents([1]) == []
        store.commit([SaveJob(store.job(2))])
