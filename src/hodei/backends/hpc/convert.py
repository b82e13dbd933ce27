"""Converts a batch script to a job document, with a note on everything that could not be converted. Pure.

Slurm runs a batch script once, on the first node, and the script starts its tasks. So a job on one node becomes one member with
the cores of all its tasks. A job on several nodes (`--nodes` above 1) becomes a gang with one member per node and the cores of
the tasks there, never two on one node. Each member runs the whole script, and `srun` starts the tasks of that node.
"""

from __future__ import annotations

import hashlib
import math
import posixpath
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from hodei.backends.hpc.batch_options import (
    SLURM_ALLOWED,
    SLURM_ANNOTATION,
    BatchScript,
    Note,
    Option,
    parse_script,
    pbs_minutes,
    redirections,
    slurm_seconds,
)
from hodei.backends.slurm_variables import ALL, ANNOTATION, STEPS
from hodei.model.errors import InvalidInput
from hodei.model.node import DELEGATED, QUEUE_LABEL_SUFFIX

Document = dict[str, Any]
# Label and anti-affinity that keep the members of a job on several nodes on different nodes.
APART = "slurm.hodei.io/apart"
_GPU = re.compile(r"(?:gpu:)?(?:([A-Za-z][\w.-]*):)?(\d+)")
_MEMORY = re.compile(r"(\d+)([KMGT]?)B?")
_UNITS = {"": "Mi", "K": "Ki", "M": "Mi", "G": "Gi", "T": "Ti"}
_MAIL = ("mail-type", "mail-user")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_STARTER = re.compile(r"^[^#\n]*?(?:^|[\s;|&(`!])(srun|mpirun|mpiexec|aprun)\s", re.MULTILINE)
# Variables of the calling shell itself, or of the job in which sbatch was called.
_NOT_EXPORTED = re.compile(r"(HODEI|SLURM|SLURMD|SBATCH|PBS)_\w*|SLURMD_NODENAME|_|PWD|OLDPWD|SHLVL|PS[0-4]")
# Interpreters that take a whole script as an argument of -e, and of -c.
_BY_E = ("perl", "ruby", "Rscript", "node", "lua", "julia")
_BY_C = ("sh", "bash", "dash", "zsh", "ksh", "ksh93", "mksh", "csh", "tcsh", "fish", "python", "pypy")
# The variables of Slurm that Hodei sets.
_PROVIDED = re.compile(
    r"SLURMD_NODENAME|SLURM_(JOB_?ID|JOB_NAME|PROCID|LOCALID|NODEID|NTASKS|NPROCS|NNODES|JOB_NUM_NODES|(JOB_)?NODELIST|"
    r"TASKS_PER_NODE|NTASKS_PER_NODE|CPUS_PER_TASK|CPUS_ON_NODE|JOB_CPUS_PER_NODE|CLUSTER_NAME|SUBMIT_DIR|SUBMIT_HOST|"
    r"MEM_PER_NODE|GPUS_ON_NODE|RESTART_COUNT|JOB_(PARTITION|ACCOUNT|USER)|GPUS|CPUS_PER_GPU|"
    r"ARRAY_(JOB_ID|TASK_(ID|COUNT|MIN|MAX|STEP)))"
)
# Replacements for variables of PBS.
_PBS_VARIABLES = {
    "PBS_JOBID": "HODEI_JOB_ID",
    "PBS_ARRAY_INDEX": "HODEI_ARRAY_INDEX",
    "PBS_O_WORKDIR": "the key workdir",
    "PBS_NODEFILE": "HODEI_ADDRESSES",
}


class BadOption(InvalidInput):
    """An option or value that sbatch would refuse too."""


class SbatchCall(NamedTuple):
    """A call of `sbatch`: variables, host and user of the caller, options of the command line, which take precedence over the
    script's, and arguments for the script. `jobs` resolves the job ids of dependencies. `by_srun`: srun makes the call, so that
    the output goes to no file by default. `token` is unique to the call."""

    env: Mapping[str, str]
    jobs: Callable[[str], list[int]]
    host: str = ""
    user: str = ""
    options: tuple[Option, ...] = ()
    arguments: tuple[str, ...] = ()
    by_srun: bool = False
    token: str = ""


