"""The key `escalation`: parsing and rendering."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import job_document
from hodei.model.errors import InvalidInput
from hodei.model.job import Escalation


def said(escalation: dict[str, Any]) -> Escalation:
    return parse_job({"command": ["true"], "escalation": escalation}, now_ms=1).escalation


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        pytest.param({}, Escalation(), id="nothing"),
        pytest.param(
            {"relax": ["topology", "spread", "topology"], "relax_after": "10m"},
            Escalation(("topology", "spread"), 600_000),
            id="rules, each once",
        ),
        pytest.param(
            {"promote_after": "30m", "promote_to": "high"},
            Escalation(promote_after_ms=1_800_000, promote_to=750),
            id="a class by its name",
        ),
        pytest.param({"promote_after": 90, "promote_to": 600}, Escalation((), 0, 90_000, 600), id="numbers"),
    ],
)
def test_an_escalation_is_parsed_and_rendered_back(written: dict[str, Any], meant: Escalation) -> None:
    assert said(written) == meant
    spec = parse_job({"command": ["true"], "escalation": written}, now_ms=1)
    assert parse_job(job_document(spec), now_ms=1) == spec


@pytest.mark.parametrize(
    ("written", "wrong"),
    [
        pytest.param({"relax_after": "10m"}, "escalation.relax", id="after which time, but what"),
        pytest.param({"relax": ["taints"]}, "escalation.relax", id="a rule that is never relaxed"),
        pytest.param({"promote_to": "top"}, "escalation.promote_to", id="no such class"),
        pytest.param({"promote_to": -1}, "escalation.promote_to", id="below all"),
        pytest.param({"relax_after": "soon", "relax": ["spread"]}, "escalation.relax_after", id="not a duration"),
    ],
)
def test_invalid_health_checks_are_refused_with_their_path(written: dict[str, Any], wrong: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        said(written)
    assert wrong in str(refused.value) or any(path.startswith(wrong) for path, _ in refused.value.problems)
