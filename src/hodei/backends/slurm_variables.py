"""`SLURM_*` variables for jobs that were written for Slurm, on whichever backend they run.

A job asks for them by an annotation (`hodei convert` and the `sbatch` shim write it). What only the script's options tell
(how many tasks, the partition) is in the job's own `env`; what is known when a run starts is added here.
"""

from __future__ import annotations

from hodei.model.effects import Start
from hodei.model.job import JobSpec
from hodei.model.resources import CPU, MEMORY

ANNOTATION = "slurm.hodei.io/variables"
# Values of the annotation. `STEPS`: the script calls srun or mpirun, which need Slurm's own job id where Slurm runs it.
ALL, STEPS = "true", "steps"
# Slurm sets these itself, and knows better.
OF_THE_NODE = (
    "SLURMD_NODENAME", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_CLUSTER_NAME", "SLURM_CPUS_ON_NODE",
    "SLURM_JOB_CPUS_PER_NODE", "SLURM_GPUS_ON_NODE", "SLURM_MEM_PER_NODE",
)  # fmt: skip
JOB_IDS = ("SLURM_JOB_ID", "SLURM_JOBID")
OF_ARRAYS = (
    "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_COUNT", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_MAX",
    "SLURM_ARRAY_TASK_STEP",
)  # fmt: skip


def slurm_variables(order: Start) -> dict[str, str]:
    """Nothing for jobs that did not ask."""
    if order.spec.annotations.get(ANNOTATION) not in (ALL, STEPS):
        return {}
    run, spec, task = order.run, order.spec, order.task
    given = task.env
    tasks = given.get("SLURM_NTASKS") or str(max(order.world_size, task.count))
    nodes = given.get("SLURM_NNODES") or "1"
    per_node = _number(given.get("SLURM_NTASKS_PER_NODE")) or -(-_number(tasks) // max(1, _number(nodes)))
    cpus = max(1, -(-task.request.get(CPU, 1000) // 1000))
    # In a gang every member is one task; a job of one member has all its tasks on one node.
    tasks_here = per_node if task.count > 1 else max(1, _number(tasks))
    cpus_here = cpus * tasks_here if task.count > 1 else cpus
    places = ",".join(dict.fromkeys(order.addresses)) if task.count > 1 and order.addresses else run.node
    several = f"(x{nodes})" if _number(nodes) > 1 else ""
    out = {
        **dict.fromkeys(JOB_IDS, str(run.job)),
        "SLURM_JOB_NAME": given.get("SLURM_JOB_NAME") or spec.name,
        "SLURM_PROCID": str(run.rank),
        "SLURM_LOCALID": str(run.rank % max(1, per_node)) if task.count > 1 else "0",
        "SLURM_NODEID": str(run.rank // max(1, per_node)) if task.count > 1 else "0",
        **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), tasks),
        **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), nodes),
        **dict.fromkeys(("SLURM_NODELIST", "SLURM_JOB_NODELIST"), places),
        "SLURM_TASKS_PER_NODE": f"{tasks_here}{several}",
        "SLURM_CPUS_PER_TASK": given.get("SLURM_CPUS_PER_TASK") or str(cpus),
        "SLURM_CPUS_ON_NODE": str(cpus_here),
        "SLURM_JOB_CPUS_PER_NODE": f"{cpus_here}{several}",
        "SLURMD_NODENAME": run.node,
        "SLURM_CLUSTER_NAME": run.backend,
        **array_variables(spec),
    }
    if memory := task.request.get(MEMORY, 0):
        out["SLURM_MEM_PER_NODE"] = str(-(-memory * (tasks_here if task.count > 1 else 1) // (1 << 20)))
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
    """Where Slurm runs it and sets variables of its own: those that count instead, and those that must not be seen.

    Runs are handed to Slurm in arrays of Hodei's making, whose numbers mean nothing to the job."""
    own = slurm_variables(order)
    kept = OF_THE_NODE if order.task.count == 1 else ("SLURMD_NODENAME", "SLURM_CLUSTER_NAME")
    if order.spec.annotations.get(ANNOTATION) == STEPS and order.task.count == 1:
        kept = (*kept, *JOB_IDS)
    own = {name: value for name, value in own.items() if name not in kept} | array_variables(order.spec)
    return own, () if order.spec.array is not None else OF_ARRAYS


def _number(text: str | None) -> int:
    return int(text) if text is not None and text.isascii() and text.isdigit() else 0
