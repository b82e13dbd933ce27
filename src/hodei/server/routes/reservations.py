"""Reservations: capacity for a project and a window of time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from hodei.api.resources import (
    ReservationList,
    ReservationRequest,
    ReservationView,
    parse_reservation,
    reservation_view,
)
from hodei.server.route import ADMIN, API, READ, Call, Param, Route

if TYPE_CHECKING:
    from hodei.runtime.service import ReservationStatus

_NAME = Param("name", "the reservation's name", where="path", maximum=63)
_request = msgspec.json.Decoder(ReservationRequest)


async def reserve(call: Call) -> ReservationView:
    wish = parse_reservation(_request.decode(call.body), call.shared.now_ms(), call.who.name)
    return _view(await call.service.reserve(wish))


async def list_reservations(call: Call) -> ReservationList:
    return ReservationList([_view(status) for status in call.service.reservations()])


async def show_reservation(call: Call) -> ReservationView:
    return _view(call.service.reservation(call.args["name"]))


async def delete_reservation(call: Call) -> ReservationView:
    return _view(await call.service.unreserve(call.args["name"], call.who.name))


def _view(status: ReservationStatus) -> ReservationView:
    return reservation_view(status.reservation, status.active, status.late)


ROUTES = (
    Route("POST", f"{API}/reservations", ADMIN, "Reserve capacity for a project and a window of time", reserve,
          request=ReservationRequest, response=ReservationView, status=201),
    Route("GET", f"{API}/reservations", READ, "Every reservation that is not over, the soonest first",
          list_reservations, response=ReservationList),
    Route("GET", f"{API}/reservations/{{name}}", READ, "One reservation", show_reservation,
          response=ReservationView, params=(_NAME,)),
    Route("DELETE", f"{API}/reservations/{{name}}", ADMIN, "Give a reservation up; what runs goes on",
          delete_reservation, response=ReservationView, params=(_NAME,)),
)  # fmt: skip
