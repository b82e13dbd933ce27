"""The built-in plugins and queues pass the public suites."""

from __future__ import annotations

import pytest

from hodei.plugins.registry import PLUGINS, QUEUES, find_plugin, find_queue
from hodei.testing import PluginConformance, QueueConformance


class TestBuiltInPlugins(PluginConformance):
    @pytest.fixture(autouse=True, params=sorted(PLUGINS))
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def make_plugin(self):
        return find_plugin(self.name)

    def test_it_is_registered_under_its_own_name(self):
        assert find_plugin(self.name).name == self.name


class TestBuiltInQueues(QueueConformance):
    @pytest.fixture(autouse=True, params=sorted(QUEUES))
    def choose(self, request: pytest.FixtureRequest) -> None:
        self.name = request.param

    def make_queue(self):
        return find_queue(self.name)

    def test_it_is_registered_under_its_own_name(self):
        assert find_queue(self.name).name == self.name


def test_some_built_in_plugins_are_scalar() -> None:
    """Without scalar plugins the suite would skip its comparison of one node with all nodes."""
    assert sum(getattr(find_plugin(name), "scalar", False) for name in PLUGINS) > 3
