"""The configuration of a running server: what is in force, what was before, and how it is changed. For administrators."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from msgspec import structs

from hodei.api.config import ConfigHistory, ConfigView, config_view, parse_config, read_body
from hodei.api.views import WhatIfRequest
from hodei.control.explain.whatif import Question
from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import iso
from hodei.model.config import ConfigChange, SchedulingConfig
from hodei.model.errors import InvalidInput, Unavailable
from hodei.model.explanation import WhatIf
from hodei.server.route import ADMIN, API, READ, Call, Param, Route

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


# ---------------------------------------------------------------------------------------------- whatif
# What if? Looks ahead from the live state in a process of its own, and changes nothing.


_MOST_JOBS = 1000
_MOST_NODES = 1000
_request = msgspec.json.Decoder(WhatIfRequest)


async def what_if(call: Call) -> WhatIf:
    with call.shared.what_ifs.hold(call.holder):
        asked = _request.decode(call.body)
        if len(asked.jobs) > _MOST_JOBS or len(asked.remove_nodes) > _MOST_NODES:
            raise InvalidInput(
                f"more than {_MOST_JOBS} jobs or {_MOST_NODES} nodes in one question", hint="ask about fewer"
            )
        if not (asked.jobs or asked.policy is not None or asked.add_nodes or asked.remove_nodes):
            raise InvalidInput("nothing is to be different", hint="give jobs, policy, add_nodes or remove_nodes")
        specs = [parse_job(document, now_ms=call.shared.now_ms()) for document in asked.jobs]
        question = Question(
            tuple(structs.replace(spec, user=call.who.name) for spec in specs),
            asked.add_nodes,
            asked.like,
            tuple(asked.remove_nodes),
        )
        return await call.service.what_if(question, asked.policy)


WHATIF_ROUTES = (
    Route("POST", f"{API}/whatif", READ, "Who would start when if something were different, without doing it", what_if,
          request=WhatIfRequest, response=WhatIf, lane="long", harmless=True),
)  # fmt: skip
