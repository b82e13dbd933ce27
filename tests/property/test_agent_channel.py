"""The channel between a joined agent and its server: exchanges may be lost, repeated and reordered, messages never."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from hodei.agent.channel import Batch, Channel

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["say", "emit", "emit without messages", "deliver", "deliver and keep", "lose"]),
        st.integers(0, 1),
        st.integers(0, 20),
    ),
    max_size=120,
)


@dataclass
class Side:
    channel: Channel = field(default_factory=Channel)
    said: list[str] = field(default_factory=list)
    heard: list[str] = field(default_factory=list)
    in_flight: list[Batch] = field(default_factory=list)  # towards this side


def step(sides: tuple[Side, Side], what: str, at: int, number: int) -> None:
    here, there = sides[at], sides[1 - at]
    if what == "say":
        text = f"{at}.{len(here.said)}"
        here.said.append(text)
        here.channel.send(text)
    elif what.startswith("emit"):
        there.in_flight.append(here.channel.batch(with_messages=what == "emit"))
    elif here.in_flight:
        place = number % len(here.in_flight)
        batch = here.in_flight[place] if what == "deliver and keep" else here.in_flight.pop(place)
        if what != "lose":
            here.heard += here.channel.receive(batch)


@given(steps=STEPS)
@settings(deadline=None)
def test_every_message_arrives_once_and_in_order(steps: list[Any]) -> None:
    sides = Side(), Side()
    for what, at, number in steps:
        step(sides, what, at, number)
        for here, there in (sides, sides[::-1]):
            assert here.heard == there.said[: len(here.heard)]
    for at in (0, 1, 0, 1):  # in the end exchanges arrive, also the old ones
        step(sides, "emit", at, 0)
        while sides[1 - at].in_flight:
            step(sides, "deliver", 1 - at, 0)
    for here, there in (sides, sides[::-1]):
        assert here.heard == there.said
        assert not here.channel.pending
