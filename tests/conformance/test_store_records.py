"""What every store promises of periodic jobs, of the audit, and of counting a range of jobs."""

from __future__ import annotations

from msgspec import structs

from builders import NOW_MS, a_job, a_job_spec
from conformance.stores import Place, new
from hodei.model.audit import AuditEntry, AuditQuery
from hodei.model.effects import SaveAudit, SaveJob, SavePeriodic
from hodei.model.periodic import Periodic
from hodei.ports import Store

NIGHTLY = Periodic("nightly", "0 3 * * *", a_job_spec("backup", env={"A": "1"}), "Europe/Madrid", by="ann", made_ms=5)


def entry(number: int, **fields) -> AuditEntry:
    return AuditEntry(NOW_MS + number, **({"who": "ann", "role": "user", "verb": "jobs.cancel"} | fields))


def test_periodic_jobs_come_back_as_they_were_by_name_and_survive_a_restart(place: Place):
    store = place.store()
    store.open()
    hourly = structs.replace(NIGHTLY, name="hourly", schedule="@hourly", last_job=7, paused=True)
    store.commit([SavePeriodic(NIGHTLY), SavePeriodic(hourly), *new(1)])
    store.close()
    again = place.store()
    again.open()
    assert again.periodics() == [hourly, NIGHTLY]
    later = structs.replace(NIGHTLY, handled_ms=NOW_MS)
    again.commit([SavePeriodic(NIGHTLY), SavePeriodic(later), SavePeriodic(hourly, gone=True)])
    assert again.periodics() == [later]
    again.commit([SavePeriodic(hourly, gone=True)])  # forgotten twice is forgotten
    assert again.periodics() == [later]


def test_audit_rows_are_numbered_as_they_come_and_are_there_after_a_restart(place: Place):
    store = place.store()
    store.open()
    store.commit([SaveAudit(entry(1)), *new(1), SaveAudit(entry(2, who="bob", code="CONFLICT", target="7"))])
    store.close()
    again = place.store()
    again.open()
    newest, oldest = again.audit(AuditQuery())
    assert newest == entry(2, who="bob", code="CONFLICT", target="7", seq=2)
    assert oldest == entry(1, seq=1)


def test_the_audit_is_found_by_who_what_target_and_time(store: Store):
    store.commit([
        SaveAudit(entry(1, target="7")),
        SaveAudit(entry(2, who="bob", verb="nodes.change", target="n1")),
        SaveAudit(entry(3, verb="jobs.hold", target="7")),
        SaveAudit(entry(4, verb="arrays.cancel", target="8")),
    ])  # fmt: skip

    def found(**query) -> list[int]:
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


def test_the_oldest_rows_of_the_audit_are_forgotten_and_no_number_is_given_twice(store: Store):
    store.commit([SaveAudit(entry(number)) for number in range(1, 6)])
    assert store.prune_audit(before_ms=NOW_MS + 4, limit=2) == 2
    assert store.prune_audit(before_ms=NOW_MS + 4) == 1
    assert store.prune_audit(before_ms=NOW_MS + 4) == 0
    assert store.prune_audit(before_ms=NOW_MS + 100) == 2
    store.commit([SaveAudit(entry(9))])
    assert [row.seq for row in store.audit(AuditQuery())] == [6]


def test_a_range_of_jobs_is_counted_by_state(store: Store):
    store.commit([*new(1, 2, 3), SaveJob(a_job(4, state="running"), new=True), *new(5)])
    assert store.states_between(2, 4) == {"pending": 2, "running": 1}
    assert store.states_between(9, 10) == {}
