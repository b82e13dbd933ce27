"""What if? Looks ahead from the live state in a process of its own, and changes nothing."""

from __future__ import annotations

import msgspec
from msgspec import structs

from hodei.api.whatif import WhatIfRequest
from hodei.control.explain.whatif import Question
from hodei.jobfile.document import parse_job
from hodei.model.errors import InvalidInput
from hodei.model.whatif import WhatIf
from hodei.server.route import API, READ, Call, Route

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


ROUTES = (
    Route("POST", f"{API}/whatif", READ, "Who would start when if something were different, without doing it", what_if,
          request=WhatIfRequest, response=WhatIf, lane="long", harmless=True),
)  # fmt: skip
