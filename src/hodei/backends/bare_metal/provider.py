"""The state of all machines, from their BMCs. Each BMC is read on its own: one that is away holds up no other, and its
machine keeps its last state, also after a restart of the server.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hodei.backends.bare_metal.bmc import Bmc, BmcError, Reading
from hodei.backends.bare_metal.settings import MachineSettings, capacity_of
from hodei.backends.remote.machines import Join, Machine
from hodei.model.errors import IN_DOUBT, NOT_REACHED, BackendError, BackendRefused
from hodei.model.ids import NodeName
from hodei.model.node import Location
from hodei.model.resources import format_time, parse_duration_ms
from hodei.process import cancel_tasks

log = logging.getLogger("hodei.bare_metal")
MAX_THREADS = 64
# A BMC may report "off" for so long after it has accepted an order to switch on.
POWER_ON_S = 60.0
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 0.5, 5.0


class _Member:
    """One machine. `reading`: the last one, maybe of an earlier server. `away_ms`: since when its BMC does not answer."""

    def __init__(self, settings: MachineSettings, bmc: Bmc, reading: Reading | None) -> None:
        self.settings, self.bmc, self.reading = settings, bmc, reading
        self.away_ms, self.problem = 0, ""
        self.ordered_s = 0.0  # when it was ordered on; 0: it has been on since, or was not
        self.refreshing: asyncio.Task[None] | None = None
        self.stopping: asyncio.Task[None] | None = None
        self.busy: asyncio.Future[Any] | None = None
        self.lock = asyncio.Lock()

    @property
    def name(self) -> NodeName:
        return self.settings.name

    @property
    def is_stopping(self) -> bool:
        return self.stopping is not None and not self.stopping.done()

    @property
    def away(self) -> str:
        return f"its BMC has been out of reach since {format_time(self.away_ms)}: {self.problem}"


class BmcProvider:
    """`MachineProvider` over BMCs."""

    def __init__(
        self,
        machines: Iterable[tuple[MachineSettings, Bmc]],
        *,
        timeout_s: float,
        now_ms: Callable[[], int],
        state_file: Path,
    ) -> None:
        self._timeout_s, self._now_ms, self._file = 2 * timeout_s, now_ms, state_file
        known = _load(state_file)
        self._members = {each.name: _Member(each, bmc, known.get(each.name)) for each, bmc in machines}
        self._threads: ThreadPoolExecutor | None = None

    @property
    def watts(self) -> dict[NodeName, int]:
        """The power draw of each machine whose BMC tells."""
        members = self._members.values()
        return {m.name: m.reading.watts for m in members if m.reading and m.reading.watts and not m.away_ms}

    async def close(self) -> None:
        """What is being switched off is continued by the next server, which orders it again."""
        members = self._members.values()
        tasks = [task for m in members for task in (m.refreshing, m.stopping) if task is not None]
        await cancel_tasks(tasks)
        if self._threads is not None:
            self._threads.shutdown(wait=False, cancel_futures=True)
            self._threads = None

    async def machines(self) -> list[Machine]:
        members = list(self._members.values())
        for member in members:
            if member.refreshing is None or member.refreshing.done():
                member.refreshing = asyncio.create_task(self._refresh(member))
        # Those that are away are not waited for.
        waited = {member.refreshing for member in members if member.refreshing is not None and not member.away_ms}
        if waited:
            await asyncio.wait(waited, timeout=self._timeout_s)
        return [self._machine(member) for member in members]

    async def start(self, joins: Mapping[NodeName, Join]) -> dict[NodeName, BackendError | BackendRefused]:
        answers = await asyncio.gather(*(self._start(self._members[name]) for name in joins))
        return {name: answer for name, answer in zip(joins, answers, strict=True) if answer is not None}

    async def stop(self, names: Sequence[NodeName]) -> None:
        for name in names:
            member = self._members[name]
            if not member.is_stopping:
                member.ordered_s = 0.0
                member.stopping = asyncio.create_task(self._stop(member), name=f"switch off {name}")

    async def _start(self, member: _Member) -> BackendError | BackendRefused | None:
        if member.is_stopping:
            return BackendError(f"{member.name} is being switched off", code=NOT_REACHED)
        try:
            reading = await self._read(member)
        except BmcError as error:
            # Of this machine alone: others of its group can be started.
            return BackendRefused(f"{member.name} was not started, its BMC cannot be reached: {error}")
        if reading.power == "stopping":
            return BackendError(f"{member.name} is being switched off", code=NOT_REACHED)
        if reading.power == "off":
            try:
                await self._call(member, member.bmc.power_on)
            except BmcError as error:
                text = f"{member.name} was not switched on: {error}"
                return BackendError(text, code=IN_DOUBT) if error.in_doubt else BackendRefused(text)
            member.ordered_s = asyncio.get_running_loop().time()
        return None

    async def _stop(self, member: _Member) -> None:
        """Until it is off: the operating system is asked, then the power is cut."""
        loop = asyncio.get_running_loop()
        ends_s = loop.time() + parse_duration_ms(str(member.settings.shutdown_timeout)) / 1000
        asked, pause_s = False, _SHORTEST_PAUSE_S
        while True:
            try:
                if (await self._read(member)).power == "off":
                    return
                if loop.time() >= ends_s:
                    log.warning("%s has not shut down in time: its power is cut", member.name)
                    await self._call(member, member.bmc.power_off)
                elif not asked:
                    asked = True
                    await self._shut_down(member)
            except BmcError:
                pass  # the machine is stopped when its BMC is back
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 2, _LONGEST_PAUSE_S)

    async def _shut_down(self, member: _Member) -> None:
        try:
            await self._call(member, member.bmc.shut_down)
        except BmcError as error:
            log.warning("%s cannot be shut down: %s; its power is cut", member.name, error)
            await self._call(member, member.bmc.power_off)

    async def _refresh(self, member: _Member) -> None:
        try:
            await self._read(member)
        except BmcError:
            pass  # noted in the member

    async def _read(self, member: _Member) -> Reading:
        try:
            reading: Reading = await self._call(member, member.bmc.read)
        except BmcError as error:
            if not member.away_ms:
                member.away_ms = self._now_ms()
                log.warning("the BMC of %s does not answer: %s", member.name, error)
            member.problem = str(error)
            raise
        if member.away_ms:
            log.warning("the BMC of %s answers again", member.name)
        member.away_ms, member.problem = 0, ""
        before, member.reading = member.reading, reading
        if reading.power == "on":
            member.ordered_s = 0.0
        if before is None or (before.power, before.capacity) != (reading.power, reading.capacity):
            self._save()
        return reading

    async def _call(self, member: _Member, work: Callable[[], Any]) -> Any:
        """In a thread, one at a time for each BMC. BmcError also after a timeout; the thread then ends on its own."""
        async with member.lock:
            if member.busy is not None and not member.busy.done():
                await asyncio.wait({member.busy}, timeout=self._timeout_s)
                if not member.busy.done():
                    raise BmcError("it has not answered an earlier request")
            if self._threads is None:
                count = max(1, min(MAX_THREADS, len(self._members)))
                self._threads = ThreadPoolExecutor(count, thread_name_prefix="bmc")
            member.busy = asyncio.get_running_loop().run_in_executor(self._threads, work)
            await asyncio.wait({member.busy}, timeout=self._timeout_s)
            if not member.busy.done():
                member.busy.add_done_callback(_ignore)
                raise BmcError(f"no answer within {self._timeout_s:g} s", in_doubt=True)
            return member.busy.result()

    def _machine(self, member: _Member) -> Machine:
        settings, reading = member.settings, member.reading
        power, progress, problem = reading.power if reading else "off", reading.progress if reading else "", ""
        waiting_s = asyncio.get_running_loop().time() - member.ordered_s
        if member.is_stopping:
            power, progress = "stopping", ""
        elif power == "off" and member.ordered_s and waiting_s < POWER_ON_S:
            power, progress = "starting", "it was switched on"
        if member.away_ms:
            problem = member.away if power == "off" else ""
            progress = member.away
        elif power == "on":
            progress = f"{progress or 'it is on'}; its agent has not connected yet"
        return Machine(
            name=settings.name,
            state=power,
            group=str(settings.group),
            capacity=(reading.capacity if reading else {}) | capacity_of(settings),
            labels=settings.labels,
            arch=settings.arch,
            gpu_type=settings.gpu_type,
            location=Location(settings.region, settings.zone, settings.datacenter, settings.rack),
            startup_ms=parse_duration_ms(str(settings.startup)),
            cost_milli=round(settings.price * 1000),
            progress=progress,
            problem=problem,
        )

    def _save(self) -> None:
        """So that a machine whose BMC is away when the server starts does not look as if it were off."""
        known = {m.name: {"power": m.reading.power, "capacity": m.reading.capacity}
                 for m in self._members.values() if m.reading is not None}  # fmt: skip
        try:
            self._file.parent.mkdir(parents=True, exist_ok=True)
            part = self._file.with_suffix(".part")
            part.write_text(json.dumps(known))
            os.replace(part, self._file)
        except OSError as error:
            log.warning("the states of the machines cannot be saved: %s", error)


def _load(file: Path) -> dict[NodeName, Reading]:
    try:
        known = json.loads(file.read_text())
        return {name: Reading(each["power"], capacity=each["capacity"]) for name, each in known.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        log.warning("the states of the machines cannot be read: %s", error)
        return {}


def _ignore(done: asyncio.Future[Any] | Coroutine[Any, Any, Any]) -> None:
    """The outcome of a request that was given up, so that it is not reported as never retrieved."""
    if isinstance(done, asyncio.Future) and not done.cancelled():
        done.exception()
