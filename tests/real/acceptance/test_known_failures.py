"""Known failures of other schedulers, reproduced with real processes: preempted jobs, and gangs that lose a member.

The same cases for the controller alone are in `unit/control/test_known_failures*.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent_host import alive
from real.acceptance.cluster import Cluster, single_core_nodes
from real.installation import until

pytestmark = pytest.mark.real

NAMES = ["n1", "n2"]
TWO = single_core_nodes(*NAMES)


def test_a_preempted_job_is_requeued_and_finishes(cluster: Cluster) -> None:
    """Elsewhere: a victim never ran again. Here: it is requeued, even if the server is killed meanwhile."""
    cluster.up_with(*single_core_nodes("n1"))
    victim = cluster.run_ignoring_term("victim", priority="low", restart="never")
    high = cluster.submit_job("high", priority="high")
    until(lambda: cluster.why(high).code == "PREEMPTING", "the victim is being stopped")
    cluster.kill()  # before the victim has stopped
    cluster.up()
    cluster.finish("victim")
    cluster.until_running(high)
    assert cluster.state(victim) == "pending"
    cluster.finish("high")
    (detail,) = cluster.ended(victim)
    assert (detail.job.state, [run.state for run in detail.runs]) == ("succeeded", ["stopped", "succeeded"])


def test_a_job_that_is_preempted_twice_succeeds_in_its_third_attempt(cluster: Cluster) -> None:
    """Elsewhere: a preempted job counted as failed. Here: preemption uses up no retry."""
    cluster.up_with(*single_core_nodes("n1"))
    command = ["sh", "-c", "test $HODEI_ATTEMPT = 3 || sleep 600; echo done"]
    victim = cluster.run_job("victim", priority="low", retries=0, command=command)
    for i in (1, 2):
        high = cluster.run_job(f"high-{i}", priority="high")
        cluster.finish(f"high-{i}")
        cluster.ended(high)
        if i == 1:
            cluster.until_running(victim)
    (detail,) = cluster.ended(victim)
    assert (detail.job.state, [run.state for run in detail.runs]) == ("succeeded", ["stopped", "stopped", "succeeded"])
    assert cluster.log_of(victim) == "done\n"


def test_two_gangs_that_do_not_fit_together_run_one_after_the_other(cluster: Cluster) -> None:
    """Elsewhere: each held half of the nodes and waited for the rest. Here: one runs whole, then the other."""
    cluster.up_with(*single_core_nodes("n1", "n2", "n3"))
    first = cluster.run_job("first", count=2)
    second = cluster.submit_job("second", count=2)
    assert "1 of 2 members fit" in cluster.until_refused(second).summary
    single = cluster.run_job("single")  # a node that the second gang cannot use yet is not held for it
    cluster.finish("first")
    cluster.until_running(second)
    assert sorted((*cluster.nodes_of(second), cluster.node_of(single))) == ["n1", "n2", "n3"]
    assert len({run.placed_at for run in cluster.members(second)}) == 1
    cluster.finish("second")
    assert [detail.job.attempt for detail in cluster.ended(first, second)] == [1, 1]


def a_gang(cluster: Cluster, tmp_path: Path, **fields: Any) -> int:
    """A gang on both nodes, whose members write the pids of their wrapper and of themselves; and a pending filler."""
    file = f"{tmp_path}/pids-$HODEI_RANK-$HODEI_ATTEMPT"
    write = f"echo $PPID $$ >{file}.tmp && mv {file}.tmp {file}"
    wait = f"while [ ! -e {tmp_path}/finished/gang ]; do sleep 0.05; done"
    gang = cluster.run_job("gang", count=2, command=["sh", "-c", f"{write}; {wait}"], **fields)
    cluster.until_refused(cluster.submit_job("filler"))
    return gang


def pids(tmp_path: Path, rank: int, attempt: int) -> tuple[int, int]:
    """The pids of a member's wrapper and of its command."""
    file = tmp_path / f"pids-{rank}-{attempt}"
    until(file.exists, f"rank {rank} of attempt {attempt} has written its pids")
    wrapper, command = map(int, file.read_text().split())
    return wrapper, command


def lose(cluster: Cluster, wrapper: int, command: int) -> None:
    """Kill the member, its wrapper and the agent, so that its exit code is lost."""
    cluster.kill_agent()
    os.killpg(wrapper, signal.SIGKILL)
    until(lambda: not alive(wrapper) and not alive(command), "the member has exited")


def test_a_lost_member_is_replaced_before_a_filler_starts(cluster: Cluster, tmp_path: Path) -> None:
    """Elsewhere: a filler took the node and the rest of the gang waited for ever. Here: the member is replaced first."""
    cluster.up_with(*TWO)
    gang = a_gang(cluster, tmp_path, gang={"on_failure": "repair"})
    filler = gang + 1
    sibling = pids(tmp_path, 0, 1)
    lose(cluster, *pids(tmp_path, 1, 1))
    assert alive(pids(tmp_path, 1, 2)[1])
    assert (cluster.state(filler), cluster.state(gang)) == ("pending", "running")
    assert alive(sibling[1])
    by_id = {run.id: run for run in cluster.job(gang).runs}
    assert (by_id[f"{gang}.1.1"].state, by_id[f"{gang}.1.2"].member) == ("lost", 1)
    cluster.finish("gang")
    (detail,) = cluster.ended(gang)
    assert detail.job.state == "succeeded"
    assert sorted(run.id for run in detail.runs) == [f"{gang}.0.1", f"{gang}.1.1", f"{gang}.1.2"]
    cluster.until_running(filler)


def test_a_killed_member_is_started_again_alone(cluster: Cluster, tmp_path: Path) -> None:
    """Elsewhere: one crash restarted all members. Here: with `on_failure: repair` only that member starts again."""
    cluster.up_with(*TWO, config='[scheduling.retry]\nbase = "100ms"\n')
    gang = a_gang(cluster, tmp_path, gang={"on_failure": "repair"}, retries=1)
    sibling = pids(tmp_path, 0, 1)
    os.kill(pids(tmp_path, 1, 1)[1], signal.SIGKILL)
    assert alive(pids(tmp_path, 1, 2)[1])
    assert alive(sibling[1])
    assert cluster.state(gang + 1) == "pending"
    cluster.finish("gang")
    assert cluster.ended(gang)[0].job.state == "succeeded"


def test_a_gang_without_repair_that_lost_a_member_starts_again_whole(cluster: Cluster, tmp_path: Path) -> None:
    """Elsewhere: the rest kept running and held its nodes. Here: all members are stopped and started again."""
    cluster.up_with(*TWO, config='[scheduling.retry]\nbase = "100ms"\n')
    gang = a_gang(cluster, tmp_path)
    sibling = pids(tmp_path, 0, 1)
    lose(cluster, *pids(tmp_path, 1, 1))
    until(lambda: not alive(sibling[1]), "the sibling is stopped too")
    cluster.until_running(gang + 1)  # the filler uses the free node
    cluster.finish("filler", "gang")
    (detail,) = cluster.ended(gang)
    assert detail.job.state == "succeeded"
    assert [run.id for run in detail.runs if run.state == "succeeded"] == [f"{gang}.0.2", f"{gang}.1.2"]
