"""`SLURM_*` variables of jobs that were written for Slurm; `real/slurm/test_shims` compares them with a real Slurm."""

from __future__ import annotations

import pytest
from msgspec import structs

from agent_host import an_order
from hodei.backends.base import run_env
from hodei.backends.slurm_variables import ANNOTATION, OF_ARRAYS, within_slurm
from hodei.model.array import ArrayElement
from hodei.model.effects import Start

WITH_VARIABLES = {ANNOTATION: "true"}


def an_order_with_variables(number: int = 7, *, rank: int = 0, **fields: object) -> Start:
    order = an_order(number, "true", **{"annotations": WITH_VARIABLES, **fields})
    return structs.replace(order, run=structs.replace(order.run, rank=rank), world_size=order.task.count)


def slurm_of(order: Start) -> dict[str, str]:
    return {name: value for name, value in run_env(order).items() if name.startswith("SLURM")}


def test_only_jobs_with_the_annotation_get_slurm_variables():
    assert slurm_of(an_order(7, "true")) == {}
    assert slurm_of(an_order(7, "true", annotations={ANNOTATION: "no"})) == {}


def test_a_job_of_one_task_has_its_id_directory_and_size():
    env = slurm_of(an_order_with_variables(workdir="/data", cpu="1500m"))
    assert {name: env[name] for name in ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_SUBMIT_DIR", "SLURM_CPUS_PER_TASK")} == {
        "SLURM_JOB_ID": "7", "SLURM_JOBID": "7", "SLURM_SUBMIT_DIR": "/data", "SLURM_CPUS_PER_TASK": "2",
    }  # fmt: skip
    assert [env[f"SLURM_{name}"] for name in ("NTASKS", "NNODES", "PROCID", "LOCALID", "NODEID")] == list("11000")
    assert not set(OF_ARRAYS) & set(env)


def gang(rank: int, nodes: str, **fields: object) -> dict[str, str]:
    """The variables of the member of that rank, in a gang on these nodes."""
    names = tuple(nodes.split())
    order = an_order_with_variables(rank=rank, count=len(names), **fields)
    return slurm_of(structs.replace(order, run=structs.replace(order.run, node=names[rank]), nodes=names))


IDS = ("PROCID", "LOCALID", "NODEID", "NTASKS", "NNODES", "TASKS_PER_NODE", "JOB_NODELIST")


@pytest.mark.parametrize(
    ("nodes", "tasks", "rank", "expected"),
    [
        ("n1 n2 n3 n4", 64, 0, "0 0 0 64 4 16(x4) n[1-4]"),
        ("n1 n2 n3 n4", 64, 3, "48 0 3 64 4 16(x4) n[1-4]"),
        ("n2 n1", 5, 1, "3 0 1 5 2 3,2 n2,n1"),
        ("n1 n1 n2", 3, 1, "1 1 0 3 2 2,1 n[1-2]"),
        ("n1 n2 n1", 3, 2, "2 1 0 3 2 2,1 n[1-2]"),
        ("n1 n1", 0, 1, "1 1 0 2 1 2 n1"),
    ],
    ids=["first", "last", "uneven, in order of rank", "two on a node", "alternating", "all on one"],
)
def test_ids_and_counts_are_those_of_the_real_placement(nodes, tasks, rank, expected):
    env = gang(rank, nodes, env={"SLURM_NTASKS": str(tasks), "SLURM_NNODES": "9"} if tasks else {})
    assert " ".join(env[f"SLURM_{name}"] for name in IDS) == expected


def test_all_members_get_the_same_node_list_and_the_totals_of_their_node():
    environments = [gang(rank, "a b a", cpu=2, memory="100Mi") for rank in range(3)]
    assert {env["SLURM_NODELIST"] for env in environments} == {"a,b"}
    assert [env["SLURM_CPUS_ON_NODE"] for env in environments] == ["4", "2", "4"]
    assert {env["SLURM_JOB_CPUS_PER_NODE"] for env in environments} == {"4,2"}
    assert [env["SLURM_MEM_PER_NODE"] for env in environments] == ["200", "100", "200"]


def test_without_known_nodes_there_is_no_node_list():
    env = slurm_of(an_order_with_variables(rank=2, count=4))
    assert (env["SLURM_NODEID"], env["SLURM_NNODES"]) == ("2", "4")
    assert "SLURM_JOB_NODELIST" not in env


def test_a_job_of_one_member_may_have_several_tasks():
    env = slurm_of(an_order_with_variables(cpu=8, env={"SLURM_NTASKS": "4", "SLURM_CPUS_PER_TASK": "2"}))
    names = ("NTASKS", "TASKS_PER_NODE", "CPUS_PER_TASK", "CPUS_ON_NODE", "PROCID")
    assert [env[f"SLURM_{name}"] for name in names] == ["4", "4", "2", "8", "0"]


@pytest.mark.parametrize(
    ("element", "values"),
    [
        (ArrayElement(5, 8, 3, 2, 5, 3), ("5", "8", "3", "5", "11", "3")),
        (ArrayElement(5, 7, 5, 0, 1, 1, "1,3,7-9"), ("5", "7", "5", "1", "9", "1")),
    ],
    ids=["steps", "a list"],
)
def test_an_element_has_its_index_and_the_range_of_its_array(element, values):
    env = slurm_of(an_order_with_variables(array=element))
    assert tuple(env[name] for name in OF_ARRAYS) == values


def test_within_slurm_array_variables_are_those_of_the_job_or_hidden():
    element = ArrayElement(5, 8, 3, 0, 5, 3)
    env, hidden = within_slurm(an_order(7, "true", array=element))
    assert (env["SLURM_ARRAY_TASK_ID"], env["SLURM_ARRAY_JOB_ID"], hidden) == ("8", "5", ())
    assert within_slurm(an_order(7, "true")) == ({}, OF_ARRAYS)


def test_within_slurm_srun_uses_the_job_id_of_slurm():
    plain, _ = within_slurm(an_order_with_variables())
    steps, _ = within_slurm(an_order_with_variables(annotations={ANNOTATION: "steps"}))
    assert plain["SLURM_JOB_ID"] == "7"
    assert "SLURM_JOB_ID" not in steps
    assert "SLURMD_NODENAME" not in plain
