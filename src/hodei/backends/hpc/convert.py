"""A batch script as a job document, with a word on everything that could not be taken over. Reads text, does nothing.

A script of Slurm runs once, on the first node, and starts its tasks itself. So a job on one node is one member with the cores
of all its tasks. On several nodes (`--nodes` above 1) it is a gang of one member for each node, with the cores of the tasks
there; no two are ever on one node. Each member runs the whole script, and `srun` starts the tasks of that node.
"""

from __future__ import annotations

import hashlib
import posixpath
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hodei.backends.hpc.batch_lines import BatchScript, Option, parse_script, redirections
from hodei.backends.hpc.pbs_states import minutes as pbs_minutes
from hodei.backends.hpc.slurm_options import LET_THROUGH
from hodei.backends.slurm_variables import ALL, ANNOTATION, STEPS
from hodei.model.errors import InvalidInput
from hodei.model.node import DELEGATED

# --------------------------------------------------------------------------------------- slurm depends
# `--dependency` of sbatch: `afterok:12:13,afterany:14`, or with `?` between them for any one.


_KINDS = {"afterok": "succeeded", "afterany": "completed", "afternotok": "failed"}
_JOB = re.compile(r"\d+(_(\d+|\*|\[[\d,:-]+\]))?")


class Depends(NamedTuple):
    """The jobs as they were written, by how they must have ended. `any`: one of them is enough."""

    jobs: dict[str, list[str]]
    any: bool = False


def dependencies(text: str) -> Depends | str:
    """Or what can not be done."""
    if "," in text and "?" in text:
        return "has both , and ?"
    jobs: dict[str, list[str]] = {}
    for part in re.split(r"[,?]", text):
        kind, _, rest = part.partition(":")
        if _JOB.fullmatch(kind) and not rest:  # a number alone is an old way to write afterany
            kind, rest = "afterany", kind
        if kind not in _KINDS:
            return f"({kind[:40]}) has no like here; there is {', '.join(_KINDS)}"
        named = rest.split(":") if rest else []
        if not named or not all(map(_JOB.fullmatch, named)):
            return f"names no jobs after {kind}"
        jobs.setdefault(_KINDS[kind], []).extend(named)
    return Depends(jobs, "?" in text)


# ----------------------------------------------------------------------------------------------------

