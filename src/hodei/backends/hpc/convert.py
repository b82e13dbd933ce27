"""A batch script as a job document, with a word on everything that could not be taken over. Reads text, does nothing."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable
from typing import Any

from hodei.backends.hpc.batch_lines import BatchScript, Option, parse_script
from hodei.backends.hpc.pbs_states import minutes as pbs_minutes
from hodei.backends.hpc.slurm_options import LET_THROUGH

Document = dict[str, Any]
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPU = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)")
_UNITS = {"": "Mi", "K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
_MAIL = ("mail-type", "mail-user")
# What a script may use of its system, and what there is instead.
_VARIABLES = {
    "SLURM_ARRAY_TASK_ID": "HODEI_ARRAY_INDEX",
    "SLURM_JOB_ID": "HODEI_JOB_ID",
    "SLURM_JOBID": "HODEI_JOB_ID",
    "SLURM_PROCID": "HODEI_RANK",
    "SLURM_NTASKS": "HODEI_WORLD_SIZE",
    "SLURM_SUBMIT_DIR": "the key workdir",
    "PBS_JOBID": "HODEI_JOB_ID",
    "PBS_ARRAY_INDEX": "HODEI_ARRAY_INDEX",
    "PBS_O_WORKDIR": "the key workdir",
    "PBS_NODEFILE": "HODEI_ADDRESSES",
}


def convert(text: str, name: str = "") -> tuple[Document, list[str]]:
    """The document, and what is not in it or is not the same any more. `name` is the file's, for a job without one."""
    script = parse_script(text)
    job = _Job(script)
    for option in script.options:
        job.take(option)
    return job.document(name), [*script.problems, *job.notes]


