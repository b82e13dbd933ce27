"""Subscribers get events in order, after the commit; a slow one is cut off."""

from __future__ import annotations

import asyncio

from builders import an_event
from hodei.runtime.observers import EventHub


def test_every_subscriber_gets_all_events_in_order():
    async def main():
        hub = EventHub()
        one, other = hub.subscribe(), hub.subscribe()
        hub.publish([an_event(1), an_event(2)], [])
        hub.publish([an_event(3)], [])
        for reader in (one, other):
            received = []
            async for event in reader:
                received.append(event.seq)
                if event.seq == 3:
                    break
            assert received == [1, 2, 3]

    asyncio.run(main())


def test_a_subscriber_that_lags_is_cut_off():
    async def main():
        hub = EventHub()
        slow, quick = hub.subscribe(), hub.subscribe()
        received = []

        async def read():
            async for event in quick:
                received.append(event.seq)

        reading = asyncio.create_task(read())
        for first in range(0, 12_000, 1000):
            hub.publish([an_event(seq) for seq in range(first, first + 1000)], [])
            await asyncio.sleep(0)
        async with asyncio.timeout(5):
            assert [event async for event in slow] == []
            assert slow.lagged
            while len(received) < 12_000:  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert not quick.lagged
            hub.close()
            await reading

    asyncio.run(main())


def test_a_closed_subscription_ends():
    async def main():
        hub = EventHub()
        reader = hub.subscribe()
        reader.close()
        hub.publish([an_event(1)], [])
        async with asyncio.timeout(5):
            assert [event async for event in reader] == []

    asyncio.run(main())


def test_waits_for_an_end_are_resolved_once_and_cancelled_ones_removed():
    async def main():
        hub = EventHub()
        first, second, other = hub.end_of(1), hub.end_of(1), hub.end_of(2)
        hub.cancel_wait(1, second)
        hub.publish([], [1, 1, 99])
        assert first.done()
        assert not second.done()
        assert not other.done()
        hub.cancel_wait(2, other)
        hub.cancel_wait(2, other)
        hub.publish([], [2])
        assert not other.done()

    asyncio.run(main())
