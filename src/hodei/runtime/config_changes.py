"""Changes of the scheduling configuration at run time: from the file, from a caller, or back to an earlier one.

A change is checked completely first. It reaches the controller as a fact, and the store in the same commit. After a
restart the last change applies, unless the file was edited since; then the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec

from hodei.control.controller import Controller
from hodei.control.explain.whatif import Question
from hodei.model.config import (
    Config,
    ConfigChange,
    ConfigDifference,
    ConfigOrigin,
    ConfigVersion,
    SchedulingConfig,
    config_differences,
    config_fingerprint,
    imported_code,
    restart_differences,
    version_to_restore,
)
from hodei.model.effects import SaveValue
from hodei.model.errors import Conflict, HodeiError, InvalidInput, NotFound
from hodei.model.facts import Fact, HistoryRestored, Reconfigured
from hodei.ports import Store

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.config_changes")
_NOTE = "configurations"
_MAX_HISTORY = 20


def load_history(store: Store) -> tuple[ConfigVersion, ...]:
    """The stored history; empty if it cannot be read."""
    text = store.note(_NOTE)
    try:
        return msgspec.json.decode(text, type=tuple[ConfigVersion, ...]) if text else ()
    except msgspec.MsgspecError as error:
        log.error("the configuration history is damaged and set aside, a new one begins: %s", error)
        store.mark_suspect("note", _NOTE, str(error))
        return ()


def resolve_history(
    store: Store, file: SchedulingConfig, now_ms: int, check: Callable[[SchedulingConfig], object]
) -> tuple[ConfigVersion, ...]:
    """At start-up: the history, whose last entry is the active configuration."""
    history, digest = load_history(store), config_fingerprint(file)
    if store.suspects:
        store.repair(now_ms)
    if history and history[-1].file == digest:
        try:
            check(history[-1].scheduling)
            return history
        except HodeiError as error:
            log.error("the last configuration is not valid any more, the file is used: %s", error)
    number = history[-1].number + 1 if history else 1
    history = (*history, ConfigVersion(number, now_ms, "", "start", file, file=digest))[-_MAX_HISTORY:]
    store.commit([_note(history)])
    return history


def _note(history: tuple[ConfigVersion, ...]) -> SaveValue:
    return SaveValue(_NOTE, msgspec.json.encode(history).decode())


class ConfigChanges:
    """`read` reads and checks what a caller sends (see `hodei.configuration.read_config`), `reread` the configuration file;
    `check` raises InvalidInput; `started` is the content of the file at start-up."""

    def __init__(
        self,
        service: Service,
        history: tuple[ConfigVersion, ...],
        started: Config,
        read: Callable[..., tuple[Config, bool]],
        check: Callable[[SchedulingConfig], object],
        make: Callable[[SchedulingConfig], Controller],
        reread: Callable[[], Config],
    ) -> None:
        self._service, self.history, self._started = service, history, started
        self._read, self._check, self._make, self._reread = read, check, make, reread
        self._change_lock = asyncio.Lock()

    @property
    def current(self) -> ConfigVersion:
        return self.history[-1]

    def get(self, number: int) -> ConfigVersion:
        found = next((each for each in self.history if each.number == number), None)
        if found is None:
            raise NotFound(f"there is no configuration {number} in the history", hint="hodei config history")
        return found

    async def reload(self, by: str, *, dry_run: bool = False) -> ConfigChange:
        config = await asyncio.to_thread(self._reread)
        return await self._change(
            config.scheduling, by, "reload", dry_run, config, config_fingerprint(config.scheduling)
        )

    async def put(
        self, found: dict[str, Any], lines: Mapping[str, int], by: str, *, dry_run: bool = False
    ) -> ConfigChange:
        """Settings beyond scheduling are reported as needing a restart. A request must not make the server load code that
        the configuration file does not name."""
        active = Config(scheduling=self._service.scheduling)
        known_code = {*imported_code(self._started).values(), *imported_code(active).values()}
        config, full = await asyncio.to_thread(self._read, found, lines, known_code=known_code)
        return await self._change(config.scheduling, by, "set", dry_run, self._with_started(config) if full else None)

    def _with_started(self, config: Config) -> Config:
        """Sections that a sent configuration leaves out do not change."""
        default = Config()
        left_out = {
            name: getattr(self._started, name)
            for name in Config.__struct_fields__
            if name != "scheduling" and getattr(config, name) == getattr(default, name)
        }
        return msgspec.structs.replace(config, **left_out)

    async def undo(self, by: str, *, to: int = 0, dry_run: bool = False) -> ConfigChange:
        earlier = self.get(to) if to else version_to_restore(self.history)
        if earlier is None:
            hint = "hodei config history; hodei config undo --to NUMBER restores any of them"
            raise Conflict("there is no earlier configuration to restore", hint=hint)
        await asyncio.to_thread(self._check, earlier.scheduling)
        return await self._change(earlier.scheduling, by, "undo", dry_run, restores=earlier.restores or earlier.number)

    async def _change(
        self,
        scheduling: SchedulingConfig,
        by: str,
        how: ConfigOrigin,
        dry_run: bool,
        config: Config | None = None,
        file: str = "",
        restores: int = 0,
    ) -> ConfigChange:
        service = self._service
        async with self._change_lock:
            changes = config_differences(service.scheduling, scheduling)
            later = self._needs_restart(scheduling, config)
            if dry_run or not changes:
                effect = await service.forecasts.what_if(Question(), scheduling, make=self._make) if changes else None
                notes = () if changes else ("no scheduling setting is different",)
                return ConfigChange(False, self.current.number, changes, later, effect, notes, restores)
            entry = ConfigVersion(
                self.current.number + 1, service.clock.now_ms(), by, how, scheduling, restores,
                file or self.current.file,
            )  # fmt: skip
            history = (*self.history, entry)[-_MAX_HISTORY:]
            facts: list[Fact] = [Reconfigured(scheduling, entry.number, how, by=by)]
            source = scheduling.estimates.source
            if source != "user" and source != service.scheduling.estimates.source:
                facts.append(HistoryRestored(await service.read(service.run_history)))
            await service.loop.commit(facts, [_note(history)], wait_for_store=True)
            self.history = history
            service.scheduling, service.profiles = scheduling, tuple(sorted(service.controller.engine.profiles))
            log.info("configuration %d (%s by %s) is active: %d changes", entry.number, how, by, len(changes))
            kept = "it is kept in the store and applies until the configuration file is edited; the file is unchanged"
            notes = () if how == "reload" else (kept,)
            return ConfigChange(True, entry.number, changes, later, notes=notes, restores=restores)

    def _needs_restart(self, scheduling: SchedulingConfig, config: Config | None) -> tuple[ConfigDifference, ...]:
        """Changed settings beyond scheduling, which apply after a restart."""
        if config is not None:
            return restart_differences(self._started, config)
        return restart_differences(Config(scheduling=self._started.scheduling), Config(scheduling=scheduling))


def no_config_file() -> Config:
    raise InvalidInput("this server was started without a configuration file", hint="hodei config set FILE")
