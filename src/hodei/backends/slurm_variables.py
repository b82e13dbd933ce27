"""`SLURM_*` variables for jobs that were written for Slurm, on any backend.

A job requests them by an annotation (`hodei convert` and the `sbatch` shim set it). What comes from the script's options
(number of tasks, partition) is in the job's own `env`; what is known when a run starts is added here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby
from typing import NamedTuple

from hodei.model.effects import Start
from hodei.model.job import JobSpec
from hodei.model.resources import CPU, MEMORY

# More names than this in one list is a mistake (`n[1-999999999]`).
MOST_HOSTS = 100_000


def folded_hosts(names: Iterable[str]) -> str:
    """`n[1-4],gpu2`: names that differ only in their last number are folded."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        found = re.fullmatch(r"(.*?)(\d+)", name)
        stem, number = (found[1], found[2]) if found else (name, "")
        groups.setdefault((stem, len(number) if number.startswith("0") else 0 if number else -1), []).append(
            int(number or 0)
        )
    out = []
    for (stem, width), numbers in groups.items():
        parts = [f"{first:0{max(width, 1)}}" + (f"-{last:0{max(width, 1)}}" if last > first else "")
                 for first, last in _runs(sorted(numbers))]  # fmt: skip
        alone = len(parts) == 1 and "-" not in parts[0]
        out.append(stem if width < 0 else f"{stem}{parts[0]}" if alone else f"{stem}[{','.join(parts)}]")
    return ",".join(out)


def folded_numbers(numbers: Iterable[int]) -> str:
    """`1,3,7-9`."""
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in _runs(sorted(numbers)))


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1] = (out[-1][0], number)
        else:
            out.append((number, number))
    return out


def hosts_in_order(names: Iterable[str]) -> str:
    """Folded only if that keeps the order: scripts use the first host as the master."""
    listed = list(dict.fromkeys(names))
    folded = folded_hosts(listed)
    try:
        return folded if hosts(folded) == listed else ",".join(listed)
    except ValueError:  # names with brackets of their own
        return ",".join(listed)


def counts(numbers: Iterable[int]) -> str:
    """`2(x3),1`: the format of SLURM_TASKS_PER_NODE."""
    runs = [(number, len(list(group))) for number, group in groupby(numbers)]
    return ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)


def hosts(text: str) -> list[str]:
    """The names in `n[1-3,07],gpu2`, in order. ValueError if it is not a host list."""
    out: list[str] = []
    for word in _split(text):
        found = [""]
        for text_part, range_part in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word):
            ends = [text_part] if text_part else _numbers(range_part)
            if len(found) * len(ends) > MOST_HOSTS:
                raise ValueError(f"more than {MOST_HOSTS} hosts")
            found = [f"{stem}{end}" for stem in found for end in ends]
        out += found
    return out


def _split(text: str) -> list[str]:
    """At commas outside of brackets."""
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(words) != text:
        raise ValueError(f"{text[:60]!r} is not a host list")
    return words


def _numbers(text: str) -> list[str]:
    out: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part[:60]!r} is not a range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        out += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return out


ANNOTATION = "slurm.hodei.io/variables"
# Values of the annotation. `STEPS`: the script calls srun or mpirun, which need Slurm's own job id where Slurm runs it.
ALL, STEPS = "true", "steps"
# Where Slurm runs the job, its own values of these are right.
OF_THE_NODE = (
    "SLURMD_NODENAME", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE",
)  # fmt: skip
JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")
OF_ARRAYS = (
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_STEP",
)  # fmt: skip


class _TaskLayout(NamedTuple):
    """Slurm's view of a job: `tasks` and `members` of each node, in the order of node ids. `first`: the rank of this member's
    first task, `local`: its number on the node, `node`: the node's id. `names`: empty if they are unknown."""

    tasks: list[int]
    members: list[int]
    first: int
    local: int
    node: int
    names: tuple[str, ...]


