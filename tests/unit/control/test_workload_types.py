"""Requirements of workload types: no cold start, storage for data."""

from __future__ import annotations

from builders import a_node
from hodei.control.explain.why import why
from hodei.model.facts import NodeJoined
from hodei.model.job import DataProcessing, Serverless
from unit.control.harness import Harness

GIB = 1 << 30
WARM = {"busybox:latest": 1 << 20}


def _code(harness: Harness, job: int) -> str:
    found = why(harness.controller, job, harness.now_ms)
    assert found is not None
    return found.code


def test_a_job_that_accepts_no_cold_start_waits_for_a_node_that_holds_its_image():
    harness = Harness(a_node("cold", 64))
    harness.submit(1, image="busybox", workload=Serverless(cold_start_acceptable=False))
    assert (harness.state(1), _code(harness, 1)) == ("pending", "COLD_START")
    harness.step(NodeJoined(a_node("warm", 1, images=WARM)))
    assert harness.runs["1.0.1"].node == "warm"


def test_a_job_that_accepts_a_cold_start_or_has_no_image_goes_anywhere():
    harness = Harness(a_node("cold", 64))
    harness.submit(1, image="busybox", workload=Serverless())
    harness.submit(2, workload=Serverless(cold_start_acceptable=False))
    assert [harness.state(1), harness.state(2)] == ["scheduled", "scheduled"]


def test_data_processing_goes_where_its_input_and_output_fit():
    harness = Harness(a_node("small", 64, capacity={"storage": 10 * GIB}))
    data = DataProcessing(input_bytes=12 * GIB, output_bytes=4 * GIB)
    harness.submit(1, workload=data)
    assert (harness.state(1), _code(harness, 1)) == ("pending", "NO_DATA_SPACE")
    harness.step(NodeJoined(a_node("large", 1, capacity={"storage": 20 * GIB})))
    assert harness.runs["1.0.1"].node == "large"


def test_members_share_the_data_and_nodes_of_unknown_storage_are_accepted():
    harness = Harness(a_node("small", 64, capacity={"storage": 10 * GIB}))
    harness.submit(1, count=2, workload=DataProcessing(input_bytes=16 * GIB))
    assert harness.state(1) == "scheduled"
    unknown_storage = Harness(a_node("silent", 64))
    unknown_storage.submit(1, workload=DataProcessing(input_bytes=16 * GIB))
    assert unknown_storage.state(1) == "scheduled"