class _Job:
    def __init__(self, script: BatchScript) -> None:
        self._script = script
        self.notes: list[str] = []
        self._out: Document = {}
        self._kept: list[str] = []
        self._tasks, self._nodes, self._cpus = 1, 1, 0
        self._memory_per_cpu = ""

    def take(self, option: Option) -> None:
        known = _SLURM if self._script.system == "slurm" else _PBS
        do = known.get(option.name)
        if do is not None:
            do(self, option)
        elif self._script.system == "slurm" and option.name in LET_THROUGH:
            self._kept.append(f"#SBATCH --{option.name}{'=' + option.value if option.value else ''}")
        else:
            self.note(option, "has no like here and was left out")

    def note(self, option: Option, what: str) -> None:
        dash = "--" if self._script.system == "slurm" else ""
        value = f" {option.value}" if option.value else ""
        self.notes.append(f"line {option.line}: {dash}{option.name}{value} {what}")

    def document(self, name: str) -> Document:
        out = self._out
        shown = re.sub(r"[^a-z0-9.-]+", "-", str(out.pop("name", "") or posixpath.basename(name).split(".")[0]).lower())
        count = max(self._tasks, self._nodes)
        first: Document = {"name": shown.strip("-.")[:63] or "job", "command": self._command()}
        if count > 1:
            first["count"] = count
            self.notes.append(
                f"it has {count} tasks: each becomes a member that runs the whole script, with HODEI_RANK and "
                "HODEI_WORLD_SIZE; take srun or mpirun out of it, or keep count at 1"
            )
        if self._cpus:
            first["cpu"] = self._cpus
        if self._memory_per_cpu:
            amount, unit = re.fullmatch(r"(\d+)(\w+)", self._memory_per_cpu).groups()  # type: ignore[union-attr]
            out["memory"] = f"{int(amount) * max(self._cpus, 1)}{unit}"
        if self._kept:
            out["annotations"] = {"slurm.hodei.io/options": "\n".join(self._kept)}
        self._warn_of_variables()
        return {**first, **out}

    def _command(self) -> list[str]:
        interpreter = self._script.interpreter.split() or ["/bin/sh"]
        return [*interpreter, "-c", self._script.body or ":"]

    def _warn_of_variables(self) -> None:
        for variable in sorted(set(re.findall(r"\$\{?((?:SLURM|PBS)_\w+)", self._script.body))):
            instead = _VARIABLES.get(variable)
            tail = f"; here it is {instead}" if instead else ", which is there on that system alone"
            self.notes.append(f"the script uses {variable}{tail}")
        if re.search(r"^\s*(srun|mpirun|mpiexec|aprun)\b", self._script.body, re.MULTILINE):
            self.notes.append("the script starts its tasks with srun or mpirun: that works in Slurm or PBS only")

    # ------------------------------------------------------------------------------- of both systems

    def name(self, option: Option) -> None:
        self._out["name"] = option.value

    def project(self, option: Option) -> None:
        self._out["project"] = option.value

    def selector(self, label: str, option: Option) -> None:
        self._out.setdefault("node_selector", {})[label] = option.value
        self.note(option, f"became a selector for {label}, which only that kind of backend has")

    def array(self, option: Option) -> None:
        spec, _, at_most = option.value.partition("%")
        if not re.fullmatch(r"\d+-\d+(:\d+)?", spec):
            return self.note(option, "is no plain range and was left out")
        self._out["array"] = {"indices": spec, "at_most": int(at_most)} if at_most.isdigit() else spec
        return None

    def output(self, option: Option) -> None:
        self.note(option, "was left out: `hodei logs` shows what it writes")

    def mail(self, option: Option) -> None:
        self.note(option, "was left out: `hodei wait` or a webhook tells of the end")

    # ---------------------------------------------------------------------------------------- Slurm's

    def time(self, option: Option) -> None:
        seconds = slurm_seconds(option.value)
        if seconds is None:
            self.note(option, "is no time limit and was left out")
        elif seconds:
            self._out["timeout"] = f"{seconds}s" if seconds % 60 else f"{seconds // 60}m"

    def mem(self, option: Option) -> None:
        if amount := slurm_memory(option.value):
            self._out["memory"] = amount
        else:
            self.note(option, "means all of the node, and was left out")

    def mem_per_cpu(self, option: Option) -> None:
        self._memory_per_cpu = slurm_memory(option.value)

    def cpus(self, option: Option) -> None:
        self._cpus = int(option.value) if option.value.isdigit() else 0

    def tasks(self, option: Option) -> None:
        self._tasks = int(option.value) if option.value.isdigit() else 1

    def nodes(self, option: Option) -> None:
        first = option.value.partition("-")[0]
        self._nodes = int(first) if first.isdigit() else 1

    def gres(self, option: Option) -> None:
        for part in option.value.split(","):
            found = _GPU.fullmatch(part)
            if not found or (option.name == "gres" and not part.startswith("gpu")):
                if re.fullmatch(r"[a-z][\w-]*(:\d+)?", part) and part != "gpu":
                    name, _, amount = part.partition(":")
                    self._out.setdefault("resources", {})[name] = int(amount or 1)
                elif part == "gpu":
                    self._out["gpu"] = 1
                else:
                    self.note(option, "was not understood and left out")
                continue
            self._out["gpu"] = int(found[2])
            if found[1]:
                self._out["gpu_type"] = found[1]

    def chdir(self, option: Option) -> None:
        self._out["workdir"] = option.value

    def partition(self, option: Option) -> None:
        self.selector("slurm.hodei.io/line", option)

    def exports(self, option: Option) -> None:
        pairs = [pair.partition("=") for pair in option.value.split(",")]
        given = {name: value for name, sign, value in pairs if sign}
        if given:
            self._out["env"] = given
        if any(not sign for _, sign, _ in pairs):
            self.note(option, "takes over variables of the shell: write those that are needed under `env`")

    def after(self, option: Option) -> None:
        kind, _, jobs = option.value.partition(":")
        key = {"afterok": "succeeded", "afterany": "completed", "afternotok": "failed"}.get(kind)
        if key and jobs:
            self.note(option, f"was left out: write the Hodei jobs that it waits for as `after: {{{key}: [...]}}`")
        else:
            self.note(option, "has no like here and was left out")

    def requeue(self, option: Option) -> None:
        if option.name == "no-requeue":
            self._out["restart"] = "never"

    # ------------------------------------------------------------------------------------------ PBS's

    def resource(self, option: Option) -> None:
        """`select=1:ncpus=2:mem=4gb,walltime=01:00:00`, or older `nodes=1:ppn=4`."""
        for part in re.split(r",(?=\w+=)", option.value):
            key, _, value = part.partition("=")
            if key == "walltime":
                if limit := pbs_minutes(value):
                    self._out["timeout"] = f"{limit}m"
            elif key in ("select", "nodes"):
                self._chunk(option, value)
            elif key in ("ncpus", "mem", "ngpus"):
                self._amount(option, key, value)
            elif key != "place":
                self.note(option, f"({key}) has no like here and was left out")

    def _chunk(self, option: Option, value: str) -> None:
        first, *more = value.split("+")
        if more:
            self.note(option, "has chunks that differ; only the first was taken")
        head, *pairs = first.split(":")
        self._nodes = int(head) if head.isdigit() else 1
        for pair in pairs:
            key, _, amount = pair.partition("=")
            if key == "mpiprocs":
                self._tasks = self._nodes * int(amount) if amount.isdigit() else self._tasks
            else:
                self._amount(option, "ncpus" if key == "ppn" else key, amount)

    def _amount(self, option: Option, key: str, value: str) -> None:
        if key == "ncpus" and value.isdigit():
            self._cpus = int(value)
        elif key == "ngpus" and value.isdigit():
            self._out["gpu"] = int(value)
        elif key == "mem" and (found := re.fullmatch(r"(\d+)([kmgt]?)b?", value.lower())):
            self._out["memory"] = found[1] + (f"{found[2].upper()}i" if found[2] else "")
        else:
            self.note(option, f"({key}={value}) has no like here and was left out")

    def queue(self, option: Option) -> None:
        self.selector("pbs.hodei.io/line", option)

    def ignore(self, option: Option) -> None:
        """It says what is so here anyway."""


