"""Readers of cluster traces: openb's shared GPUs, Philly's gangs, Prow's CI jobs."""

from __future__ import annotations

from pathlib import Path

import pytest

from hodei.model.errors import InvalidInput
from hodei.sim.traces import open_workload
from unit.sim.traces.shared import TRACES, needs_traces

NODES = "sn,cpu_milli,memory_mib,gpu,model\nn2,64000,1024,2,P100\nn1,8000,512,0,\n"
POD_COLUMNS = (
    "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)
PODS = (
    POD_COLUMNS
    + "pod-0000,6000,12,1,460,,LS,Running,100,160,110\n"
    + "pod-0001,8000,12,8,1000,V100M32|V100M16,BE,Running,50,90,60\n"
    + "pod-0002,8000,12,1,1000,P100,BE,Pending,70,70,\n"
    + "pod-0003,8000,12,0,0,,BE,Running,80,90,80\n"
)


@pytest.fixture
def openb(tmp_path: Path) -> Path:
    (tmp_path / "openb_node_list_gpu_node.csv").write_text(NODES)
    (tmp_path / "openb_pod_list_default.csv").write_text(PODS)
    (tmp_path / "openb_pod_list_other.csv").write_text(POD_COLUMNS + "pod-0009,1,1,0,0,,BE,Running,0,9,1\n")
    return tmp_path


def test_openb_nodes_have_gpus_in_thousandths_and_their_model(openb: Path) -> None:
    first, second = open_workload(openb).nodes
    assert (first.name, first.capacity) == ("n1", {"cpu": 8000, "memory": 512 * 2**20})
    assert second.capacity == {"cpu": 64_000, "memory": 2**30, "gpu": 2000}
    assert (second.gpu_type, second.labels) == ("P100", {"gpu-model": "P100"})


def test_openb_pods_request_parts_of_gpus_and_models(openb: Path) -> None:
    jobs = {job.id: job for job in open_workload(openb).arrivals}
    part, gang, single, none = (jobs[id].spec.tasks[0] for id in (1, 2, 3, 4))
    assert (part.request["gpu"], gang.request["gpu"], single.request["gpu"]) == (460, 8000, 1000)
    assert "gpu" not in none.request
    assert (part.gpu_type, single.gpu_type, gang.gpu_type) == ("", "P100", "")
    [term] = gang.affinity.required
    assert str(term) == "gpu-model in (V100M16, V100M32)"


def test_openb_pods_arrive_when_created_and_run_from_when_they_were_placed(openb: Path) -> None:
    workload = open_workload(openb)
    assert [(job.id, job.at_ms, job.run_ms) for job in workload.arrivals] == [
        (2, 50_000, 30_000), (3, 70_000, 1000), (4, 80_000, 10_000), (1, 100_000, 50_000),
    ]  # fmt: skip
    assert "1 of 4 pods were never placed: they run from creation to deletion" in workload.notes
    assert "1 of 4 pods without a run time: one second is used" in workload.notes


def test_openb_is_read_from_a_folder_a_pod_list_or_a_pair(openb: Path) -> None:
    complete = open_workload(openb)
    pods, nodes = openb / "openb_pod_list_default.csv", openb / "openb_node_list_gpu_node.csv"
    for path in (str(pods), f"{nodes},{pods}", f"{pods},{nodes}"):
        found = open_workload(path)
        assert (list(found.arrivals), found.nodes) == (list(complete.arrivals), complete.nodes)
    [other] = open_workload(f"{openb}?pods=other").arrivals
    assert other.id == 10
    with pytest.raises(InvalidInput, match="no pods named 'third'") as found_error:
        open_workload(f"{openb}?pods=third")
    assert found_error.value.hint == "it has default, other"


def test_openb_lists_without_models_and_parts_of_gpus_are_read(tmp_path: Path) -> None:
    (nodes := tmp_path / "nodes.csv").write_text("\ufeffsn,cpu_milli,memory_mib,gpu\nn1,8000,512,2\n")
    (pods := tmp_path / "pods.csv").write_text(
        "name,cpu_milli,memory_mib,num_gpu,creation_time,deletion_time\npod-0000,1000,12,2,0,60\npod-0001,1000,12,1,5,9\n"
    )
    workload = open_workload(f"{nodes},{pods}")
    tasks = [job.spec.tasks[0] for job in workload.arrivals]
    assert [(task.request["gpu"], task.gpu_type, task.affinity.required) for task in tasks] == [
        (2000, "", ()), (1000, "", ()),
    ]  # fmt: skip
    [node] = workload.nodes
    assert (node.capacity["gpu"], node.gpu_type, node.labels) == (2000, "", {})
    assert "2 of 2 pods do not state which part of a GPU they request: whole ones are used" in workload.notes


def test_openb_pods_may_lack_the_column_of_models(openb: Path) -> None:
    pods = openb / "openb_pod_list_default.csv"
    rows = [line.split(",") for line in pods.read_text().splitlines()]
    pods.write_text("".join(",".join(row[:5] + row[6:]) + "\n" for row in rows))
    jobs = {job.id: job for job in open_workload(openb).arrivals}
    assert [jobs[id].spec.tasks[0].request.get("gpu", 0) for id in (1, 2, 3, 4)] == [460, 8000, 1000, 0]
    assert {job.spec.tasks[0].gpu_type for job in jobs.values()} == {""}
    assert [job.run_ms for job in jobs.values()] == [30_000, 1000, 10_000, 50_000]


@needs_traces
def test_the_published_openb_cluster_has_6212_gpus() -> None:
    workload = open_workload(TRACES / "alibaba-openb-2023")
    assert len(workload.arrivals) == 8152
    assert len(workload.nodes) == 1213
    assert sum(node.capacity.get("gpu", 0) for node in workload.nodes) == 6_212_000


PHILLY = (
    "timestamp,duration,num_gpus,gpu_time,cluster\n"
    "2017-10-09 07:00:00,66.0,1,66.0,b\n"
    "2017-10-09 06:59:00,10.5,12,126.0,a\n"
    "2017-10-09 07:00:00,20.0,16,320.0,a\n"
    "2017-10-09 07:00:00,0.0,1,0.0,a\n"
)


def test_philly_jobs_of_many_gpus_are_gangs_of_at_most_a_node_each(tmp_path: Path) -> None:
    (path := tmp_path / "p.csv").write_text(PHILLY)
    workload = open_workload(path, procs=20)
    assert [(job.id, job.at_ms, job.run_ms, job.spec.project) for job in workload.arrivals] == [
        (1, 0, 10_500, "a"), (2, 60_000, 66_000, "b"), (3, 60_000, 20_000, "a"),
    ]  # fmt: skip
    shapes = [[(task.count, task.request["gpu"]) for task in job.spec.tasks] for job in workload.arrivals]
    assert shapes == [[(1, 8000), (1, 4000)], [(1, 1000)], [(2, 8000)]]
    assert [node.capacity["gpu"] for node in workload.nodes] == [8000, 8000, 4000]
    assert "1 jobs without a run time: dropped" in workload.notes


def test_an_invalid_time_in_philly_is_reported_with_its_line(tmp_path: Path) -> None:
    (path := tmp_path / "p.csv").write_text(PHILLY + "yesterday,1.0,1,1.0,a\n")
    with pytest.raises(InvalidInput, match="line 6: timestamp is 'yesterday'"):
        open_workload(path)


PROW_COLUMNS = (
    "kind,repo,name,cpu_request,mem_request,cpu_limit,mem_limit,interval,cron,minimum_interval,max_concurrency,"
    "timeout,always_run,optional,cluster,file\n"
)
PROW = (
    PROW_COLUMNS
    + "periodics,,hourly,4,6Gi,4,6Gi,1h,,,,30m,,,c,config/jobs/org/team/x.yaml\n"
    + 'periodics,,twice,500m,1Gi,,,,"0 6,18 * * *",,,,,,c,config/jobs/org/team/x.yaml\n'
    + "presubmits,org/repo,unit,2,2Gi,,,,,,,1h,True,,c,f\n"
    + "presubmits,org/repo,lint,,,,,,,,,1h,True,,c,f\n"
)


def test_prow_has_periodic_jobs_by_interval_and_cron_and_all_jobs_of_each_push(tmp_path: Path) -> None:
    (path := tmp_path / "prow.csv").write_text(PROW)
    workload = open_workload(f"{path}?days=2&pushes=5", procs=8)
    by_name: dict[str, list[int]] = {}
    for job in workload.arrivals:
        by_name.setdefault(job.spec.name, []).append(job.at_ms)
        assert 10_000 <= job.run_ms <= job.spec.estimate_ms
    assert len(by_name["hourly"]) == 48
    assert {later - at for at, later in zip(by_name["hourly"], by_name["hourly"][1:], strict=False)} == {3_600_000}
    assert [at // 3_600_000 for at in by_name["twice"]] == [6, 18, 30, 42]
    assert by_name["unit"] == by_name["lint"]
    assert len(by_name["unit"]) == 10
    assert [node.capacity for node in workload.nodes] == [{"cpu": 8000, "memory": 32 * 2**30}]
    assert "1 of 4 definitions without a cpu or memory request: one cpu, one Gi is used" in workload.notes


def test_prow_depends_on_the_seed_alone(tmp_path: Path) -> None:
    (path := tmp_path / "prow.csv").write_text(PROW)
    first, repeated, other = (list(open_workload(f"{path}?seed={seed}").arrivals) for seed in (1, 1, 2))
    assert first == repeated
    assert first != other


def test_an_invalid_cron_schedule_is_reported_with_its_line(tmp_path: Path) -> None:
    (path := tmp_path / "prow.csv").write_text(PROW_COLUMNS + "periodics,,a,1,1Gi,,,,every day,,,,,,c,f\n")
    with pytest.raises(InvalidInput, match="line 2: 'every day' is not a schedule"):
        open_workload(path)


def test_a_prow_job_scheduled_for_an_impossible_date_never_arrives(tmp_path: Path) -> None:
    (path := tmp_path / "prow.csv").write_text(PROW + "periodics,,off,1,1Gi,,,,0 0 31 2 *,,,,,,c,f\n")
    assert "off" not in {job.spec.name for job in open_workload(f"{path}?days=60").arrivals}


@needs_traces
def test_the_real_philly_trace_is_read() -> None:
    assert len(open_workload(TRACES / "philly" / "philly.csv.gz").arrivals) == 82_247


@needs_traces
def test_a_day_of_real_prow_periodics_has_the_expected_number_of_jobs() -> None:
    """About 6577 a day by interval, and 405 by cron, most of them daily."""
    jobs = list(open_workload(f"{TRACES / 'prow-jobs' / 'prow_jobs.csv.gz'}?pushes=0").arrivals)
    assert len(jobs) > 6577 - 50 + 350
    assert max(job.at_ms for job in jobs) < 86_400_000