class Dependencies(NamedTuple):
    """Job ids as written, by how the jobs must end. `any`: one of them is enough."""

    jobs: dict[str, list[str]]
    any: bool = False


_DEPENDENCY_TYPES = {"afterok": "succeeded", "afterany": "completed", "afternotok": "failed"}
_JOB_ID = re.compile(r"\d+(_(\d+|\*|\[[\d,:-]+\]))?")


def parse_dependencies(text: str) -> Dependencies:
    """`afterok:12:13,afterany:14`, or with `?` for any one of them. InvalidInput says what the text has or is."""
    if "," in text and "?" in text:
        raise InvalidInput("has both , and ?")
    jobs: dict[str, list[str]] = {}
    for part in re.split(r"[,?]", text):
        kind, _, rest = part.partition(":")
        if _JOB_ID.fullmatch(kind) and not rest:  # a bare id is an old form of afterany
            kind, rest = "afterany", kind
        if kind not in _DEPENDENCY_TYPES:
            raise InvalidInput(f"({kind[:40]}) is not supported", hint=f"use {', '.join(_DEPENDENCY_TYPES)}")
        ids = rest.split(":") if rest else []
        if not ids or not all(map(_JOB_ID.fullmatch, ids)):
            raise InvalidInput(f"names no jobs after {kind}")
        jobs.setdefault(_DEPENDENCY_TYPES[kind], []).extend(ids)
    return Dependencies(jobs, "?" in text)


class _Shape(NamedTuple):
    """`tasks_per_member`: at most; `tasks`: of the whole job."""

    members: int
    tasks_per_member: int
    tasks: int


def convert(
    text: str, name: str = "", *, directory: str = "", call: SbatchCall | None = None
) -> tuple[Document, list[str]]:
    """The document, and notes on what was left out or changed. `name`: the file's, used as the default job name. `directory`:
    where sbatch is called, which is where the job runs. InvalidInput if it would be a different job; with `call` also for
    everything that sbatch would refuse."""
    if call is None and not re.match(r"#!", text) and not re.search(r"^#(SBATCH|PBS)\b", text, re.MULTILINE):
        raise InvalidInput(
            "this is not a batch script: it has neither a first line with #! nor a line with #SBATCH or #PBS",
            hint="to run a plain command: hodei run -- COMMAND",
        )
    script = parse_script(text, "slurm" if call else None)
    if script.hetjob_line:
        raise InvalidInput(
            f"line {script.hetjob_line}: a heterogeneous job (hetjob) cannot be converted to one job",
            hint="write a job file with one entry in `tasks` for each part: hodei job init --full",
        )
    job = _Conversion(script, directory, call)
    options = {option.name: option for option in (*script.options, *(call.options if call else ()))}
    for option in options.values() if script.system == "slurm" else script.options:
        job.apply(option)
    if call is not None and script.problems:
        raise BadOption(str(script.problems[0]))
    document = job.document(name)
    # Notes on a line come first, in the order of the script.
    notes = sorted((*script.problems, *script.ignored, *job.notes), key=lambda note: note.line or math.inf)
    return document, [str(note) for note in notes]


