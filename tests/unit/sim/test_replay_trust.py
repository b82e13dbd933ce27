"""A foreign decision log does not choose the code that a replay runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from builders import NOW_MS, a_job, a_node
from hodei.model.config import ProfileConfig, SchedulingConfig
from hodei.model.facts import JobSubmitted, NodeJoined, Reconfigured
from hodei.runtime.decision_log import DecisionLog
from hodei.sim.replay import main
from hodei.wiring import make_controller

NAME = "hodei_test_plugin:Mine"


@pytest.fixture
def plugin_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plugin whose module creates a file when it is imported."""
    text = f"""
from pathlib import Path
Path({str(tmp_path / "imported")!r}).touch()
class Mine:
    name = "mine"
    def score(self, member, nodes, view):
        return nodes.zeros()
"""
    (tmp_path / "hodei_test_plugin.py").write_text(text)
    (tmp_path / "home").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("hodei_test_plugin", None)


def _write_log(path: Path, first: SchedulingConfig, *later: SchedulingConfig) -> Path:
    """A log as a server with that plugin writes it; the import is undone afterwards."""
    log, controller = DecisionLog(path, first, 0), make_controller(first)
    steps = [[NodeJoined(a_node("n1"))], *([Reconfigured(scheduling=each)] for each in later), [JobSubmitted(a_job(1))]]
    for after, facts in enumerate(steps):
        log.step(NOW_MS + after, facts, controller.step(NOW_MS + after, facts).plan)
    log.close()
    sys.modules.pop("hodei_test_plugin", None)
    (path.parent.parent / "imported").unlink(missing_ok=True)
    (path.parent / "imported").unlink(missing_ok=True)
    return path


def _configs() -> dict[str, tuple[SchedulingConfig, ...]]:
    filtered = SchedulingConfig(profiles={"default": ProfileConfig(plugins=(NAME,))})
    scored = SchedulingConfig(profiles={"night": ProfileConfig(score_plugins=(NAME,))}, unavailable_profile="fallback")
    return {"in its header": (filtered,), "with a fallback": (scored,), "in a change": (SchedulingConfig(), filtered)}


@pytest.mark.parametrize("configs", _configs().values(), ids=_configs().keys())
def test_a_plugin_that_is_not_configured_here_is_refused_by_name(plugin_dir, capsys, configs) -> None:
    log = _write_log(plugin_dir / "foreign.jsonl", *configs)
    assert main([str(log), "--home", str(plugin_dir / "home")]) == 2
    stderr = capsys.readouterr().err
    assert f"{NAME!r}, which is neither built in nor configured here" in stderr
    assert "--trust-plugins" in stderr
    assert not (plugin_dir / "imported").exists()


@pytest.mark.parametrize("configs", _configs().values(), ids=_configs().keys())
def test_a_plugin_is_loaded_with_trust_plugins(plugin_dir, configs) -> None:
    log = _write_log(plugin_dir / "foreign.jsonl", *configs)
    assert main([str(log), "--home", str(plugin_dir / "home"), "--trust-plugins"]) == 0
    assert (plugin_dir / "imported").exists()


def test_a_plugin_is_loaded_if_the_configuration_of_the_home_names_it(plugin_dir) -> None:
    log = _write_log(plugin_dir / "foreign.jsonl", _configs()["in its header"][0])
    (plugin_dir / "home" / "config.toml").write_text(
        f'[scheduling.profiles.night]\nqueue = "fifo"\nplugins = ["{NAME}"]\n'
    )
    assert main([str(log), "--home", str(plugin_dir / "home")]) == 0


def test_a_plugin_is_loaded_for_the_log_of_the_home_itself(plugin_dir) -> None:
    log = _write_log(plugin_dir / "home" / "decisions.jsonl", _configs()["in its header"][0])
    assert main(["--home", str(plugin_dir / "home")]) == 0
    assert main([str(log), "--home", str(plugin_dir / "home")]) == 0
