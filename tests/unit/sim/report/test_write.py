from __future__ import annotations

import csv
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.metrics import Outcome, Result, Sample
from hodei.sim.report import why_no_pictures, write_report
from unit.sim.report.fake_results import a_result, some_results

pytest.importorskip("matplotlib")


class Page(HTMLParser):
    """The ids and tags of a page, and the addresses that it would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.fetched: list[str] = []
        self.pictures: list[str | None] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = dict(attrs)
        self.tags.append(tag)
        self.ids += [attributes["id"] or ""] if "id" in attributes else []
        addresses = [attributes.get("src"), attributes.get("href"), attributes.get("xlink:href")]
        self.fetched += [address for address in addresses if address and not address.startswith("#")]
        if tag == "svg":
            self.pictures.append(attributes.get("aria-label"))

    handle_startendtag = handle_starttag


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    write_report(some_results(40, nodes=4), out)
    return out


def a_job(number: int, submitted: int, started: int, ended: int, **fields: object) -> Outcome:
    fields_of_job = {"name": "job", "user": "ada", "project": "p", "request": {"cpu": 1000}, "nodes": ("n1",), **fields}
    return Outcome(id=number, submitted_ms=submitted, started_ms=started, ended_ms=ended, **fields_of_job)  # type: ignore[arg-type]


def test_every_picture_is_written_as_svg_and_as_png(report: Path) -> None:
    expected = {"numbers", "load", "wait-cdf", "slowdown-cdf", "fairness", "fragmentation", "preemptions"}
    expected |= {f"gantt-{rows}-{policy}" for rows in ("node", "user") for policy in ("fcfs", "easy", "hodei")}
    assert {path.stem for path in report.glob("*.svg")} == expected
    assert {path.stem for path in report.glob("*.png")} == expected
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in report.glob("*.png"))


def test_svg_files_are_well_formed_and_have_a_title_and_a_description(report: Path) -> None:
    for path in report.glob("*.svg"):
        first, second = list(ElementTree.parse(path).getroot())[:2]
        assert first.tag.endswith("title"), path
        assert first.text
        assert second.tag.endswith("desc"), path
        assert second.text


def test_the_page_fetches_nothing_and_no_two_elements_share_an_id(report: Path) -> None:
    page = Page((report / "index.html").read_text())
    assert page.fetched == []
    assert "link" not in page.tags
    assert len(page.ids) == len(set(page.ids))
    assert len(page.pictures) == 13
    assert all(page.pictures)


def test_every_reference_within_the_page_resolves(report: Path) -> None:
    text = (report / "index.html").read_text()
    expected = set(re.findall(r'(?:href="|url\()#([^")]+)', text))
    assert expected <= set(Page(text).ids)


def test_text_and_background_colours_follow_the_colour_scheme_of_the_reader(report: Path) -> None:
    pictures = "".join(re.findall(r"<svg.*?</svg>", (report / "index.html").read_text(), re.DOTALL))
    assert "var(--ink)" in pictures
    assert "#1f2933" not in pictures
    assert "#fefefe" not in pictures


def test_a_bar_has_the_name_and_times_of_its_job(report: Path) -> None:
    bars = re.findall(r'<path class="job"[^>]*><title>([^<]*)</title>', (report / "gantt-user-easy.svg").read_text())
    assert len(bars) == 40
    assert all(re.match(r"Job \d+ \(.*\) of user\d+\n.*cpu.*\nwaited .*, ran ", bar) for bar in bars)


def test_summaries_hold_every_number_unrounded(report: Path) -> None:
    rows = json.loads((report / "summary.json").read_text())
    with (report / "summary.csv").open() as lines:
        table = list(csv.DictReader(lines))
    assert [row["policy"] for row in rows] == [row["policy"] for row in table] == ["fcfs", "easy", "hodei"]
    assert [float(row["mean_wait_s"]) for row in table] == [row["mean_wait_s"] for row in rows]
    assert {"bounded_slowdown", "max_wait_s", "utilisation", "jobs", "seconds"} <= set(table[0])


def test_the_same_results_give_the_same_bytes(tmp_path: Path) -> None:
    first, second = (
        write_report([a_result("easy", 20)], tmp_path / name, formats=("svg",)) for name in ("first", "second")
    )
    assert [path.name for path in first] == [path.name for path in second]
    pairs = zip(first, second, strict=True)
    assert [a.name for a, b in pairs if a.read_bytes() != b.read_bytes()] == []


def test_only_the_requested_formats_are_written_but_the_page_has_its_pictures(tmp_path: Path) -> None:
    written = write_report([a_result("easy", 5, nodes=2)], tmp_path, formats=())
    assert [path.name for path in written] == ["summary.csv", "summary.json", "index.html"]
    assert Page((tmp_path / "index.html").read_text()).pictures


def test_an_unknown_format_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="gif"):
        write_report([], tmp_path / "out", formats=("gif",))
    assert not (tmp_path / "out").exists()


ODD = {
    "no jobs": [],
    "one job": [a_job(1, 0, 0, 5000)],
    "a job of length 0": [a_job(1, 0, 0, 0)],
    "jobs of length 0 among others": [a_job(1, 0, 5, 5), a_job(2, 0, 5, 5), a_job(3, 0, 5, 90_000)],
    "nothing ever started": [a_job(1, 0, -1, -1, nodes=()), a_job(2, 7, -1, -1, nodes=())],
    "one never started, one never ended": [a_job(1, 0, -1, -1, nodes=()), a_job(2, 0, 3, -1), a_job(3, 0, 4, 9000)],
    "no node named": [a_job(1, 0, 0, 5000, nodes=())],
    "no users named": [a_job(1, 0, 0, 5000, user="", project="")],
    "resources that the cluster does not have": [a_job(1, 0, 0, 5000, request={"licence/x": 3})],
    "nothing requested": [a_job(1, 0, 0, 5000, request={})],
    "names that would break a document": [
        a_job(1, 0, 0, 5000, name='<script>alert("x")</script>', user="$x_1$ & \x00\x1b[2J", nodes=("<n1>",)),
        a_job(2, 0, 0, 5000, name="]]>", user="_hidden", nodes=("計算機",)),
    ],
}


@pytest.mark.parametrize("outcomes", ODD.values(), ids=ODD.keys())
def test_odd_results_are_reported(outcomes: list[Outcome], tmp_path: Path) -> None:
    samples = [Sample(at_ms=0, used={"cpu": 1000}, running=1, waiting=0)] if outcomes else []
    write_report([Result("<b>p</b>", "w & w", {"cpu": 4000}, outcomes, samples)], tmp_path, formats=("svg",))
    text = (tmp_path / "index.html").read_text()
    assert "<script>alert" not in text
    assert "<b>" not in text
    assert "\x00" not in text
    for path in tmp_path.glob("*.svg"):
        ElementTree.parse(path)


def test_a_report_without_results_has_a_page(tmp_path: Path) -> None:
    written = write_report([], tmp_path)
    assert [path.name for path in written] == ["summary.csv", "summary.json", "index.html"]
    assert "No runs were given" in (tmp_path / "index.html").read_text()


def test_without_matplotlib_the_report_has_no_pictures_and_names_the_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    written = write_report([a_result("easy", 20)], tmp_path)
    assert [path.name for path in written] == ["summary.csv", "summary.json", "index.html"]
    assert "hodei[plots]" in why_no_pictures()
    assert "hodei[plots]" in (tmp_path / "index.html").read_text()