Document = dict[str, Any]
# The members of a job on several nodes have this label, and keep off each other by it.
APART = "slurm.hodei.io/apart"
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_GPU = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?")
_UNITS = {"": "Mi", "K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
_MAIL = ("mail-type", "mail-user")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STARTER = re.compile(r"^[^#\n]*?(?:^|[\s;|&(`!])(srun|mpirun|mpiexec|aprun)\s", re.MULTILINE)
# Variables that mean this very shell, or the job that sbatch itself was called in.
_NOT_EXPORTED = re.compile(r"(HODEI|SLURM|SLURMD|SBATCH|PBS)_\w*|SLURMD_NODENAME|_|PWD|OLDPWD|SHLVL|PS[0-4]")
# How interpreters take a whole script as a word; shells and the rest take it after -c.
_BY_E = ("perl", "ruby", "Rscript", "node", "lua", "julia")
_BY_C = ("sh", "bash", "dash", "zsh", "ksh", "ksh93", "mksh", "csh", "tcsh", "fish", "python", "pypy")
# What is set for jobs that were written for Slurm.
_SET = re.compile(
    r"SLURMD_NODENAME|SLURM_(JOB_?ID|JOB_NAME|PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|JOB_NUM_NODES|(JOB_)?NODELIST|"
    r"TASKS_PER_NODE|NTASKS_PER_NODE|CPUS_PER_TASK|CPUS_ON_NODE|JOB_CPUS_PER_NODE|CLUSTER_NAME|SUBMIT_DIR|SUBMIT_HOST|"
    r"MEM_PER_NODE|GPUS_ON_NODE|RESTART_COUNT|JOB_(PARTITION|ACCOUNT|USER)|GPUS|CPUS_PER_GPU|"
    r"ARRAY_(JOB_ID|TASK_(ID|COUNT|MIN|MAX|STEP)))"
)
# What a script of PBS may use of its system, and what there is instead.
_VARIABLES = {
    "PBS_JOBID": "HODEI_JOB_ID",
    "PBS_ARRAY_INDEX": "HODEI_ARRAY_INDEX",
    "PBS_O_WORKDIR": "the key workdir",
    "PBS_NODEFILE": "HODEI_ADDRESSES",
}


class BadOption(InvalidInput):
    """An option, or its value, that sbatch itself would refuse."""


class Submitted(NamedTuple):
    """How a script comes from `sbatch`: who called it, where, with which variables, with options of the command line (they
    count before the script's) and arguments for the script. `jobs` finds the jobs that a dependency means. `files`: the output
    goes to a file also if nothing is said of it. `token`: a word that no other submission has."""

    env: Mapping[str, str]
    jobs: Callable[[str], list[int]]
    host: str = ""
    user: str = ""
    options: tuple[Option, ...] = ()
    arguments: tuple[str, ...] = ()
    files: bool = True
    token: str = ""


class _Shape(NamedTuple):
    """`here`: the tasks of one member, at most; `tasks`: those of all."""

    members: int
    here: int
    tasks: int


def convert(
    text: str, name: str = "", *, directory: str = "", submitted: Submitted | None = None
) -> tuple[Document, list[str]]:
    """The document, and what is not in it or is not the same any more. `name` is the file's, for a job without one.
    `directory`: where sbatch is called, so where the job runs. InvalidInput for what would not be the same job at all; with
    `submitted` also for all that sbatch itself would refuse."""
    if submitted is None and not re.match(r"#!", text) and not re.search(r"^#(SBATCH|PBS)\b", text, re.MULTILINE):
        raise InvalidInput(
            "this is no batch script: it has neither a first line with #! nor a line with #SBATCH or #PBS",
            hint="a job of a plain command: hodei run -- COMMAND",
        )
    script = parse_script(text, "slurm" if submitted else None)
    if script.several:
        raise InvalidInput(
            f"line {script.several}: a heterogeneous job (hetjob) can not become one job here",
            hint="write a job file with one entry in `tasks` for each part: hodei job init --full",
        )
    job = _Job(script, directory, submitted)
    options = {option.name: option for option in (*script.options, *(submitted.options if submitted else ()))}
    for option in options.values() if script.system == "slurm" else script.options:
        job.take(option)
    if submitted is not None and script.problems and "comes after" not in script.problems[0]:
        raise BadOption(script.problems[0])
    return job.document(name), [*script.problems, *job.notes]


class _Job:
    def __init__(self, script: BatchScript, directory: str, submitted: Submitted | None) -> None:
        self._script, self._directory, self._submitted = script, directory, submitted
        self.notes: list[str] = []
        self._out: Document = {}
        self._kept: list[str] = []
        self._env: dict[str, str] = {}
        self._tasks, self._nodes, self._per_node, self._cpus, self._cpus_per_gpu = 0, 0, 0, 0, 0
        # Amounts with what they are for one of: the job, a node, a task, a cpu, a gpu.
        self._gpus: tuple[str, int] = ("job", 0)
        self._memory: tuple[str, str] = ("node", "")
        self._files: dict[str, str] = {}
        self._append = False
        self._export = "ALL"

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
        self.notes.append(f"{self._said(option)} {what}")

    def wrong(self, option: Option, what: str, *, malformed: bool = False) -> None:
        """A note in a file that people look at first; a refusal where the job would run at once."""
        if self._submitted is not None:
            raise (BadOption if malformed else InvalidInput)(f"{self._said(option)} {what}")
        said, _, advice = what.partition("; ")
        self.note(option, f"{said} and was left out{'; ' if advice else ''}{advice}")

    def _said(self, option: Option) -> str:
        dash = "--" if self._script.system == "slurm" else ""
        line = f"line {option.line}: " if option.line else ""
        return f"{line}{dash}{option.name}{f' {option.value}' if option.value else ''}"

    # ---------------------------------------------------------------------------------- the whole of it

    def document(self, name: str) -> Document:
        out = self._out
        slurm = self._script.system == "slurm"
        called = str(out.pop("name", "") or posixpath.basename(name))
        shown = re.sub(r"[^a-z0-9.-]+", "-", called.lower()).strip("-.")[:63] or "job"
        shape = self._slurm_shape() if slurm else self._pbs_shape()
        first: Document = {"name": shown, "command": self._command(called or shown, shape.members > 1)}
        if shape.members > 1:
            first["count"] = shape.members
            self.notes.append(
                f"it asks for {shape.members} nodes: each has a member that runs the whole script, and srun starts its tasks "
                "of that node; Slurm runs the script on the first node alone" if slurm else
                f"it has {shape.members} tasks: each becomes a member that runs the whole script, with HODEI_RANK and "
                "HODEI_WORLD_SIZE; take mpirun out of it, or keep count at 1"
            )  # fmt: skip
            if slurm:
                self._keep_apart()
        gpus_milli = self._set_gpus(shape)
        cpus = self._cpus or (self._cpus_per_gpu * gpus_milli // 1000) // shape.here
        if cpus or shape.here > 1:
            cpus = max(1, cpus)
            first["cpu"] = cpus * shape.here
        if memory := self._memory_for(shape, cpus, gpus_milli):
            out["memory"] = memory
        if self._directory and slurm:
            out.setdefault("workdir", self._directory)
        notes: Document = {}
        if self._kept:
            notes["slurm.hodei.io/options"] = "\n".join(self._kept)
        if slurm:
            notes[ANNOTATION] = STEPS if _STARTER.search(self._script.body) else ALL
            self._tell_shape(shape, cpus)
            if called and called != shown:
                self._env["SLURM_JOB_NAME"] = called
            if out.get("workdir", "") != self._directory and self._directory:
                self._env["SLURM_SUBMIT_DIR"] = self._directory
        if env := {**self._exported(), **self._env}:
            out["env"] = env
        if notes:
            out["annotations"] = notes
        self._warn_of_variables()
        return {**first, **out}

    def _slurm_shape(self) -> _Shape:
        nodes, per_node, tasks = self._nodes, self._per_node, self._tasks
        tasks = tasks or max(nodes, 1) * max(per_node, 1)
        nodes = min(nodes or (-(-tasks // per_node) if per_node else 1), tasks)
        return _Shape(nodes, -(-tasks // nodes), tasks)

    def _pbs_shape(self) -> _Shape:
        members = max(self._tasks, self._nodes, 1)
        return _Shape(members, 1, members)

    def _keep_apart(self) -> None:
        """Members of one job on nodes of their own: a label that only this script's jobs have, and a rule against it. A node
        that stands for many machines can not tell them apart, so it is left out."""
        token = self._submitted.token if self._submitted and self._submitted.token else ""
        token = token or hashlib.sha256(self._script.body.encode()).hexdigest()[:12]
        self._out.setdefault("labels", {})[APART] = token
        self._out["job_anti_affinity"] = {"required": [{"match": f"{APART}={token}", "topology": "host"}]}
        lines = self._out.get("affinity", {}).get("required", [""])
        self._out["affinity"] = {"required": [", ".join(filter(None, (line, f"!{DELEGATED}"))) for line in lines]}

    def _tell_shape(self, shape: _Shape, cpus: int) -> None:
        if shape.tasks > 1:
            self._env |= {"SLURM_NTASKS": str(shape.tasks), "SLURM_CPUS_PER_TASK": str(max(1, cpus))}
            if self._per_node:
                self._env["SLURM_NTASKS_PER_NODE"] = str(self._per_node)

    def _set_gpus(self, shape: _Shape) -> int:
        """The GPUs of one member, in thousandths."""
        per, amount = self._gpus
        if not amount:
            return 0
        each = {"task": amount * shape.here, "node": amount, "job": -(-amount // shape.members)}[per]
        self._out["gpu"] = each
        return each * 1000

    def _memory_for(self, shape: _Shape, cpus: int, gpus_milli: int) -> str:
        per, text = self._memory
        if not text:
            return ""
        amount, unit = int(text[:-2]), text[-2:]
        if per == "cpu":
            return f"{amount * max(cpus, 1) * shape.here}{unit}"
        if per == "gpu":
            return f"{amount * max(1, -(-gpus_milli // 1000))}{unit}"
        return text

    def _command(self, name: str, gang: bool) -> list[str]:
        interpreter = self._script.interpreter.split() or ["/bin/sh"]
        program = next((word for word in interpreter[1:] if not word.startswith("-")), "") if posixpath.basename(
            interpreter[0]) == "env" else interpreter[0]  # fmt: skip
        program = re.sub(r"[\d.]+$", "", posixpath.basename(program))
        if program not in (*_BY_C, *_BY_E):
            self.notes.append(f"{program} is not known to take a script with -c: look at `command`")
        arguments = self._submitted.arguments if self._submitted else ()
        taken = ["-e" if program in _BY_E else "-c", self._script.body or ":"]
        if arguments:
            # The first word behind the script of a shell is its $0.
            taken += [] if program in ("python", "pypy") else ["--"] if program in _BY_E else [name]
        words = [*interpreter, *taken, *arguments]
        array = "array" in self._out
        usual = ("slurm-%A_%a.out" if array else "slurm-%j.out") if self._submitted and self._submitted.files else ""
        opened = redirections(
            self._files.get("output") or usual, self._files.get("error", ""), self._files.get("input", ""),
            append=self._append or gang, name=name,
        )  # fmt: skip
        return ["/bin/sh", "-c", f'{opened}; exec "$@"', "sh", *words] if opened else words

    def _exported(self) -> dict[str, str]:
        """The variables that the job takes along: of the caller, and those that were given a value."""
        pairs = [pair.partition("=") for pair in self._export.split(",") if pair]
        given = {name: value for name, sign, value in pairs if sign}
        here = self._submitted
        if here is None:
            return given
        names = [name for name, sign, _ in pairs if not sign]
        everything = "ALL" in names
        taken = {
            name: value for name, value in here.env.items()
            if (everything or name in names) and _NAME.fullmatch(name) and not _NOT_EXPORTED.fullmatch(name)
        }  # fmt: skip
        about = {"SLURM_SUBMIT_HOST": here.host, "SLURM_JOB_USER": here.user}
        return {**taken, **given, **{name: value for name, value in about.items() if value}}

    def _warn_of_variables(self) -> None:
        for variable in sorted(set(re.findall(r"\$\{?((?:SLURM|PBS)_\w+)", self._script.body))):
            if self._script.system == "slurm" and _SET.fullmatch(variable):
                continue
            instead = _VARIABLES.get(variable)
            tail = f"; here it is {instead}" if instead else ", which is there on that system alone"
            self.notes.append(f"the script uses {variable}{tail}")
        found = _STARTER.search(self._script.body)
        if found and self._script.system == "pbs":
            self.notes.append("the script starts its tasks with srun or mpirun: that works in Slurm or PBS only")
        elif found and found[1] in ("srun", "aprun") and self._submitted is None:
            self.notes.append(
                "the script starts its tasks with srun: outside of Slurm that needs the srun of `hodei slurm-shims` on PATH"
            )

    # ------------------------------------------------------------------------------- of both systems

    def name(self, option: Option) -> None:
        self._out["name"] = option.value

    def project(self, option: Option) -> None:
        self._out["project"] = option.value
        if self._script.system == "slurm":
            self._env["SLURM_JOB_ACCOUNT"] = option.value

    def selector(self, label: str, option: Option) -> None:
        names = [name.strip() for name in option.value.split(",") if name.strip()]
        if len(names) > 1:
            self._out["affinity"] = {"required": [f"{label} in ({', '.join(names)})"]}
        else:
            self._out.setdefault("node_selector", {})[label] = option.value
            if self._script.system == "slurm":
                self._env["SLURM_JOB_PARTITION"] = option.value
        self.note(option, f"became a selector for {label}, which only that kind of backend has")

    def array(self, option: Option) -> None:
        # Slurm takes brackets, and a `%` without a number, which sets no bound.
        found = re.fullmatch(r"\[?([\d,:-]+)\]?(?:%(\d*)\]?)?", option.value)
        if found is None:
            return self.wrong(option, "is no list of indices")
        indices, at_most = found[1], int(found[2] or 0)
        self._out["array"] = {"indices": indices, "at_most": at_most} if at_most else indices
        return None

    def output(self, option: Option) -> None:
        self.note(option, "was left out: `hodei logs` shows what it writes")

    def mail(self, option: Option) -> None:
        self.note(option, "was left out: `hodei wait` or a webhook tells of the end")

    # ---------------------------------------------------------------------------------------- Slurm's

    def time(self, option: Option) -> None:
        seconds = slurm_seconds(option.value)
        if seconds is None:
            self.wrong(option, "is no time limit", malformed=True)
        elif seconds:
            self._out["timeout"] = f"{seconds}s" if seconds % 60 else f"{seconds // 60}m"

    def mem(self, option: Option) -> None:
        amount = slurm_memory(option.value)
        if not amount and not _MEMORY.fullmatch(option.value.upper()):
            self.wrong(option, "is no amount of memory", malformed=True)
        elif not amount:
            self.wrong(option, "asks for all memory of a node, which can not be asked for here; next: say how much")
        else:
            self._memory = ({"mem-per-cpu": "cpu", "mem-per-gpu": "gpu"}.get(option.name, "node"), amount)

    def cpus(self, option: Option) -> None:
        self._cpus = self._number(option)

    def cpus_per_gpu(self, option: Option) -> None:
        self._cpus_per_gpu = self._number(option)
        self._env["SLURM_CPUS_PER_GPU"] = option.value

    def tasks(self, option: Option) -> None:
        self._tasks = self._number(option)

    def per_node(self, option: Option) -> None:
        self._per_node = self._number(option)

    def nodes(self, option: Option) -> None:
        """`4`, or `2-4`: the least that is enough."""
        if re.fullmatch(r"[1-9]\d*(-\d+)?", option.value):
            self._nodes = int(option.value.partition("-")[0])
        else:
            self.wrong(option, "is no number of nodes", malformed=True)

    def _number(self, option: Option) -> int:
        if re.fullmatch(r"[1-9]\d{0,8}", option.value):
            return int(option.value)
        self.wrong(option, "is no number", malformed=True)
        return 0

    def gres(self, option: Option) -> None:
        for part in option.value.split(","):
            found = _GPU.fullmatch(part)
            if not found or (option.name == "gres" and not part.startswith("gpu")):
                if re.fullmatch(r"[a-z][\w-]*(:\d+)?", part) and part != "gpu":
                    name, _, amount = part.partition(":")
                    self._out.setdefault("resources", {})[name] = int(amount or 1)
                elif part == "gpu":
                    self._gpus = ("node", 1)
                else:
                    self.note(option, "was not understood and left out")
                continue
            self._gpus = ({"gpus": "job", "gpus-per-task": "task"}.get(option.name, "node"), int(found[2]))
            if option.name == "gpus":
                self._env["SLURM_GPUS"] = found[2]
            if found[1]:
                self._out["gpu_type"] = found[1]

    def chdir(self, option: Option) -> None:
        self._out["workdir"] = posixpath.join(self._directory, option.value)

    def file(self, option: Option) -> None:
        self._files[option.name] = option.value

    def open_mode(self, option: Option) -> None:
        self._append = option.value.startswith("a")

    def partition(self, option: Option) -> None:
        self.selector("slurm.hodei.io/queue", option)

    def exports(self, option: Option) -> None:
        self._export = option.value
        names = [pair for pair in option.value.split(",") if "=" not in pair]
        if self._submitted is None and any(name not in ("NONE", "NIL") for name in names):
            self.note(option, "takes over variables of the shell: write those that are needed under `env`")

    def after(self, option: Option) -> None:
        found = dependencies(option.value)
        if isinstance(found, str):
            self.wrong(option, found)
        elif self._submitted is None:
            kinds = ", ".join(f"{kind}: [...]" for kind in found.jobs)
            self.note(option, f"was left out: write the Hodei jobs that it waits for as `after: {{{kinds}}}`")
        else:
            look = self._submitted.jobs
            after: Document = {kind: [job for one in jobs for job in look(one)] for kind, jobs in found.jobs.items()}
            self._out["after"] = {**after, "need": 1} if found.any else after

    def not_here(self, option: Option) -> None:
        self.wrong(option, f"has no like here; next: {_INSTEAD[option.name]}")

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
            self._gpus = ("task", int(value))
        elif key == "mem" and (found := re.fullmatch(r"(\d+)([kmgt]?)b?", value.lower())):
            self._out["memory"] = found[1] + (f"{found[2].upper()}i" if found[2] else "")
        else:
            self.note(option, f"({key}={value}) has no like here and was left out")

    def queue(self, option: Option) -> None:
        self.selector("pbs.hodei.io/queue", option)

    def ignore(self, option: Option) -> None:
        """It says what is so here anyway."""


_INSTEAD = {
    "exclusive": "ask for the cores and the memory of a whole node",
    "hold": "submit it and call `hodei hold`, or let it wait for another job",
    "begin": "`hodei cron`, or at(1)",
    "uid": "jobs run as the account of their backend",
    "gid": "jobs run as the account of their backend",
}
_SLURM: dict[str, Callable[[_Job, Option], None]] = {
    "job-name": _Job.name, "account": _Job.project, "array": _Job.array, "time": _Job.time,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _Job.mem), "cpus-per-task": _Job.cpus,
    "cpus-per-gpu": _Job.cpus_per_gpu, "ntasks": _Job.tasks, "ntasks-per-node": _Job.per_node, "nodes": _Job.nodes,
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), _Job.gres), "chdir": _Job.chdir,
    "partition": _Job.partition, "export": _Job.exports, "dependency": _Job.after,
    **dict.fromkeys(("output", "error", "input"), _Job.file), "open-mode": _Job.open_mode,
    **dict.fromkeys(("requeue", "no-requeue"), _Job.requeue), **dict.fromkeys(_INSTEAD, _Job.not_here),
    **dict.fromkeys(("parsable", "quiet", "verbose", "wait", "test-only", "ignore-pbs"), _Job.ignore),
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
    if text.upper() in ("UNLIMITED", "INFINITE", "0", "-1"):
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
    found = _MEMORY.fullmatch(text.upper())
    return f"{found[1]}{_UNITS[found[2]]}" if found and int(found[1]) else ""
