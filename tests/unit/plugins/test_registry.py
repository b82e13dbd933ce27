"""Plugins by name: built in, from an installed package, or by a path; invalid ones are refused with a reason."""

from __future__ import annotations

import sys
import types
from importlib.metadata import EntryPoint

import pytest

from builders import NOW_MS, a_job, a_node
from hodei import extensions
from hodei.control.controller import Controller
from hodei.engine.points import PerNode
from hodei.engine.profile import make_profile
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.errors import InvalidInput
from hodei.model.facts import JobSubmitted, NodeJoined
from hodei.model.job import Reason
from hodei.plugins import registry
from hodei.plugins.registry import build_profile, build_profiles, find_plugin


class Even(PerNode):
    """Accepts only nodes with an even number."""

    name = "even"

    def __init__(self, odd: bool = False) -> None:
        self._rest = 1 if odd else 0

    def refuse(self, member, node, used):
        return None if int(node.name[1:]) % 2 == self._rest else "an odd number"


class Last(PerNode):
    name = "last"

    def points(self, member, node, used):
        return int(node.name[1:]) * 10


class Nameless:
    def filter(self, member, nodes, view):
        return ()


class Pointless:
    name = "pointless"


@pytest.fixture
def module(monkeypatch):
    created = types.ModuleType("my_plugins")
    created.Even, created.Last, created.Nameless, created.Pointless = Even, Last, Nameless, Pointless
    monkeypatch.setitem(sys.modules, "my_plugins", created)


@pytest.fixture
def installed(monkeypatch, module):
    def entry_points(*, group, name=""):
        assert group == "hodei.plugins"
        return [EntryPoint("even", "my_plugins:Even", group)] if name == "even" else []

    monkeypatch.setattr(extensions, "entry_points", entry_points)


def _placed(profile, nodes=4):
    controller = Controller({"default": profile})
    controller.step(NOW_MS, [NodeJoined(a_node(f"n{i + 1}")) for i in range(nodes)])
    plan = controller.step(NOW_MS, [JobSubmitted(a_job(1))]).plan
    assert not plan.faults
    return [bind.node for bind in plan.binds]


def test_a_plugin_from_a_dotted_path_filters(module):
    assert _placed(build_profile("default", plugins=("my_plugins:Even",))) == ["n2"]


def test_a_plugin_of_an_installed_package_is_found_by_its_name(installed):
    assert _placed(build_profile("default", plugins=("even",))) == ["n2"]


def test_a_plugin_is_created_with_its_options(installed):
    assert _placed(build_profile("default", plugins=("even",), arguments={"even": {"odd": True}})) == ["n1"]


def test_a_custom_plugin_can_be_the_worker_selection(module):
    profile = build_profile("default", worker_selection="my_plugins:Last")
    assert _placed(profile) == ["n4"]
    assert {w.plugin.name: w.weight for w in profile.scores}["last"] == 70


def test_an_added_score_plugin_takes_part_with_a_weight(module):
    weights = {w.plugin.name: w.weight for w in build_profile("default", plugins=("my_plugins:Last",)).scores}
    assert weights["last"] == 10
    given = build_profile("default", plugins=("my_plugins:Last",), scores={"my_plugins:Last": 7})
    assert {w.plugin.name: w.weight for w in given.scores} == {"last": 7}


def test_scores_replace_all_weights():
    profile = build_profile("default", scores={"bin_packing": 3})
    assert {w.plugin.name: w.weight for w in profile.scores} == {"bin_packing": 3}


def test_a_disabled_filter_is_removed():
    default, without = build_profile("default"), build_profile("default", disabled=("fit",))
    assert [p.name for p in without.filters] == [p.name for p in default.filters if p.name != "fit"]
    assert "fit" in {p.name for p in default.filters}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        pytest.param({"plugins": ("tains",)}, "did you mean 'taints'", id="a typo"),
        pytest.param({"plugins": ("no_such_module:Thing",)}, "cannot be imported", id="no such module"),
        pytest.param({"plugins": ("my_plugins:Thing",)}, "cannot be imported", id="no such class"),
        pytest.param({"plugins": ("my_plugins:Nameless",)}, "not a plugin", id="a class without a name"),
        pytest.param({"plugins": ("my_plugins:Pointless",)}, "not a plugin", id="a class without a point"),
        pytest.param({"plugins": ("fit",), "arguments": {"fit": {"x": 1}}}, "cannot be created", id="a wrong option"),
        pytest.param({"queue": "lifo"}, "there is no queue 'lifo'", id="an unknown queue"),
        pytest.param({"base": "computer"}, "did you mean 'compute'", id="an unknown base"),
        pytest.param({"scores": {"load": -1}}, "whole number from 0 to 1000", id="a negative weight"),
        pytest.param({"scores": {"load": True}}, "whole number from 0 to 1000", id="a boolean weight"),
        pytest.param({"worker_selection": "best"}, "there is no plugin 'best'", id="an unknown strategy"),
    ],
)
def test_an_invalid_profile_is_refused_with_a_reason(module, fields, message):
    with pytest.raises(InvalidInput, match=message):
        build_profile("default", **fields)


def test_the_invalid_profile_is_named():
    with pytest.raises(InvalidInput, match="profile 'night'"):
        build_profiles(SchedulingConfig(profiles={"night": ProfileConfig(queue="lifo")}))


def test_the_built_in_profiles_always_exist():
    assert set(build_profiles(SchedulingConfig(profiles={"night": ProfileConfig()}))) == {"default", "compute", "night"}


def test_every_built_in_plugin_can_be_found():
    for name in registry.PLUGINS:
        assert find_plugin(name).name == name


def test_a_per_node_plugin_sees_what_is_used():
    class Halves(PerNode):
        name = "halves"

        def refuse(self, member, node, used):
            return "half full" if used.get("cpu", 0) * 2 >= node.capacity["cpu"] else None

    default = build_profile("default")
    profile = make_profile("default", default.queue, [*default.filters, Halves()], {})
    controller = Controller({"default": profile})
    controller.step(NOW_MS, [NodeJoined(a_node("n1", 4)), NodeJoined(a_node("n2", 4))])
    done = controller.step(NOW_MS, [JobSubmitted(a_job(i, cpu="1", memory="0")) for i in range(1, 6)])
    assert [bind.node for bind in done.plan.binds] == ["n1", "n1", "n2", "n2"]
    (refusal,) = done.plan.refusals
    assert refusal.verdicts[0].reason == Reason("halves", "HALVES", "half full")
    assert refusal.verdicts[0].count == 2
