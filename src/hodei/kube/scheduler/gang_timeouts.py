"""How long gangs may wait, where somebody says it (`scheduleTimeoutSeconds`, `pod-group-timeout`): the time runs from the first
pod that waits until enough are bound. A gang whose time is up lets go of all that is kept for it, steps aside for a
moment, says so, and begins anew."""

from __future__ import annotations

from msgspec import Struct, structs

from hodei.kube.scheduler.entries import GroupKey
from hodei.kube.scheduler.gangs import Group
from hodei.model.decision import Reason

_PAUSE_MS, _LONGEST_PAUSE_MS = 1000, 10_000


class _Clock(Struct):
    timeout_ms: int
    ends_ms: int
    aside_until_ms: int = 0
    told: str = ""
    tries: int = 0


class GangTimeouts:
    def __init__(self) -> None:
        self._clocks: dict[GroupKey, _Clock] = {}

    def judge(
        self, key: GroupKey, group: Group | None, there: int, lacking: Reason | None, now_ms: int
    ) -> Reason | None:
        """What a gang is to be told of which so many are bound or done: that its time was up, while it stands aside or is
        not all there (`lacking`); None if nothing."""
        if group is None or not group.timed or not group.timeout_ms or there >= group.min_count:
            self.settled(key)
            return None
        self.waits(key, group.timeout_ms, now_ms)
        told = self.told(key)
        if lacking is not None and lacking.code == "GANG_INCOMPLETE" and told:
            return structs.replace(lacking, text=f"{lacking.text}; {told}")
        return Reason("gang", "GANG_TIMEOUT", told) if self.aside(key) else None

    def waits(self, key: GroupKey, timeout_ms: int, now_ms: int) -> None:
        """It waits, since now if it did not before."""
        clock = self._clocks.get(key)
        if clock is None or clock.timeout_ms != timeout_ms:
            self._clocks[key] = _Clock(timeout_ms, now_ms + timeout_ms)

    def settled(self, key: GroupKey) -> None:
        """Enough are bound, or nobody is left."""
        self._clocks.pop(key, None)

    def run_out(self, now_ms: int) -> tuple[list[tuple[GroupKey, str]], list[GroupKey]]:
        """Those whose time is up, with what they are to be told; and those whose moment aside is over."""
        late, back = [], []
        for key, clock in self._clocks.items():
            if clock.ends_ms <= now_ms:
                pause_ms = min(_PAUSE_MS << min(clock.tries, 10), _LONGEST_PAUSE_MS)
                clock.tries += 1
                clock.aside_until_ms = now_ms + pause_ms
                clock.ends_ms = clock.aside_until_ms + clock.timeout_ms
                clock.told = f'pod group "{key[2]}" rejected due to timeout after waiting {clock.timeout_ms / 1000:g}s'
                late.append((key, clock.told))
            elif clock.aside_until_ms and clock.aside_until_ms <= now_ms:
                clock.aside_until_ms = 0
                back.append(key)
        return late, back

    def aside(self, key: GroupKey) -> bool:
        clock = self._clocks.get(key)
        return clock is not None and clock.aside_until_ms > 0

    def told(self, key: GroupKey) -> str:
        """What it was told when its time was up last; "" if it never was."""
        clock = self._clocks.get(key)
        return clock.told if clock is not None else ""

    def next_ms(self) -> int | None:
        return min((clock.aside_until_ms or clock.ends_ms for clock in self._clocks.values()), default=None)