_SLURM: dict[str, Callable[[_Job, Option], None]] = {
    "job-name": _Job.name, "account": _Job.project, "array": _Job.array, "time": _Job.time, "mem": _Job.mem,
    "mem-per-cpu": _Job.mem_per_cpu, "cpus-per-task": _Job.cpus, "ntasks": _Job.tasks, "nodes": _Job.nodes,
    "gres": _Job.gres, "gpus": _Job.gres, "gpus-per-node": _Job.gres, "gpus-per-task": _Job.gres, "chdir": _Job.chdir,
    "partition": _Job.partition, "export": _Job.exports, "dependency": _Job.after, "output": _Job.output,
    "error": _Job.output, "open-mode": _Job.ignore, "requeue": _Job.requeue, "no-requeue": _Job.requeue,
    "ntasks-per-node": _Job.tasks, "parsable": _Job.ignore, "quiet": _Job.ignore, "verbose": _Job.ignore,
    **dict.fromkeys(_MAIL, _Job.mail),
}  # fmt: skip
_PBS: dict[str, Callable[[_Job, Option], None]] = {
    "name": _Job.name, "project": _Job.project, "account": _Job.project, "array": _Job.array, "resource": _Job.resource,
    "queue": _Job.queue, "output": _Job.output, "error": _Job.output, "join": _Job.ignore, "keep": _Job.ignore,
    "shell": _Job.ignore, "rerun": _Job.ignore, "variables": _Job.exports, "quiet": _Job.ignore,
    **dict.fromkeys(_MAIL, _Job.mail),
}  # fmt: skip


def slurm_seconds(text: str) -> int | None:
    """`minutes`, `minutes:seconds`, `hours:minutes:seconds`, `days-hours[:minutes[:seconds]]`; 0 for no limit."""
    if text.upper() in ("UNLIMITED", "INFINITE", "0"):
        return 0
    found = _TIME.fullmatch(text)
    if not found:
        return None
    days, one, two, three = found.groups()
    if days is not None:
        return ((int(days) * 24 + int(one)) * 60 + int(two or 0)) * 60 + int(three or 0)
    if two is None:
        return int(one) * 60
    if three is None:
        return int(one) * 60 + int(two)
    return (int(one) * 60 + int(two)) * 60 + int(three)


def slurm_memory(text: str) -> str:
    """`4G`, `500` (MiB); "" for none of its own."""
    found = re.fullmatch(r"(\d+)([KMGT]?)B?", text.upper())
    return f"{found[1]}{_UNITS[found[2]]}" if found and int(found[1]) else ""
