"""How firmly a member's resources are promised: Kubernetes' classes, from its requests and limits of cpu and memory.

The requests are those that count for placement. When a job file says nothing, its defaults have been filled in before
(as a LimitRange does in Kubernetes) and the task is burstable; best-effort is said with requests of 0 and no limits.
"""

from __future__ import annotations

from typing import Literal

from hodei.model.job import JobSpec, TaskSpec
from hodei.model.resources import CPU, MEMORY

QoS = Literal["guaranteed", "burstable", "best-effort"]
# Who has to go first, and who last, among jobs of equal priority.
FIRMNESS: dict[QoS, int] = {"best-effort": 0, "burstable": 1, "guaranteed": 2}
# As the kubelet does: the kernel kills best-effort first when memory runs out, then those who asked for little of it.
_OOM_GUARANTEED, _OOM_BEST_EFFORT = -997, 1000
_OOM_BURSTABLE = (3, 999)
_LEAST_SHARES, _MOST_SHARES, _SHARES_PER_CORE = 2, 262_144, 1024


def qos(task: TaskSpec) -> QoS:
    """Guaranteed: cpu and memory both have a limit, equal to the request. Best-effort: neither has request or limit.
    An amount of 0 is as good as none; a limit without a request is a request of the same amount."""
    request, limits = task.request, task.limits
    cpu, memory = limits.get(CPU, 0), limits.get(MEMORY, 0)
    if cpu and memory and request.get(CPU, cpu) == cpu and request.get(MEMORY, memory) == memory:
        return "guaranteed"
    return "burstable" if cpu or memory or request.get(CPU) or request.get(MEMORY) else "best-effort"


def job_qos(spec: JobSpec) -> QoS:
    """The weakest of its tasks'."""
    classes = [qos(task) for task in spec.tasks]
    if "best-effort" in classes:
        return "best-effort"
    return "burstable" if "burstable" in classes else "guaranteed"


def oom_score_adj(task: TaskSpec, memory_bytes: int) -> int:
    """What is added to the score by which the kernel chooses whom to kill; `memory_bytes` is what the host has."""
    kind = qos(task)
    if kind == "guaranteed":
        return _OOM_GUARANTEED
    if kind == "best-effort":
        return _OOM_BEST_EFFORT
    least, most = _OOM_BURSTABLE
    share = task.request.get(MEMORY, 0) * 1000 // memory_bytes if memory_bytes else 0
    return min(max(1000 - share, least), most)


def cpu_shares(task: TaskSpec) -> int:
    """Its weight when all want the cpu at once: 1024 for each core asked for, the least that there is for who asks for none."""
    asked = task.request.get(CPU, task.limits.get(CPU, 0))
    return min(max(asked * _SHARES_PER_CORE // 1000, _LEAST_SHARES), _MOST_SHARES)
