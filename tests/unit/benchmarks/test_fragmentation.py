"""The default profile spreads while there is free capacity, and leaves little of a full cluster unusable."""

from __future__ import annotations

import json

import pytest

from benchmarks import __main__ as bench
from benchmarks.fragmentation import MIXES, fill, unusable


@pytest.mark.parametrize("mix", sorted(MIXES))
def test_a_full_cluster_has_less_than_five_percent_unusable(mix: str) -> None:
    assert unusable(mix=mix, nodes=50, seeds=1) < 5


def test_a_half_full_cluster_uses_all_of_its_nodes() -> None:
    assert fill(mix="shapes", nodes=50).spread == 100
    assert fill("bin_packing", "shapes", nodes=50).spread < 70


@pytest.mark.parametrize("mix", ["small", "pairs", "shapes"])
def test_the_default_wastes_no_more_than_spreading_or_packing_alone(mix: str) -> None:
    default = unusable(mix=mix, nodes=50, seeds=1)
    assert default <= unusable("least_loaded", mix, nodes=50, seeds=1)
    assert default <= unusable("bin_packing", mix, nodes=50, seeds=1)


def test_the_command_reports_each_mix(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["fragmentation", "--nodes", "20", "--seeds", "1", "-o", "json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert {f"{mix}_unusable_percent" for mix in MIXES} <= result.keys()
