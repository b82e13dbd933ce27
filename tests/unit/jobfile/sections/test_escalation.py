"""The key `escalation`: parsing and rendering."""

from __future__ import annotations

from typing import Any

import pytest

from hodei.jobfile.parse import parse_job
from hodei.jobfile.render import job_document
from hodei.model.errors import InvalidInput
from hodei.model.job import Escalation


def parse(escalation: dict[str, Any]) -> Escalation:
    return parse_job({"command": ["true"], "escalation": escalation}, now_ms=1).escalation


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        pytest.param({}, Escalation(), id="empty"),
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
def test_an_escalation_is_parsed_and_rendered_back(value: dict[str, Any], expected: Escalation) -> None:
    assert parse(value) == expected
    spec = parse_job({"command": ["true"], "escalation": value}, now_ms=1)
    assert parse_job(job_document(spec), now_ms=1) == spec


@pytest.mark.parametrize(
    ("value", "where"),
    [
        pytest.param({"relax_after": "10m"}, "escalation.relax", id="a time without rules"),
        pytest.param({"relax": ["taints"]}, "escalation.relax", id="a rule that cannot be relaxed"),
        pytest.param({"promote_to": "top"}, "escalation.promote_to", id="an unknown class"),
        pytest.param({"promote_to": -1}, "escalation.promote_to", id="a negative priority"),
        pytest.param({"relax_after": "soon", "relax": ["spread"]}, "escalation.relax_after", id="not a duration"),
    ],
)
def test_an_invalid_escalation_is_refused_with_its_path(value: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        parse(value)
    assert where in str(refused.value) or any(path.startswith(where) for path, _ in refused.value.problems)
