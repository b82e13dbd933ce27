"""The ledger conserves use: in whatever order facts come, whenever it is read, folded or restored."""

from __future__ import annotations

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from hodei.control.accounting.ledger import Ledger

MINUTE = 60_000
# Small buckets, so that many are crossed, folded and forgotten in a short story.
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


def events_of(story):
    for number, (path, held, (begin, end), kind) in enumerate(story):
        if kind == "charge":
            yield ("charge", path, held, begin, end)
        else:
            yield ("opened", f"{number}.0.0", path, held, begin)
        if kind == "run":
            yield ("closed", f"{number}.0.0", end)


def told(shape, events) -> Ledger:
    ledger = Ledger(**shape)
    for name, *arguments in events:
        getattr(ledger, name)(*arguments)
    return ledger


def prefixes():
    return sorted({user[:depth] for user in USERS for depth in range(4)})


def all_usage(ledger: Ledger, now_ms: int):
    return {prefix: ledger.exact_usage(prefix, now_ms) for prefix in prefixes()}


@given(shapes, runs, st.data())
def test_the_same_facts_in_any_order_give_the_same_use_whenever_it_is_looked_at(shape, story, data):
    events = list(events_of(story))
    shuffled = data.draw(st.permutations(events))
    one, other = told(shape, events), Ledger(**shape)
    for name, *arguments in shuffled:
        getattr(other, name)(*arguments)
        if data.draw(st.booleans()):
            other.usage(data.draw(st.sampled_from(prefixes())), data.draw(times))
    assert all_usage(one, END) == all_usage(other, END)
    assert one.rows() == other.rows()


@given(shapes, runs, st.data())
def test_folding_early_or_late_makes_no_difference_in_the_end(shape, story, data):
    # Ends come after beginnings here, however late: an end without a beginning is not remembered for ever.
    events = list(events_of(story))
    beginnings = data.draw(st.permutations([event for event in events if event[0] == "opened"]))
    others = data.draw(st.permutations([event for event in events if event[0] != "opened"]))
    one, other, now_ms = told(shape, events), Ledger(**shape), 0
    for name, *arguments in [*beginnings, *others]:
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
def test_what_users_used_is_what_their_project_and_their_organisation_used(shape, story, wait, folded):
    ledger, now_ms = told(shape, events_of(story)), END + wait
    if folded:
        ledger.fold(now_ms)
    use = all_usage(ledger, now_ms)
    for prefix in prefixes():
        if len(prefix) < 3:
            below = [use[path] for path in use if len(path) == len(prefix) + 1 and path[:-1] == prefix]
            for name in ("cpu", "gpu", "memory"):
                parts = sum((part.get(name, Fraction(0)) for part in below), Fraction(0))
                assert use[prefix].get(name, 0) == parts
    charged = {
        name: sum(
            held.get(name, 0) * ((now_ms if kind == "open" else end) - begin) for _, held, (begin, end), kind in story
        )
        for name in ("cpu", "gpu", "memory")
    }
    since_ever = ledger.used_since((), 0, now_ms)
    assert {name: since_ever.get(name, 0) for name in charged} == charged


@given(runs, times, st.integers(1, 3))
def test_use_halves_after_a_half_life_whatever_was_used(story, wait, halvings):
    ended = [run for run in story if run[3] != "open"]
    ledger, now_ms = told(SHAPES[0], events_of(ended)), END + wait
    before = all_usage(ledger, now_ms)
    after = all_usage(ledger, now_ms + halvings * SHAPES[0]["half_life_ms"])
    assert after == {
        path: {name: amount / 2**halvings for name, amount in use.items()} for path, use in before.items()
    }  # fmt: skip


@given(shapes, runs, times, st.booleans())
def test_what_was_restored_is_what_was_saved(shape, story, wait, folded):
    ledger, now_ms = told(shape, events_of(story)), END + wait
    if folded:
        ledger.fold(now_ms)
    copy = Ledger(**shape)
    copy.restore(ledger.rows())
    # Runs that are still open are told again by whoever restores.
    for event in events_of(story):
        if event[0] == "opened" and ("closed", event[1]) not in {other[:2] for other in events_of(story)}:
            copy.opened(*event[1:])
    assert copy.rows() == ledger.rows()
    copy.fold(now_ms)
    ledger.fold(now_ms)
    for later in (now_ms, now_ms + 7 * MINUTE):
        assert all_usage(copy, later) == all_usage(ledger, later)
        assert copy.used_since((), 0, later) == ledger.used_since((), 0, later)


@given(shapes, runs, st.data())
def test_a_store_that_saves_what_changed_has_all_rows(shape, story, data):
    ledger, stored, now_ms = Ledger(**shape), {}, 0
    for name, *arguments in data.draw(st.permutations(list(events_of(story)))):
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
