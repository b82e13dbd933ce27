"""The configuration of a running server: what is in force, what was before, and how it is changed. For administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hodei.api.config import ConfigHistory, ConfigView, config_view, parse_config, read_body
from hodei.jobfile.render import iso
from hodei.model.config import SchedulingConfig
from hodei.model.configuration import ConfigChange
from hodei.model.errors import Unavailable
from hodei.server.route import ADMIN, API, Call, Param, Route

if TYPE_CHECKING:
    from hodei.runtime.config_changes import ConfigChanges

_DRY = Param("dry_run", "1: only say what would change, and who would start when", type=int, default=0, maximum=1)
_TO = Param("to", "the number of the configuration to go back to; else the one before", type=int, default=0,
            minimum=1)  # fmt: skip


def _configuring(call: Call) -> ConfigChanges:
    found = call.service.configuring
    if found is None:
        raise Unavailable("this server cannot change its configuration while it runs")
    return found


async def show(call: Call) -> ConfigView:
    current = _configuring(call).current
    return config_view(current, iso(current.at_ms))


async def history(call: Call) -> ConfigHistory:
    return ConfigHistory([config_view(each, iso(each.at_ms)) for each in reversed(_configuring(call).history)])


async def put(call: Call) -> ConfigChange:
    config, whole = parse_config(*read_body(call.body, call.content_type))
    with call.shared.what_ifs.hold(call.holder):
        return await _configuring(call).put(config, call.who.name, whole=whole, dry_run=bool(call.args["dry_run"]))


async def reload(call: Call) -> ConfigChange:
    with call.shared.what_ifs.hold(call.holder):
        return await _configuring(call).reload(call.who.name, dry_run=bool(call.args["dry_run"]))


async def undo(call: Call) -> ConfigChange:
    with call.shared.what_ifs.hold(call.holder):
        return await _configuring(call).undo(
            call.who.name, to=call.args["to"], dry_run=bool(call.args["dry_run"])
        )  # fmt: skip


ROUTES = (
    Route("GET", f"{API}/config", ADMIN, "The configuration in force", show, response=ConfigView),
    Route("PUT", f"{API}/config", ADMIN, "Put another scheduling configuration in force, in TOML or JSON", put,
          request=SchedulingConfig, response=ConfigChange, params=(_DRY,), lane="long", accepts="application/toml"),
    Route("GET", f"{API}/config/history", ADMIN, "Configurations that were in force, the newest first", history,
          response=ConfigHistory),
    Route("POST", f"{API}/config/reload", ADMIN, "Read the server's configuration file again", reload,
          response=ConfigChange, params=(_DRY,), lane="long"),
    Route("POST", f"{API}/config/undo", ADMIN, "Put an earlier configuration in force again", undo,
          response=ConfigChange, params=(_DRY, _TO), lane="long"),
)  # fmt: skip
