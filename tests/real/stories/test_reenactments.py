"""What broke in other schedulers, played again with real processes: victims that must come back, gangs that lose a member.

Exactly who goes and who stays is shown case by case for the controller, in `unit/control/test_known_failures*.py`.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from agent_host import alive
from real.installation import until
from real.stories.cluster import Cluster, one_job_per_node

pytestmark = pytest.mark.real

NAMES = ["n1", "n2"]
TWO = one_job_per_node(*NAMES)


def test_a_preempted_job_is_requeued_and_finishes(cluster: Cluster) -> None:
    """Elsewhere: a victim was gone for good. Here: it comes back by itself, though the server was killed meanwhile."""
    cluster.of(*one_job_per_node("n1"))
    victim = cluster.run_stubborn("victim", priority="low", restart="never")
    high = cluster.want("high", priority="high")
    until(lambda: cluster.why(high).code == "PREEMPTING", "room is being made")
    cluster.kill()  # the victim has been told to go, and has not gone
    cluster.up()
    cluster.finish("victim")
    cluster.until_running(high)
    assert cluster.state(victim) == "pending"
    cluster.finish("high")
    (detail,) = cluster.ended(victim)
    assert (detail.job.state, [run.state for run in detail.runs]) == ("succeeded", ["stopped", "succeeded"])


def test_a_job_that_is_preempted_twice_ends_well_in_the_end(cluster: Cluster) -> None:
    """Elsewhere: a preempted job counted as failed. Here: it loses no retry, and it is tried until it is left alone."""
    cluster.of(*one_job_per_node("n1"))
    command = ["sh", "-c", "test $HODEI_ATTEMPT = 3 || sleep 600; echo done"]
    victim = cluster.run("victim", priority="low", retries=0, command=command)
    for i in (1, 2):
        high = cluster.run(f"high-{i}", priority="high")
        cluster.finish(f"high-{i}")
        cluster.ended(high)
        if i == 1:
            cluster.until_running(victim)
    (detail,) = cluster.ended(victim)
    assert (detail.job.state, [run.state for run in detail.runs]) == ("succeeded", ["stopped", "stopped", "succeeded"])
    assert cluster.log_of(victim) == "done\n"


def test_two_gangs_that_would_hold_half_each_run_one_after_the_other(cluster: Cluster) -> None:
    """Elsewhere: each held half of the nodes and waited for the rest. Here: one runs whole, then the other."""
    cluster.of(*one_job_per_node("n1", "n2", "n3"))
    first = cluster.run("first", count=2)
    second = cluster.want("second", count=2)
    assert "1 of 2 members fit" in cluster.until_refused(second).summary
    single = cluster.run("single")  # what the second cannot use whole is not kept from others
    cluster.finish("first")
    cluster.until_running(second)
    assert sorted((*cluster.nodes_of(second), cluster.node_of(single))) == ["n1", "n2", "n3"]
    assert len({run.placed_at for run in cluster.members(second)}) == 1
    cluster.finish("second")
    assert [detail.job.attempt for detail in cluster.ended(first, second)] == [1, 1]


def a_gang(cluster: Cluster, tmp_path: Path, **fields: Any) -> int:
    """A gang on both nodes, whose members write down who watches over them and who they are; and a filler that waits."""
    said = f"echo $PPID $$ >{tmp_path}/said-$HODEI_RANK-$HODEI_ATTEMPT.tmp"
    said += f" && mv {tmp_path}/said-$HODEI_RANK-$HODEI_ATTEMPT.tmp {tmp_path}/said-$HODEI_RANK-$HODEI_ATTEMPT"
    stay = f"while [ ! -e {tmp_path}/ends/gang ]; do sleep 0.05; done"
    gang = cluster.run("gang", count=2, command=["sh", "-c", f"{said}; {stay}"], **fields)
    cluster.until_refused(cluster.want("filler"))
    return gang


def pids(tmp_path: Path, rank: int, attempt: int) -> tuple[int, int]:
    file = tmp_path / f"said-{rank}-{attempt}"
    until(file.exists, f"rank {rank} of attempt {attempt} has said who it is")
    watcher, itself = map(int, file.read_text().split())
    return watcher, itself


def lose(cluster: Cluster, watcher: int, itself: int) -> None:
    """The member vanishes together with all who could tell how it ended."""
    cluster.kill_agent()
    os.killpg(watcher, signal.SIGKILL)
    until(lambda: not alive(watcher) and not alive(itself), "it is gone")


def test_the_slot_of_a_lost_member_is_not_taken_by_a_filler(cluster: Cluster, tmp_path: Path) -> None:
    """Elsewhere: a filler took the slot and the rest waited in vain. Here: the lost member comes back, the others run on."""
    cluster.of(*TWO)
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
    """Elsewhere: one crash threw the work of all members away. Here: with `on_failure: repair` only that one starts again."""
    cluster.of(*TWO, config='[scheduling.retry]\nbase = "100ms"\n')
    gang = a_gang(cluster, tmp_path, gang={"on_failure": "repair"}, retries=1)
    sibling = pids(tmp_path, 0, 1)
    os.kill(pids(tmp_path, 1, 1)[1], signal.SIGKILL)
    assert alive(pids(tmp_path, 1, 2)[1])
    assert alive(sibling[1])
    assert cluster.state(gang + 1) == "pending"
    cluster.finish("gang")
    assert cluster.ended(gang)[0].job.state == "succeeded"


def test_a_gang_without_repair_that_lost_a_member_starts_again_whole(cluster: Cluster, tmp_path: Path) -> None:
    """Elsewhere: the rest ran on and held its nodes. Here: the gang leaves whole, and all its members start again."""
    cluster.of(*TWO, config='[scheduling.retry]\nbase = "100ms"\n')
    gang = a_gang(cluster, tmp_path)
    sibling = pids(tmp_path, 0, 1)
    lose(cluster, *pids(tmp_path, 1, 1))
    until(lambda: not alive(sibling[1]), "the sibling has left too")
    cluster.until_running(gang + 1)  # the room is free: the filler has it
    cluster.finish("filler", "gang")
    (detail,) = cluster.ended(gang)
    assert detail.job.state == "succeeded"
    assert [run.id for run in detail.runs if run.state == "succeeded"] == [f"{gang}.0.2", f"{gang}.1.2"]