class _Conversion:
    def __init__(self, script: BatchScript, directory: str, call: SbatchCall | None) -> None:
        self._script, self._directory, self._call = script, directory, call
        self.notes: list[Note] = []
        self._out: Document = {}
        self._slurm_options: list[str] = []
        self._env: dict[str, str] = {}
        self._values: dict[str, str] = {}
        # ntasks, nodes, ntasks-per-node, cpus-per-task, cpus-per-gpu
        self._counts: Counter[str] = Counter()
        # (unit, amount): per job, node, task, cpu or gpu.
        self._gpus: tuple[str, int] = ("job", 0)
        self._memory: tuple[str, str] = ("node", "")

    def apply(self, option: Option) -> None:
        slurm = self._script.system == "slurm"
        self._values[option.name] = option.value
        handler = (_SLURM if slurm else _PBS).get(option.name)
        if handler is not None:
            handler(self, option)
        elif slurm and option.name in SLURM_ALLOWED:
            self._slurm_options.append(f"#SBATCH --{option.name}{'=' + option.value if option.value else ''}")
        elif option.name not in _NO_HANDLER[self._script.system]:
            self.note(option, "has no equivalent and was left out")

    def note(self, option: Option, what: str) -> None:
        dash = "--" if self._script.system == "slurm" else ""
        value = f" {option.value}" if option.value else ""
        self.notes.append(Note(option.line, f"{dash}{option.name}{value} {what}"))

    def reject(self, option: Option, problem: str, advice: str = "", *, malformed: bool = False) -> None:
        """A note in a file that is reviewed before use; an error where the job would run at once."""
        more = f"; next: {advice}" if advice else ""
        if self._call is None:
            self.note(option, f"{problem} and was left out{more}")
        else:
            self.note(option, f"{problem}{more}")
            raise (BadOption if malformed else InvalidInput)(str(self.notes[-1]))

    def _add_note(self, text: str) -> None:
        self.notes.append(Note(0, text))

    def document(self, name: str) -> Document:
        out = self._out
        slurm = self._script.system == "slurm"
        original_name = self._values.get("job-name") or self._values.get("name") or posixpath.basename(name)
        job_name = re.sub(r"[^a-z0-9.-]+", "-", original_name.lower()).strip("-.")[:63] or "job"
        shape = self._shape()
        first: Document = {"name": job_name, "command": self._command(original_name or job_name, shape.members > 1)}
        if shape.members > 1:
            first["count"] = shape.members
            if slurm:
                if self._call is None or not self._call.by_srun:
                    self._add_note(
                        f"it asks for {shape.members} nodes: on each a member runs the whole script, and srun starts the"
                        " tasks of that node; Slurm runs the script on the first node alone"
                    )
                self._spread_members()
            else:
                self._add_note(
                    f"it has {shape.members} tasks: each becomes a member that runs the whole script, with HODEI_RANK and"
                    " HODEI_WORLD_SIZE; remove mpirun from it, or set count to 1"
                )
        gpus = self._gpus_of_member(shape)
        if gpus:
            out["gpu"] = gpus
        cpus = self._counts["cpus-per-task"] or self._counts["cpus-per-gpu"] * gpus // shape.tasks_per_member
        if cpus or shape.tasks_per_member > 1:
            cpus = max(1, cpus)
            first["cpu"] = cpus * shape.tasks_per_member
        if memory := self._memory_of_member(shape, cpus, gpus):
            out["memory"] = memory
        if self._directory and slurm:
            out.setdefault("workdir", self._directory)
        annotations: Document = {}
        if self._slurm_options:
            annotations[SLURM_ANNOTATION] = "\n".join(self._slurm_options)
        if slurm:
            annotations[ANNOTATION] = STEPS if _STARTER.search(self._script.body) else ALL
            self._set_task_variables(shape, cpus)
            if original_name and original_name != job_name:
                self._env["SLURM_JOB_NAME"] = original_name
            if out.get("workdir", "") != self._directory and self._directory:
                self._env["SLURM_SUBMIT_DIR"] = self._directory
        if env := {**self._exported(), **self._env}:
            out["env"] = env
        if annotations:
            out["annotations"] = annotations
        self._note_variables()
        return {**first, **out}

    def _shape(self) -> _Shape:
        nodes, per_node, tasks = (self._counts[name] for name in ("nodes", "ntasks-per-node", "ntasks"))
        if self._script.system == "pbs":
            members = max(tasks, nodes, 1)
            return _Shape(members, 1, members)
        tasks = tasks or max(nodes, 1) * max(per_node, 1)
        nodes = min(nodes or (-(-tasks // per_node) if per_node else 1), tasks)
        return _Shape(nodes, -(-tasks // nodes), tasks)

    def _spread_members(self) -> None:
        """One member per node: a label unique to this script's jobs, and an anti-affinity against it. Nodes that stand for a
        whole partition are excluded, because Hodei cannot tell their machines apart."""
        token = self._call.token if self._call and self._call.token else ""
        token = token or hashlib.sha256(self._script.body.encode()).hexdigest()[:12]
        self._out.setdefault("labels", {})[APART] = token
        self._out["job_anti_affinity"] = {"required": [{"match": f"{APART}={token}", "topology": "host"}]}
        terms = self._out.get("affinity", {}).get("required", [""])
        self._out["affinity"] = {"required": [", ".join(filter(None, (term, f"!{DELEGATED}"))) for term in terms]}

    def _set_task_variables(self, shape: _Shape, cpus: int) -> None:
        if shape.tasks > 1:
            self._env |= {"SLURM_NTASKS": str(shape.tasks), "SLURM_CPUS_PER_TASK": str(max(1, cpus))}
            if per_node := self._counts["ntasks-per-node"]:
                self._env["SLURM_NTASKS_PER_NODE"] = str(per_node)

    def _gpus_of_member(self, shape: _Shape) -> int:
        per, amount = self._gpus
        return {"task": amount * shape.tasks_per_member, "node": amount, "job": -(-amount // shape.members)}[per]

    def _memory_of_member(self, shape: _Shape, cpus: int, gpus: int) -> str:
        per, text = self._memory
        if not text or per == "node":
            return text
        factor = max(cpus, 1) * shape.tasks_per_member if per == "cpu" else max(gpus, 1)
        return f"{int(text[:-2]) * factor}{text[-2:]}"

    def _command(self, name: str, gang: bool) -> list[str]:
        interpreter = self._script.interpreter.split() or ["/bin/sh"]
        program = interpreter[0]
        if posixpath.basename(program) == "env":
            program = next((argument for argument in interpreter[1:] if not argument.startswith("-")), "")
        program = re.sub(r"[\d.]+$", "", posixpath.basename(program))
        if program not in (*_BY_C, *_BY_E):
            self._add_note(f"{program} may not take a script with -c: check `command`")
        arguments = self._call.arguments if self._call else ()
        command = [*interpreter, "-e" if program in _BY_E else "-c", self._script.body or ":"]
        if arguments:
            # The first argument after the script of a shell is its $0.
            command += [] if program in ("python", "pypy") else ["--"] if program in _BY_E else [name]
        command += arguments
        array = "array" in self._out
        default_file = ("slurm-%A_%a.out" if array else "slurm-%j.out") if self._call and not self._call.by_srun else ""
        values = self._values if self._script.system == "slurm" else {}
        append = gang or values.get("open-mode", "").startswith("a")
        files = (values.get("output") or default_file, values.get("error", ""), values.get("input", ""))
        redirected = redirections(*files, append=append, name=name)
        return ["/bin/sh", "-c", f'{redirected}; exec "$@"', "sh", *command] if redirected else command

    def _exported(self) -> dict[str, str]:
        """Variables of `--export`: those of the caller, and those with a value."""
        exported = self._values.get("export" if self._script.system == "slurm" else "variables", "ALL")
        pairs = [pair.partition("=") for pair in exported.split(",") if pair]
        given = {name: value for name, sign, value in pairs if sign}
        call = self._call
        if call is None:
            return given
        names = [name for name, sign, _ in pairs if not sign]
        everything = "ALL" in names
        inherited = {
            name: value for name, value in call.env.items()
            if (everything or name in names) and _NAME.fullmatch(name) and not _NOT_EXPORTED.fullmatch(name)
        }  # fmt: skip
        caller = {"SLURM_SUBMIT_HOST": call.host, "SLURM_JOB_USER": call.user}
        return {**inherited, **given, **{name: value for name, value in caller.items() if value}}

    def _note_variables(self) -> None:
        for variable in sorted(set(re.findall(r"\$\{?((?:SLURM|PBS)_\w+)", self._script.body))):
            if self._script.system == "slurm" and _PROVIDED.fullmatch(variable):
                continue
            instead = _PBS_VARIABLES.get(variable)
            advice = f"; use {instead} instead" if instead else ", which only that batch system sets"
            self._add_note(f"the script uses {variable}{advice}")
        found = _STARTER.search(self._script.body)
        if found and self._script.system == "pbs":
            self._add_note("the script starts its tasks with srun or mpirun, which works only in Slurm or PBS")
        elif found and found[1] in ("srun", "aprun") and self._call is None:
            self._add_note(
                "the script starts its tasks with srun: outside of Slurm, put the srun of `hodei slurm-shims` on PATH"
            )

    def project(self, option: Option) -> None:
        self._out["project"] = option.value
        if self._script.system == "slurm":
            self._env["SLURM_JOB_ACCOUNT"] = option.value

    def partition(self, option: Option) -> None:
        label = f"{self._script.system}{QUEUE_LABEL_SUFFIX}"
        names = [name.strip() for name in option.value.split(",") if name.strip()]
        if len(names) > 1:
            self._out["affinity"] = {"required": [f"{label} in ({', '.join(names)})"]}
        else:
            self._out.setdefault("node_selector", {})[label] = option.value
            if self._script.system == "slurm":
                self._env["SLURM_JOB_PARTITION"] = option.value
        self.note(option, f"became a selector for {label}, a label that only nodes of that kind of backend have")

    def array(self, option: Option) -> None:
        # Slurm accepts brackets, and a `%` without a number, which sets no limit.
        found = re.fullmatch(r"\[?([\d,:-]+)\]?(?:%(\d*)\]?)?", option.value)
        if found is None:
            self.reject(option, "is not a list of indices")
        elif at_most := int(found[2] or 0):
            self._out["array"] = {"indices": found[1], "at_most": at_most}
        else:
            self._out["array"] = found[1]

    def output(self, option: Option) -> None:
        self.note(option, "was left out: `hodei logs` shows the output")

    def mail(self, option: Option) -> None:
        self.note(option, "was left out: use `hodei wait` or a webhook")

    def time(self, option: Option) -> None:
        seconds = slurm_seconds(option.value)
        if seconds is None:
            self.reject(option, "is not a time limit", malformed=True)
        elif seconds:
            self._out["timeout"] = f"{seconds}s" if seconds % 60 else f"{seconds // 60}m"

    def mem(self, option: Option) -> None:
        amount = slurm_memory(option.value)
        if not amount and not _MEMORY.fullmatch(option.value.upper()):
            self.reject(option, "is not an amount of memory", malformed=True)
        elif not amount:
            self.reject(option, "asks for all memory of a node, which is not supported", "request an amount")
        else:
            self._memory = ({"mem-per-cpu": "cpu", "mem-per-gpu": "gpu"}.get(option.name, "node"), amount)

    def count(self, option: Option) -> None:
        if re.fullmatch(r"[1-9]\d{0,8}", option.value):
            self._counts[option.name] = int(option.value)
        else:
            self.reject(option, "is not a number", malformed=True)
        if option.name == "cpus-per-gpu":
            self._env["SLURM_CPUS_PER_GPU"] = option.value

    def nodes(self, option: Option) -> None:
        """`4`, or `2-4`: the minimum is used."""
        if re.fullmatch(r"[1-9]\d*(-\d+)?", option.value):
            self._counts["nodes"] = int(option.value.partition("-")[0])
        else:
            self.reject(option, "is not a number of nodes", malformed=True)

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
                    self.note(option, "could not be parsed and was left out")
                continue
            self._gpus = ({"gpus": "job", "gpus-per-task": "task"}.get(option.name, "node"), int(found[2]))
            if option.name == "gpus":
                self._env["SLURM_GPUS"] = found[2]
            if found[1]:
                self._out["gpu_type"] = found[1]

    def chdir(self, option: Option) -> None:
        self._out["workdir"] = posixpath.join(self._directory, option.value)

    def exports(self, option: Option) -> None:
        names = [pair for pair in option.value.split(",") if "=" not in pair]
        if self._call is None and any(name not in ("NONE", "NIL") for name in names):
            self.note(option, "exports variables of the shell: write those that are needed under `env`")

    def after(self, option: Option) -> None:
        try:
            found = parse_dependencies(option.value)
        except InvalidInput as error:
            self.reject(option, error.message, error.hint)
            return
        if self._call is None:
            kinds = ", ".join(f"{kind}: [...]" for kind in found.jobs)
            self.note(option, f"was left out: write the Hodei jobs to wait for as `after: {{{kinds}}}`")
        else:
            resolve = self._call.jobs
            after: Document = {kind: [job for id in ids for job in resolve(id)] for kind, ids in found.jobs.items()}
            self._out["after"] = {**after, "need": 1} if found.any else after

    def unsupported(self, option: Option) -> None:
        self.reject(option, "is not supported", _INSTEAD[option.name])

    def requeue(self, option: Option) -> None:
        if option.name == "no-requeue":
            self._out["restart"] = "never"

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
                self.note(option, f"({key}) has no equivalent and was left out")

    def _chunk(self, option: Option, value: str) -> None:
        first, *more = value.split("+")
        if more:
            self.note(option, "has different chunks; only the first was used")
        head, *pairs = first.split(":")
        nodes = self._counts["nodes"] = int(head) if head.isdigit() else 1
        for pair in pairs:
            key, _, amount = pair.partition("=")
            if key != "mpiprocs":
                self._amount(option, "ncpus" if key == "ppn" else key, amount)
            elif amount.isdigit():
                self._counts["ntasks"] = nodes * int(amount)

    def _amount(self, option: Option, key: str, value: str) -> None:
        if key == "ncpus" and value.isdigit():
            self._counts["cpus-per-task"] = int(value)
        elif key == "ngpus" and value.isdigit():
            self._gpus = ("task", int(value))
        elif key == "mem" and (found := re.fullmatch(r"(\d+)([kmgt]?)b?", value.lower())):
            self._out["memory"] = found[1] + (f"{found[2].upper()}i" if found[2] else "")
        else:
            self.note(option, f"({key}={value}) has no equivalent and was left out")


_INSTEAD = {
    "exclusive": "request the cores and the memory of a whole node",
    "hold": "submit it and run `hodei hold`, or add a dependency",
    "begin": "`hodei cron`, or at(1)",
    "uid": "jobs run as the account of their backend",
    "gid": "jobs run as the account of their backend",
}
_Handler = Callable[[_Conversion, Option], None]
_SLURM: dict[str, _Handler] = {
    "account": _Conversion.project, "array": _Conversion.array, "time": _Conversion.time, "chdir": _Conversion.chdir,
    **dict.fromkeys(("mem", "mem-per-cpu", "mem-per-gpu"), _Conversion.mem), "nodes": _Conversion.nodes,
    **dict.fromkeys(("cpus-per-task", "cpus-per-gpu", "ntasks", "ntasks-per-node"), _Conversion.count),
    **dict.fromkeys(("gres", "gpus", "gpus-per-node", "gpus-per-task"), _Conversion.gres),
    "partition": _Conversion.partition, "export": _Conversion.exports, "dependency": _Conversion.after,
    **dict.fromkeys(("requeue", "no-requeue"), _Conversion.requeue), **dict.fromkeys(_INSTEAD, _Conversion.unsupported),
    **dict.fromkeys(_MAIL, _Conversion.mail),
}  # fmt: skip
_PBS: dict[str, _Handler] = {
    "project": _Conversion.project, "account": _Conversion.project, "array": _Conversion.array,
    "resource": _Conversion.resource, "queue": _Conversion.partition, "variables": _Conversion.exports,
    **dict.fromkeys(("output", "error"), _Conversion.output), **dict.fromkeys(_MAIL, _Conversion.mail),
}  # fmt: skip
# Used by their values alone, or without effect in Hodei.
_NO_HANDLER = {
    "slurm": {
        "job-name", "output", "error", "input", "open-mode", "parsable", "quiet", "verbose", "wait", "test-only", "ignore-pbs",
    },
    "pbs": {"name", "join", "keep", "shell", "rerun", "quiet"},
}  # fmt: skip


def slurm_memory(text: str) -> str:
    """`4G`, `500` (MiB); "" for 0 and for what cannot be parsed."""
    found = _MEMORY.fullmatch(text.upper())
    return f"{found[1]}{_UNITS[found[2]]}" if found and int(found[1]) else ""
