"""What every store promises of reservations."""

from __future__ import annotations

from msgspec import structs

from builders import NOW_MS, amounts
from conformance.stores import Place, new
from hodei.model.effects import SaveReservation
from hodei.model.reservation import Reservation

NIGHTLY = Reservation(
    "nightly", "ml", NOW_MS, NOW_MS + 1000, (("n1", amounts(2, "1Gi")), ("n2", amounts(1))), "ann", NOW_MS - 5
)


def test_reservations_come_back_as_they_were_by_name_and_survive_a_restart(place: Place):
    store = place.store()
    store.open()
    demo = structs.replace(NIGHTLY, name="demo", places=())
    store.commit([SaveReservation(NIGHTLY), SaveReservation(demo), *new(1)])
    assert store.bookings() == [demo, NIGHTLY]
    store.close()
    again = place.store()
    again.open()
    assert again.bookings() == [demo, NIGHTLY]


def test_the_last_word_on_a_reservation_counts(place: Place):
    store = place.store()
    store.open()
    longer = structs.replace(NIGHTLY, end_ms=NOW_MS + 9000)
    store.commit([SaveReservation(NIGHTLY), SaveReservation(longer)])
    assert store.bookings() == [longer]
    store.commit([SaveReservation(longer, gone=True)])
    assert store.bookings() == []
    store.commit([SaveReservation(longer, gone=True)])  # forgotten twice is forgotten
    store.commit([SaveReservation(NIGHTLY, gone=True), SaveReservation(NIGHTLY)])
    assert store.bookings() == [NIGHTLY]
