"""The page of a comparison in a real Chromium: every picture is visible, in light and dark, on wide and narrow screens.

The results are made up (`fake_results`). Other tests check the results of replays.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import pytest

from browser.chromium import Browser, browsing, missing
from hodei.sim.report import write_report
from unit.sim.report.fake_results import some_results

pytestmark = [pytest.mark.browser, pytest.mark.xdist_group("browser")]
SHARED, GANTTS = 7, 6  # numbers of pictures

# The name and size of each picture, and how many of its paths are visible.
PICTURES = """
return [...document.querySelectorAll("figure svg")].map(svg => {
  const box = svg.getBoundingClientRect(), lines = [...svg.querySelectorAll("path")];
  return {name: svg.getAttribute("aria-label"), width: box.width, height: box.height,
          drawn: lines.filter(line => line.getBoundingClientRect().width > 0).length};
});
"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if missing():
        if os.environ.get("CI"):
            pytest.fail(f"{missing()} is not installed, which CI requires: apt-get install chromium chromium-driver")
        pytest.skip(f"{missing()} is not installed")
    with browsing(tmp_path_factory.mktemp("chromium") / "driver.log") as chromium:
        yield chromium


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("matplotlib")
    out = tmp_path_factory.mktemp("report")
    write_report(some_results(40, nodes=4), out, formats=("svg",))
    return out / "index.html"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 380], ids=["wide", "narrow"])
def test_every_picture_is_visible_and_the_console_has_no_warnings(
    browser: Browser, report: Path, width: int, scheme: Literal["light", "dark"]
):
    browser.resize(width, 900)
    browser.prefer(scheme)
    browser.open(report)
    browser.run("document.querySelectorAll('details').forEach(part => part.open = true)")
    pictures = browser.run(PICTURES)
    assert len(pictures) == SHARED + GANTTS
    for picture in pictures:
        assert picture["width"] >= 600, picture
        assert picture["height"] >= 100, picture
        assert picture["drawn"] >= 5, picture
    assert browser.run("return document.documentElement.scrollWidth") <= width, "the page does not scroll sideways"
    assert browser.warnings() == []
    assert browser.screenshot().startswith(b"\x89PNG")


def test_the_dark_scheme_has_light_text_on_a_dark_background(browser: Browser, report: Path):
    seen = {}
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        browser.open(report)
        seen[scheme] = browser.run(
            """
            const text = getComputedStyle(document.querySelector("figure svg text"));
            return [getComputedStyle(document.body).backgroundColor, text.fill];
            """
        )
    assert seen["light"] == ["rgb(254, 254, 254)", "rgb(31, 41, 51)"]
    assert seen["dark"] == ["rgb(22, 27, 32)", "rgb(228, 231, 235)"]


def test_a_click_on_a_column_sorts_the_table_and_pointing_at_a_bar_names_its_job(browser: Browser, report: Path):
    browser.resize(1280, 900)
    browser.open(report)
    rows = "return [...document.querySelectorAll('table.numbers tbody tr')].map(row => row.cells[0].textContent)"
    click = "document.querySelector('table.numbers th button').click();"
    assert browser.run(click + rows) == ["easy", "fcfs", "hodei"]
    assert browser.run(click + rows) == ["hodei", "fcfs", "easy"]
    tip = browser.run(
        """
        const bar = document.querySelector("path.job");
        bar.dispatchEvent(new PointerEvent("pointermove", {bubbles: true, clientX: 50, clientY: 50}));
        const tip = document.querySelector("#tip");
        return tip.hidden ? "" : tip.textContent;
        """
    )
    assert "job" in tip.lower()
    assert browser.warnings() == []
