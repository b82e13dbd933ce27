"""Other settings for a running server: from its file, from a caller, or back to earlier ones. Checked in full before anything
changes; told to the controller as a fact, and kept in the store in the same commit.

Which configuration counts after a restart: the last one set here, unless the file has changed since; then the file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

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
    imported_plugins,
    restart_differences,
    version_to_restore,
)
from hodei.model.effects import SaveValue
from hodei.model.errors import Conflict, HodeiError, InvalidInput, NotFound
from hodei.model.facts import Fact, HistoryRestored, Reconfigured
from hodei.ports import Store

if TYPE_CHECKING:
    from hodei.runtime.service import Service

log = logging.getLogger("hodei.configuring")
_NOTE = "configurations"
_KEPT = 20


def recall(store: Store) -> tuple[ConfigVersion, ...]:
    """The history that the store remembers; none if it cannot be read."""
    text = store.note(_NOTE)
    try:
        return msgspec.json.decode(text, type=tuple[ConfigVersion, ...]) if text else ()
    except msgspec.MsgspecError as error:
        log.error("the history of configurations cannot be read, is set aside and begins anew: %s", error)
        store.mark_suspect("note", _NOTE, str(error))
        return ()


def settle(
    store: Store, file: SchedulingConfig, now_ms: int, usable: Callable[[SchedulingConfig], object]
) -> tuple[ConfigVersion, ...]:
    """At start-up: the history with the configuration that counts as its last."""
    history, said = recall(store), config_fingerprint(file)
    if store.suspects:
        store.repair(now_ms)
    if history and history[-1].file == said:
        try:
            usable(history[-1].scheduling)
            return history
        except HodeiError as error:
            log.error("the configuration last set cannot be used any more, the file counts: %s", error)
    number = history[-1].number + 1 if history else 1
    history = (*history, ConfigVersion(number, now_ms, "", "start", file, file=said))[-_KEPT:]
    store.commit([_note(history)])
    return history


def _note(history: tuple[ConfigVersion, ...]) -> SaveValue:
    return SaveValue(_NOTE, msgspec.json.encode(history).decode())


class ConfigChanges:
    """`check` raises InvalidInput with everything that is wrong; `reread` reads the server's own file again; `started`
    is what the file said when the server came up."""

    def __init__(
        self,
        service: Service,
        history: tuple[ConfigVersion, ...],
        started: Config,
        check: Callable[[SchedulingConfig], None],
        make: Callable[[SchedulingConfig], Controller],
        reread: Callable[[], Config],
    ) -> None:
        self._service, self.history, self._started = service, history, started
        self._check, self._make, self._reread = check, make, reread
        self._one_at_a_time = asyncio.Lock()

    @property
    def current(self) -> ConfigVersion:
        return self.history[-1]

    def numbered(self, number: int) -> ConfigVersion:
        found = next((each for each in self.history if each.number == number), None)
        if found is None:
            raise NotFound(f"there is no configuration {number} any more", hint="hodei config history")
        return found

    async def reload(self, by: str, *, dry_run: bool = False) -> ConfigChange:
        """What the file says now."""
        config = await asyncio.to_thread(self._reread)
        return await self._change(
            config.scheduling, by, "reload", dry_run, config, config_fingerprint(config.scheduling)
        )

    async def put(self, config: Config, by: str, *, whole: bool, dry_run: bool = False) -> ConfigChange:
        """What a caller says. `whole`: it has settings beyond scheduling, of which it is told that they do not count."""
        self._refuse_new_code(config.scheduling)
        return await self._change(config.scheduling, by, "set", dry_run, config if whole else None)

    def _refuse_new_code(self, scheduling: SchedulingConfig) -> None:
        """Over the network nobody makes the server load code that its operator has not named in the file."""
        known = imported_plugins(self._started.scheduling) | imported_plugins(self._service.scheduling)
        new = sorted(imported_plugins(scheduling) - known)
        if new:
            raise InvalidInput(
                f"plugin {new[0][:80]!r} is a path to code that the server's own file does not name",
                hint="add it to the configuration file, then: hodei reload",
            )

    async def undo(self, by: str, *, to: int = 0, dry_run: bool = False) -> ConfigChange:
        earlier = self.numbered(to) if to else version_to_restore(self.history)
        if earlier is None:
            raise Conflict("there is no earlier configuration to go back to", hint="hodei config history")
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
        await asyncio.to_thread(self._check, scheduling)
        async with self._one_at_a_time:
            changes = config_differences(service.scheduling, scheduling)
            later = self._later(scheduling, config)
            if dry_run or not changes:
                effect = await service.foresight.what_if(Question(), scheduling, make=self._make) if changes else None
                notes = () if changes else ("no setting that decisions depend on is different",)
                return ConfigChange(False, self.current.number, changes, later, effect, notes)
            entry = ConfigVersion(
                self.current.number + 1, service.clock.now_ms(), by, how, scheduling, restores,
                file or self.current.file,
            )  # fmt: skip
            history = (*self.history, entry)[-_KEPT:]
            facts: list[Fact] = [Reconfigured(scheduling, entry.number, how, by=by)]
            learned = scheduling.estimates.source
            if learned != "user" and learned != service.scheduling.estimates.source:
                facts.append(HistoryRestored(await service.read(service._history)))
            await service.loop.committed(facts, [_note(history)], patient=True)
            self.history = history
            service.scheduling, service.profiles = scheduling, tuple(sorted(service.controller.engine.profiles))
            log.info("configuration %d (%s by %s) is in force: %d changes", entry.number, how, by, len(changes))
            return ConfigChange(True, entry.number, changes, later, notes=self._notes(how))

    def _later(self, scheduling: SchedulingConfig, config: Config | None) -> tuple[ConfigDifference, ...]:
        """What a restart is needed for: all of the file, or of what was handed in, beyond what decisions depend on."""
        if config is not None:
            return restart_differences(self._started, config)
        return restart_differences(Config(scheduling=self._started.scheduling), Config(scheduling=scheduling))

    def _notes(self, how: ConfigOrigin) -> tuple[str, ...]:
        if how == "reload":
            return ()
        return ("it is kept in the store and counts until the configuration file is changed; the file is as it was",)


def refuse_unreadable() -> Config:
    raise InvalidInput("this server was started without a configuration file", hint="hodei config set FILE")