def _task_layout(order: Start) -> _TaskLayout:
    """Tasks are distributed over the members in even blocks. Nodes get their ids in the order of ranks."""
    cluster, rank = max(order.world_size, 1), order.run.rank
    total = max(_number(order.task.env.get("SLURM_NTASKS")), cluster)
    each = [total // cluster + (number < total % cluster) for number in range(cluster)]
    if not 0 <= rank < cluster:  # a rank beyond the gang's size: only the run itself is known
        return _TaskLayout([each[0]], [1], 0, 0, 0, ())
    # Orders of very large gangs do not list the nodes: assume one node per member, as jobs with several nodes request.
    known = order.nodes if len(order.nodes) == cluster else ()
    places = known or ((order.run.node,) if cluster == 1 else tuple(map(str, range(cluster))))
    tasks, members = dict[str, int](), dict[str, int]()
    local = 0
    for number, place in enumerate(places):
        if number == rank:
            local = tasks.get(place, 0)
        tasks[place] = tasks.get(place, 0) + each[number]
        members[place] = members.get(place, 0) + 1
    names = tuple(tasks) if known or cluster == 1 else ()
    node = list(tasks).index(places[rank])
    return _TaskLayout(list(tasks.values()), list(members.values()), sum(each[:rank]), local, node, names)


def slurm_variables(order: Start) -> dict[str, str]:
    """Empty for jobs without the annotation."""
    if order.spec.annotations.get(ANNOTATION) not in (ALL, STEPS):
        return {}
    run, spec, task = order.run, order.spec, order.task
    given = task.env
    layout = _task_layout(order)
    cpus = max(1, -(-task.request.get(CPU, 1000) // 1000))
    out = {
        **dict.fromkeys(JOB_IDS, str(run.job)),
        "SLURM_JOB_NAME": given.get("SLURM_JOB_NAME") or spec.name,
        "SLURM_PROCID": str(layout.first),
        "SLURM_LOCALID": str(layout.local),
        "SLURM_NODEID": str(layout.node),
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), str(sum(layout.tasks))),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), str(len(layout.tasks))),
        "SLURM_TASKS_PER_NODE": counts(layout.tasks),
        "SLURM_CPUS_PER_TASK": given.get("SLURM_CPUS_PER_TASK") or str(cpus),
        "SLURM_CPUS_ON_NODE": str(cpus * layout.members[layout.node]),
        "SLURM_JOB_CPUS_PER_NODE": counts(cpus * members for members in layout.members),
        "SLURMD_NODENAME": run.node,
        "SLURM_CLUSTER_NAME": run.backend,
        **array_variables(spec),
    }
    if layout.names:
        out |= dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), hosts_in_order(layout.names))
    if memory := task.request.get(MEMORY, 0):
        out["SLURM_MEM_PER_NODE"] = str(-(-memory * layout.members[layout.node] // (1 << 20)))
    if submitted_in := given.get("SLURM_SUBMIT_DIR") or task.workdir:
        out["SLURM_SUBMIT_DIR"] = submitted_in
    if run.attempt > 1:
        out["SLURM_RESTART_COUNT"] = str(run.attempt - 1)
    if run.grant is not None and run.grant.gpus:
        out["SLURM_GPUS_ON_NODE"] = str(len({gpu for gpu, _ in run.grant.gpus}))
    return out


def array_variables(spec: JobSpec) -> dict[str, str]:
    place = spec.array
    if place is None:
        return {}
    values = (place.first, place.index, place.count, place.indices[0], place.indices[-1], place.step)
    return dict(zip(OF_ARRAYS, map(str, values), strict=True))


def within_slurm(order: Start) -> tuple[dict[str, str], tuple[str, ...]]:
    """Where Slurm runs the job and sets variables itself: those to replace, and those to unset.

    Hodei submits runs in Slurm arrays of its own, whose numbers mean nothing to the job."""
    own = slurm_variables(order)
    if own and order.nodes:
        # Without the prefix of the backend: Slurm's own node names.
        names = [node.removeprefix(f"{order.run.backend}-") for node in order.nodes]
        own |= dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), hosts_in_order(names))
    kept = OF_THE_NODE if order.task.count == 1 else ("SLURMD_NODENAME", "SLURM_CLUSTER_NAME")
    if order.spec.annotations.get(ANNOTATION) == STEPS and order.task.count == 1:
        kept = (*kept, *JOB_IDS)
    own = {name: value for name, value in own.items() if name not in kept} | array_variables(order.spec)
    return own, () if order.spec.array is not None else OF_ARRAYS


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0
