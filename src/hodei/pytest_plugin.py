"""pytest plugin: every `*.scenario.yaml` is a test that passes if all its expectations hold.

Loaded into every pytest run where Hodei is installed, so it imports Hodei only when such a file is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_ENDINGS = (".scenario.yaml", ".scenario.yml")
# A failed assertion of a conformance suite shows its values.
pytest.register_assert_rewrite("hodei.testing")


class ScenarioFailed(Exception):
    """An expectation does not hold; the text is the full report."""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.Collector | None:
    if file_path.name.endswith(_ENDINGS):
        return ScenarioFile.from_parent(parent, path=file_path)
    return None


class ScenarioFile(pytest.File):
    def collect(self) -> Iterator[pytest.Item]:
        name = self.path.name.removesuffix(next(ending for ending in _ENDINGS if self.path.name.endswith(ending)))
        yield ScenarioItem.from_parent(self, name=name)


class ScenarioItem(pytest.Item):
    def runtest(self) -> None:
        from hodei.sim.scenario.check import check_scenario
        from hodei.sim.scenario.parse import read_scenario
        from hodei.sim.scenario.report import format_report

        outcome = check_scenario(read_scenario(self.path))
        if not outcome.held:
            raise ScenarioFailed(format_report(outcome))

    def repr_failure(self, excinfo: pytest.ExceptionInfo[BaseException], style: Any = None) -> Any:
        from hodei.model.errors import HodeiError

        if isinstance(excinfo.value, ScenarioFailed):
            return str(excinfo.value)
        if isinstance(excinfo.value, HodeiError):
            problems = getattr(excinfo.value, "problems", ())
            return "\n".join(f"{where}: {what}" for where, what in problems) or excinfo.value.message
        return super().repr_failure(excinfo, style)

    def reportinfo(self) -> tuple[Path, int, str]:
        return self.path, 0, f"scenario: {self.name}"
