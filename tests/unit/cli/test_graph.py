"""`hodei job graph`: as a tree, Graphviz, Mermaid and SVG."""

from __future__ import annotations

from xml.etree import ElementTree

from hodei.api.views import GraphEdge, GraphJob, JobGraph
from hodei.cli.graph import dot, mermaid, svg, tree

DIAMOND = JobGraph(
    2,
    [
        GraphJob(1, "start", "succeeded"), GraphJob(2, "left", "running"), GraphJob(3, "right", "failed", reason="exit 1"),
        GraphJob(4, "join", "pending", reason="waits", need=1), GraphJob(5, "mend", "pending"),
    ],
    [
        GraphEdge(2, "succeeded", 1), GraphEdge(3, "succeeded", 1), GraphEdge(4, "succeeded", 2), GraphEdge(4, "completed", 3),
        GraphEdge(5, "failed", 3), GraphEdge(5, "exists", what="/data/<x>.csv"),
    ],
)  # fmt: skip


def test_a_tree_shows_each_job_once_and_refers_to_it_elsewhere() -> None:
    assert tree(DIAMOND).splitlines() == [
        "1 start  succeeded",
        "├─ * 2 left  running",
        "│  └─ 4 join  pending: waits  (1 are enough)",
        "└─ 3 right  failed: exit 1",
        "   ├─ if completed: 4 join  pending: waits  (see above)",
        "   └─ if failed: 5 mend  pending, needs /data/<x>.csv",
    ]
    assert tree(DIAMOND, lines=False).isascii()


def test_a_deep_chain_is_cut_with_a_note() -> None:
    jobs = [GraphJob(id, f"j{id}", "pending") for id in range(1, 5001)]
    chain = JobGraph(1, jobs, [GraphEdge(id, "succeeded", id - 1) for id in range(2, 5001)])
    assert "--format svg draws all" in tree(chain).splitlines()[-1]
    assert svg(chain).count("<rect") == 5001


def test_graphviz_and_mermaid_have_jobs_edges_and_data() -> None:
    text = dot(DIAMOND)
    assert text.startswith("digraph jobs {")
    assert '  3 -> 5 [label="failed"];' in text
    assert '  data0 -> 5 [label="exists"];' in text
    text = mermaid(DIAMOND)
    assert "  j1 --> j2" in text
    assert "  j3 -->|failed| j5" in text
    assert "&lt;x&gt;" in text


def test_an_svg_is_well_formed_and_has_every_job() -> None:
    picture = ElementTree.fromstring(svg(DIAMOND))
    texts = [text.text for text in picture.iter("{http://www.w3.org/2000/svg}text")]
    assert {"1 start", "5 mend", "/data/<x>.csv", "failed"} <= set(texts)


def test_names_are_escaped_in_every_format() -> None:
    evil = JobGraph(1, [GraphJob(1, 'a"]; <script>\x1b[31m', "pending")], [])
    assert "\x1b" not in tree(evil) + dot(evil) + mermaid(evil) + svg(evil)
    assert "<script>" not in svg(evil) + mermaid(evil)
    assert '\\"]' in dot(evil)
