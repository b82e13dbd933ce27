"""A decision log from elsewhere does not choose the code that a replay runs."""

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

NAME = "hodei_test_outsider:Mine"


@pytest.fixture
def outsider(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A plugin whose module leaves a file behind when it is imported."""
    text = f"""
from pathlib import Path
Path({str(tmp_path / "imported")!r}).touch()
class Mine:
    name = "mine"
    def score(self, member, nodes, view):
        return nodes.zeros()
"""
    (tmp_path / "hodei_test_outsider.py").write_text(text)
    (tmp_path / "home").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("hodei_test_outsider", None)


def _written(path: Path, first: SchedulingConfig, *later: SchedulingConfig) -> Path:
    """A log as a server with that plugin writes it; the import is undone afterwards."""
    log, controller = DecisionLog(path, first, 0), make_controller(first)
    steps = [[NodeJoined(a_node("n1"))], *([Reconfigured(scheduling=each)] for each in later), [JobSubmitted(a_job(1))]]
    for after, facts in enumerate(steps):
        log.step(NOW_MS + after, facts, controller.step(NOW_MS + after, facts).plan)
    log.close()
    sys.modules.pop("hodei_test_outsider", None)
    (path.parent.parent / "imported").unlink(missing_ok=True)
    (path.parent / "imported").unlink(missing_ok=True)
    return path


def _configs() -> dict[str, tuple[SchedulingConfig, ...]]:
    mine = SchedulingConfig(profiles={"default": ProfileConfig(plugins=(NAME,))})
    scored = SchedulingConfig(profiles={"night": ProfileConfig(score_plugins=(NAME,))}, unavailable_profile="fallback")
    return {"in its header": (mine,), "with a fallback": (scored,), "in a change": (SchedulingConfig(), mine)}


@pytest.mark.parametrize("configs", _configs().values(), ids=_configs().keys())
def test_a_plugin_that_is_not_configured_here_is_refused_by_name(outsider, capsys, configs) -> None:
    log = _written(outsider / "of-others.jsonl", *configs)
    assert main([str(log), "--home", str(outsider / "home")]) == 2
    said = capsys.readouterr().err
    assert f"{NAME!r}, which is neither built in nor configured here" in said
    assert "--trust-plugins" in said
    assert not (outsider / "imported").exists()


@pytest.mark.parametrize("configs", _configs().values(), ids=_configs().keys())
def test_it_is_loaded_if_the_user_says_so(outsider, configs) -> None:
    log = _written(outsider / "of-others.jsonl", *configs)
    assert main([str(log), "--home", str(outsider / "home"), "--trust-plugins"]) == 0
    assert (outsider / "imported").exists()


def test_it_is_loaded_if_the_configuration_of_the_home_names_it(outsider) -> None:
    log = _written(outsider / "of-others.jsonl", _configs()["in its header"][0])
    (outsider / "home" / "config.toml").write_text(
        f'[scheduling.profiles.night]\nqueue = "fifo"\nplugins = ["{NAME}"]\n'
    )
    assert main([str(log), "--home", str(outsider / "home")]) == 0


def test_it_is_loaded_for_the_log_of_the_home_itself(outsider) -> None:
    log = _written(outsider / "home" / "decisions.jsonl", _configs()["in its header"][0])
    assert main(["--home", str(outsider / "home")]) == 0
    assert main([str(log), "--home", str(outsider / "home")]) == 0
