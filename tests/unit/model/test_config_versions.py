"""Versions of the configuration: their differences, and what undo restores."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from hodei.api.config import as_toml, parse_config, read_body, read_toml
from hodei.model.config import (
    Config,
    ConfigVersion,
    SchedulingConfig,
    config_differences,
    config_fingerprint,
    restart_differences,
    version_to_restore,
)
from hodei.model.errors import InvalidInput


def config(toml: str) -> Config:
    return msgspec.toml.decode(toml, type=Config)


def changes(before: str, after: str) -> list[tuple[str, object, object]]:
    found = config_differences(config(before).scheduling, config(after).scheduling)
    return [(each.path.removeprefix("scheduling."), each.before, each.after) for each in found]


GPU = '[scheduling.profiles.gpu]\nqueue = "fair"\n'


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        pytest.param("", "", [], id="nothing"),
        pytest.param("", GPU, [("profiles.gpu.queue", None, "fair")], id="a new profile"),
        pytest.param(GPU, "", [("profiles.gpu.queue", "fair", None)], id="a removed profile"),
        pytest.param("", "[scheduling.profiles.x]", [("profiles.x", None, {})], id="a new empty profile"),
        pytest.param(
            GPU,
            GPU.replace("fair", "fifo"),
            [("profiles.gpu.queue", "fair", "fifo")],
            id="another value of one setting",
        ),
        pytest.param(
            "",
            '[[scheduling.routes]]\nprofile = "compute"\nwhen = {gpu = true}',
            [("routes[0].profile", None, "compute"), ("routes[0].when.gpu", None, True)],
            id="a new rule",
        ),
        pytest.param("", "[scheduling]\nmax_losses = 9", [("max_losses", 3, 9)], id="a plain number"),
    ],
)
def test_differences_between_two_configurations_are_listed(before: str, after: str, expected: list[object]) -> None:
    assert changes(before, after) == expected


def test_settings_outside_scheduling_need_a_restart() -> None:
    after = config(
        '[server]\nport = 1\n[scheduling]\nmax_losses = 9\n[scheduling.forecast]\nevery = "9m"\n[[nodes]]\nname="a"'
    )
    paths = [each.path for each in restart_differences(Config(), after)]
    assert {"server.port", "scheduling.forecast.every", "nodes[0].name"} <= set(paths)
    assert "scheduling.max_losses" not in paths


def numbered(number: int, restores: int = 0) -> ConfigVersion:
    how = "undo" if restores else "set"
    scheduling = SchedulingConfig(max_losses=restores or number)
    return ConfigVersion(number, 0, "ann", how, scheduling, restores)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("history", "back_to"),
    [
        pytest.param([], None, id="nothing yet"),
        pytest.param([numbered(1)], None, id="nothing before the first"),
        pytest.param([numbered(1), numbered(2)], 1, id="the one before"),
        pytest.param(
            [numbered(1), numbered(2), numbered(3), numbered(4, restores=2)], 1, id="undone twice: one further"
        ),
        pytest.param([numbered(1), numbered(2), numbered(3, restores=1)], None, id="all undone"),
        pytest.param([numbered(1), numbered(2), numbered(3, restores=1), numbered(4)], 1, id="set again after an undo"),
        pytest.param(
            [numbered(1), numbered(2), numbered(3, restores=1), numbered(4), numbered(5, restores=1)],
            None,
            id="set again after an undo, and undone",
        ),
        pytest.param(
            [numbered(1), numbered(2), numbered(3), numbered(4, restores=1), numbered(5, restores=3)],
            1,
            id="an undone one was restored",
        ),
        pytest.param(
            [numbered(5, restores=1), numbered(6), numbered(7), numbered(8, restores=6)],
            5,
            id="the restored one has left the history",
        ),
        pytest.param(
            [numbered(5, restores=1), numbered(6), numbered(7, restores=1), numbered(8)],
            5,
            id="restored twice, and has left the history",
        ),
        pytest.param(
            [numbered(1), numbered(2), structs.replace(numbered(2), number=3, how="start")],
            1,
            id="the same again, after it was written into the file",
        ),
    ],
)
def test_undo_restores_the_version_before_each_time(history: list[ConfigVersion], back_to: int | None) -> None:
    found = version_to_restore(tuple(history))
    assert (found.number if found else None) == back_to


def test_a_configuration_rendered_as_toml_reads_back_equal() -> None:
    text = """
[scheduling]
max_losses = 7
[scheduling.profiles.gpu]
queue = "fair"
weights = {"team a" = 3, b = 1}
projects = ["x-*"]
scores = {fit = 10}
options = {gpu_hodei = {depth = 3}}
[scheduling.profiles.gpu.escalation]
promote_after = "1h"
[scheduling.profiles.plain]
[[scheduling.routes]]
when = {gpu = true, priority_at_least = "high"}
profile = "gpu"
[[scheduling.routes]]
profile = "plain"
[scheduling.breaker]
rounds = 3
"""
    original = config(text).scheduling
    reread, full = parse_config(*read_body(as_toml(original).encode(), "application/toml"))
    assert full
    assert reread.scheduling == original
    assert config_fingerprint(reread.scheduling) == config_fingerprint(original)
    assert parse_config(*read_body(as_toml(SchedulingConfig()).encode(), "application/toml"))[0] == Config()


def test_an_error_in_a_submitted_configuration_names_its_line():
    with pytest.raises(InvalidInput, match=r"^line 2: scheduling\.profiles\.x\.queu: unknown key"):
        parse_config(*read_body(b'[profiles.x]\nqueu = "fair"\n', "application/toml"))


def test_an_implicit_table_has_the_line_of_its_first_part():
    with pytest.raises(InvalidInput, match=r"^line 3: nodes: expected a list"):
        parse_config(*read_toml(b"[server]\n\n[nodes.n1]\ncpu = 4\n", "config.toml"), full=True)
