"""The ledger conserves usage, in whatever order facts arrive and whenever it is read, folded or restored."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from hodei.control.accounting.ledger import Ledger

MINUTE = 60_000
# Small buckets, so that a short history crosses, folds and drops many of them.
SHAPES = (
    {"half_life_ms": 10 * MINUTE, "bucket_ms": MINUTE, "folds": 5, "keep_ms": 60 * MINUTE},
    {"window_ms": 15 * MINUTE, "bucket_ms": MINUTE, "folds": 5, "keep_ms": 600 * MINUTE},
)
USERS = [(org, project, user) for org in ("o", "p") for project in ("x", "y") for user in ("ann", "bob")]
END = 120 * MINUTE

times = st.integers(0, END)
spans = st.tuples(times, times).map(sorted)
amounts = st.dictionaries(st.sampled_from(("cpu", "gpu", "memory")), st.integers(0, 10**12), min_size=1)
runs = st.lists(
    st.tuples(st.sampled_from(USERS), amounts, spans, st.sampled_from(("charge", "run", "open"))), max_size=12
)
shapes = st.sampled_from(SHAPES)


def events_of(history):
    for number, (path, held, (begin, end), kind) in enumerate(history):
        if kind == "charge":
            yield ("charge", path, held, begin, end)
        else:
            yield ("opened", f"{number}.0.0", path, held, begin)
        if kind == "run":
            yield ("closed", f"{number}.0.0", end)


def ledger_after(shape, events) -> Ledger:
    ledger = Ledger(**shape)
    for name, *arguments in events:
        getattr(ledger, name)(*arguments)
    return ledger


def prefixes():
    return sorted({user[:depth] for user in USERS for depth in range(4)})


def all_usage(ledger: Ledger, now_ms: int):
    return {prefix: ledger.exact_usage(prefix, now_ms) for prefix in prefixes()}


@given(shapes, runs, st.data())
def test_the_same_facts_in_any_order_give_the_same_usage(shape, history, data):
    events = list(events_of(history))
    shuffled = data.draw(st.permutations(events))
    one, other = ledger_after(shape, events), Ledger(**shape)
    for name, *arguments in shuffled:
        getattr(other, name)(*arguments)
        if data.draw(st.booleans()):
            other.usage(data.draw(st.sampled_from(prefixes())), data.draw(times))
    assert all_usage(one, END) == all_usage(other, END)
    assert one.rows() == other.rows()


@given(shapes, runs, st.data())
def test_the_time_of_folding_makes_no_difference(shape, history, data):
    # Ends come after starts here: an end without a start is not remembered forever.
    events = list(events_of(history))
    starts = data.draw(st.permutations([event for event in events if event[0] == "opened"]))
    others = data.draw(st.permutations([event for event in events if event[0] != "opened"]))
    one, other, now_ms = ledger_after(shape, events), Ledger(**shape), 0
    for name, *arguments in [*starts, *others]:
        now_ms = max(now_ms, data.draw(times))
        other.fold(now_ms, at_most=data.draw(st.integers(1, 5)))
        getattr(other, name)(*arguments)
    for ledger in (one, other):
        while ledger.fold(END):
            pass
    assert all_usage(one, END) == all_usage(other, END)
    assert one.rows() == other.rows()
    assert one.used_since((), 0, END) == other.used_since((), 0, END)


@given(shapes, runs, times, st.booleans())
def test_the_usage_of_an_account_is_the_sum_of_its_children(shape, history, wait, folded):
    ledger, now_ms = ledger_after(shape, events_of(history)), END + wait
    if folded:
        ledger.fold(now_ms)
    usage = all_usage(ledger, now_ms)
    for prefix in prefixes():
        if len(prefix) < 3:
            below = [usage[path] for path in usage if len(path) == len(prefix) + 1 and path[:-1] == prefix]
            for name in ("cpu", "gpu", "memory"):
                parts = sum((part.get(name, Fraction(0)) for part in below), Fraction(0))
                assert usage[prefix].get(name, 0) == parts
    charged = {
        name: sum(
            held.get(name, 0) * ((now_ms if kind == "open" else end) - begin) for _, held, (begin, end), kind in history
        )
        for name in ("cpu", "gpu", "memory")
    }
    total = ledger.used_since((), 0, now_ms)
    assert {name: total.get(name, 0) for name in charged} == charged


@given(runs, times, st.integers(1, 3))
def test_any_usage_halves_after_a_half_life(history, wait, halvings):
    ended = [run for run in history if run[3] != "open"]
    ledger, now_ms = ledger_after(SHAPES[0], events_of(ended)), END + wait
    before = all_usage(ledger, now_ms)
    after = all_usage(ledger, now_ms + halvings * SHAPES[0]["half_life_ms"])
    assert after == {
        path: {name: amount / 2**halvings for name, amount in usage.items()} for path, usage in before.items()
    }  # fmt: skip


@given(shapes, runs, times, st.booleans())
def test_a_restored_ledger_equals_the_saved_one(shape, history, wait, folded):
    ledger, now_ms = ledger_after(shape, events_of(history)), END + wait
    if folded:
        ledger.fold(now_ms)
    copy = Ledger(**shape)
    copy.restore(ledger.rows())
    # Open runs are reported again after a restore.
    for event in events_of(history):
        if event[0] == "opened" and ("closed", event[1]) not in {other[:2] for other in events_of(history)}:
            copy.opened(*event[1:])
    assert copy.rows() == ledger.rows()
    copy.fold(now_ms)
    ledger.fold(now_ms)
    for later in (now_ms, now_ms + 7 * MINUTE):
        assert all_usage(copy, later) == all_usage(ledger, later)
        assert copy.used_since((), 0, later) == ledger.used_since((), 0, later)


@given(shapes, runs, st.data())
def test_saving_dirty_rows_keeps_all_rows_in_the_store(shape, history, data):
    ledger, stored, now_ms = Ledger(**shape), {}, 0
    for name, *arguments in data.draw(st.permutations(list(events_of(history)))):
        getattr(ledger, name)(*arguments)
        if data.draw(st.booleans()):
            now_ms = max(now_ms, data.draw(times))
            ledger.fold(now_ms, at_most=2)
        if data.draw(st.booleans()):
            stored |= {(row.path, row.resource, row.start_ms): row for row in ledger.take_dirty()}
    while ledger.fold(now_ms):
        pass
    stored |= {(row.path, row.resource, row.start_ms): row for row in ledger.take_dirty()}
    assert sorted(
        (row for row in stored.values() if row.amount), key=lambda row: (row.path, row.resource, row.start_ms)
    ) == [row for row in ledger.rows() if row.amount]  # fmt: skip
