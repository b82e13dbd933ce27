"""What every store promises of what accounts have used."""

from __future__ import annotations

import random

import pytest
from msgspec import structs

from builders import NOW_MS
from conformance.stores import Place, new
from hodei.model.effects import SaveUsage
from hodei.model.usage import UsageRow
from hodei.ports import Store

HOUR = 3_600_000
ROW = UsageRow(("science", "physics", "ann"), "cpu", NOW_MS // HOUR * HOUR, HOUR, 7_200_000_000)


def saved(*rows: UsageRow) -> SaveUsage:
    return SaveUsage(rows)


def test_usage_comes_back_as_it_was_and_survives_a_restart(place: Place):
    store = place.store()
    store.open()
    assert store.usage() == []
    store.commit([saved(ROW), *new(1)])
    assert store.usage() == [ROW]
    store.close()
    again = place.store()
    again.open()
    assert again.usage() == [ROW]


def test_the_last_word_on_a_row_counts(store: Store):
    store.commit([saved(ROW)])
    more = structs.replace(ROW, amount=ROW.amount + 1)
    wider = structs.replace(ROW, amount=ROW.amount + 2, width_ms=24 * HOUR)
    store.commit([saved(more)])
    assert store.usage() == [more]
    store.commit([saved(more), saved(wider)])
    assert store.usage() == [wider]


def test_a_row_of_nothing_is_gone(store: Store):
    other = structs.replace(ROW, resource="gpu")
    store.commit([saved(ROW, other)])
    store.commit([saved(structs.replace(ROW, amount=0))])
    assert store.usage() == [other]
    store.commit([saved(structs.replace(ROW, amount=0))])  # gone twice is gone
    assert store.usage() == [other]
    store.commit([saved(ROW)])
    assert store.usage() == [ROW, other]


def test_a_row_may_go_and_come_within_one_commit(store: Store):
    store.commit([saved(ROW), saved(structs.replace(ROW, amount=0)), saved(ROW)])
    assert store.usage() == [ROW]
    store.commit([saved(structs.replace(ROW, amount=5)), saved(structs.replace(ROW, amount=0))])
    assert store.usage() == []


@pytest.mark.parametrize(
    "amount", [1, 2**63 - 1, 2**63, 2**64 + 1, 10**40], ids=["one", "the largest of 64 bits", "one more", "twice", "far more"]
)  # fmt: skip
def test_amounts_beyond_64_bits_are_exact(store: Store, amount: int):
    store.commit([saved(structs.replace(ROW, amount=amount))])
    assert [row.amount for row in store.usage()] == [amount]


def test_rows_are_told_by_account_resource_and_time_however_they_came(store: Store):
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


def test_nothing_of_a_commit_that_is_refused_is_kept(store: Store):
    store.commit(new(1))
    with pytest.raises(Exception, match=r"."):
        store.commit([saved(ROW), *new(1)])
    assert store.usage() == []
