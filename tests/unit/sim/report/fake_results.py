"""Seeded results of three fake policies, for tests of the report.

A greedy list scheduler makes the starts, and the policies differ only in the order of the queue. The results prove nothing about
real policies; they have the shapes that a report must handle.
"""

from __future__ import annotations

import heapq
import random

from hodei.sim.metrics import Outcome, Result, Sample

HOUR = 3_600_000
POLICIES = ("fcfs", "easy", "hodei")


def some_results(jobs: int = 400, *, nodes: int = 12, pooled: bool = False, seed: int = 7) -> list[Result]:
    return [a_result(policy, jobs, nodes=nodes, pooled=pooled, seed=seed) for policy in POLICIES]


def a_result(policy: str, jobs: int, *, nodes: int = 12, pooled: bool = False, seed: int = 7) -> Result:
    """`nodes` nodes of 8 cpu and 2 gpu, one job per node at a time; as a pool, one node with all of them."""
    requests = _requests(jobs, nodes, seed)
    keys = {
        "fcfs": lambda n: (requests[n][0], n),
        "easy": lambda n: (requests[n][1] * requests[n][2], n),
        "hodei": lambda n: (requests[n][2], n),
    }
    free, gpus = list(range(nodes)), 0
    ending: list[tuple[int, int, tuple[int, ...]]] = []
    queue: list[tuple[object, int]] = []
    outcomes: list[Outcome] = []
    samples: list[Sample] = []
    now, arrived, preempted = 0, 0, 0
    rng = random.Random(f"{seed} {policy}")
    while arrived < jobs or queue or ending:
        moments = [requests[arrived][0]] if arrived < jobs else []
        moments += [ending[0][0]] if ending else []
        now = min(moments)
        while arrived < jobs and requests[arrived][0] <= now:
            heapq.heappush(queue, (keys[policy](arrived), arrived))
            arrived += 1
        while ending and ending[0][0] <= now:
            done = heapq.heappop(ending)
            free += done[2]
            gpus -= requests[done[1]][4] * 2000 * len(done[2])
        free.sort()
        while queue and requests[queue[0][1]][1] <= len(free):
            n = heapq.heappop(queue)[1]
            submitted, width, length, user, gpu = requests[n]
            taken, free = tuple(free[:width]), free[width:]
            gpus += gpu * 2000 * width
            heapq.heappush(ending, (now + length, n, taken))
            preemptions = int(policy != "fcfs" and rng.random() < 0.03)
            preempted += preemptions
            outcomes.append(
                Outcome(
                    id=n + 1,
                    name=f"train-{n % 17}" if gpu else f"build-{n % 5}",
                    user=user,
                    project="p",
                    submitted_ms=1_000_000 + submitted,
                    started_ms=1_000_000 + now,
                    ended_ms=1_000_000 + now + length,
                    request={"cpu": 8000 * width, "gpu": gpu * 2000 * width},
                    size=width,
                    nodes=("pool",) if pooled else tuple(f"n{i}" for i in taken),
                    estimate_ms=length * 2,
                    kind=rng.choice(("head", "backfill", "spill")) if policy != "fcfs" else "head",
                    preemptions=preemptions,
                )
            )
        used = nodes - len(free)
        samples.append(
            Sample(
                at_ms=1_000_000 + now,
                used={"cpu": used * 8000, "gpu": gpus},
                running=len(ending),
                waiting=len(queue),
                preemptions=preempted,
                fragmented=min(1000, rng.randrange(40, 120) * (1 + POLICIES.index(policy))),
            )
        )
    outcomes.sort(key=lambda job: job.id)
    capacity = {"cpu": 8000 * nodes, "gpu": 2000 * nodes}
    return Result(policy, "fake", capacity, outcomes, samples, seconds=0.5)


def _requests(jobs: int, nodes: int, seed: int) -> list[tuple[int, int, int, str, int]]:
    """(submitted, width, length, user, gpu?) in order of submission, at a load of about four fifths."""
    rng = random.Random(seed)
    users = [f"user{n}" for n in range(12)]
    weights = [1 / (n + 1) for n in range(12)]
    out, now = [], 0.0
    for _ in range(jobs):
        width = min(nodes, rng.choice((1, 1, 1, 1, 2, 2, 4, 8)))
        length = int(min(24.0, rng.lognormvariate(-0.5, 1.4)) * HOUR)
        out.append((int(now), width, length, rng.choices(users, weights)[0], int(rng.random() < 0.8)))
        now += rng.expovariate(1.0) * 2.9 * 1.6 * HOUR / nodes * 1.3
    return out
