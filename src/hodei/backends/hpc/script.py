"""The batch script of a run: the only place where user text meets a shell. All of it goes through `quoted`.

The script is for bash, which every cluster has, and runs one command. It records the start, the CPU time and the exit code,
so that they outlive the batch system's memory of the job, and survives signals to the whole job long enough to do so.

A run may be in the batch system twice if a lost reply was taken for a lost job, and a system that crashed may start a job
again. So the script first creates the record, which only one script can do; a script that finds one exits. Nothing runs twice
under one run id, unless the operator lets the system restart jobs (`rerun`).

Values are only in the text of the script, never on a command line that other users can read. Bash prints the text of a command
that a signal ended: so that text contains neither values nor arguments of the user, and bash's own messages are discarded.
Variables whose names bash reserves or cannot export are set by `env` instead; secrets with such names are refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hodei.model.audit import looks_secret
from hodei.model.errors import BackendRefused

SHELL = "/bin/bash"
NOT_STARTED = 125
# The kernel's limit for one argument. Checked here, because a retry cannot help.
ARGUMENT_LIMIT = (128 << 10) - 1
SCRIPT_LIMIT = 2 << 20

_UNQUOTED = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# In $'...' a backslash starts an escape and a quote ends the string. Control characters become octal escapes, so that user
# text never starts a line of the script and contains no line ending of another system.
_ESCAPES = {"\\": "\\\\", "'": "\\'", **{chr(code): f"\\{code:03o}" for code in (*range(1, 32), 127)}}
_TABLE = str.maketrans(_ESCAPES)
# Names that bash reserves, does not let change, or acts upon.
_RESERVED = re.compile(
    r"IFS|OPTIND|OPTARG|OPTERR|PWD|OLDPWD|_|SHLVL|PPID|UID|EUID|GROUPS|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH\w+|PS[0-4]|ENV|"
    r"BASH\w*|SHELLOPTS|FUNCNAME|FUNCNEST|DIRSTACK|HIST\w+|PIPESTATUS|MAPFILE|REPLY|POSIXLY_CORRECT|TMOUT|GLOBIGNORE|"
    r"COMP\w+|COPROC|READLINE\w+|LANG|LC_\w+|TEXTDOMAIN\w*|TIMEFORMAT|EXECIGNORE|CHILD_MAX|IGNOREEOF|FCEDIT|"
    r"PROMPT\w*|auto_resume|histchars|_hodei\w*"
)


def quoted(text: str) -> str:
    """Any text as one word for bash."""
    return text if _UNQUOTED.fullmatch(text) else f"$'{text.translate(_TABLE)}'"


def batch_script(
    *,
    files: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    claim: str,
    job_variable: str,
    node_variable: str,
    element_id: str = "",
    rerun: bool = False,
    hidden: Sequence[str] = (),
    memory_bytes: int = 0,
) -> str:
    """Runs `argv` with `env` in `workdir` and writes the record `files`.status. BackendRefused if bash cannot do that.

    `job_variable` and `node_variable` name the batch system's variables for the job's id and the node; `element_id` is a bash
    expression for the id of an array element as the queue shows it. `claim` is unique to the script; an argument of the script
    replaces it. After one script has started, scripts with other claims exit. `rerun`: the same script may run again, because
    the system may restart a job. `hidden`: variables of the system to hide from the command. `memory_bytes`: its memory limit,
    0 for none.
    """
    if not argv or not argv[0]:
        raise BackendRefused("the task has no command", hint="give it a `command`")
    exported, by_env = _split_environment(env)
    if by_env and "=" in argv[0]:
        raise BackendRefused(
            f"the command's name has a =, and so it cannot be run with the variables {', '.join(dict(by_env))[:200]}",
            hint="rename the command or the variables",
        )
    where = quoted(workdir) if workdir else '"$HOME"'
    env_command = ("/usr/bin/env", "--", *(f"{name}={value}" for name, value in by_env)) if by_env else ()
    command = " ".join(map(quoted, (*env_command, *argv)))
    values = " ".join(quoted(value) for _, value in exported)
    exports = [f'export {name}="${{_hodei_env[{place}]}}"' for place, (name, _) in enumerate(exported)]
    script = "\n".join(
        (
            f"#!{SHELL} -p",
            f"_hodei_files={quoted(files)}; _hodei_claim=${{1:-{quoted(claim)}}}",
            "trap : HUP INT QUIT USR1 USR2 ALRM VTALRM; trap _hodei_stop=1 TERM",
            # With -C an existing file is not opened: creating it is atomic, also on NFS.
            'if set -C; ! printf \'claim %s\\n\' "$_hodei_claim" >"$_hodei_files.status"; then',
            # The same script again is the same job, restarted by the system.
            '_hodei_owner=; read -r _ _hodei_owner <"$_hodei_files.status"' if rerun else "_hodei_owner=",
            f'[ "$_hodei_owner" = "$_hodei_claim" ] || exit {NOT_STARTED}; fi 2>/dev/null; set +C',
            f'printf \'started %s %s %s %s\\n\' "${{{job_variable}-}}" "${{{node_variable}-}}" '
            f'"${{EPOCHREALTIME-}}" "{element_id}" >>"$_hodei_files.status"',
            # A TERM that came this early reached nothing but this script.
            '[ -z "${_hodei_stop-}" ] || exit 143',
            f"_hodei_env=({values})",
            f"_hodei_argv=({command})",
            "exec 9>&2 2>/dev/null",
            "(",
            "exec 2>&9 9>&-",
            f"cd -- {where} || {{ printf 'error workdir\\n' >>\"$_hodei_files.status\"; exit {NOT_STARTED}; }}",
            'printf \'pid %s\\n\' "$BASHPID" >>"$_hodei_files.status"',
            *(_memory_limit(memory_bytes) if memory_bytes else ()),
            " ".join(("unset OLDPWD _hodei_files _hodei_claim _hodei_stop", *hidden)),
            *exports,
            'exec -- "${_hodei_argv[@]}"',
            ") </dev/null",
            "_hodei_exit=$?",
            'times >>"$_hodei_files.status"',
            'printf \'exit %s %s\\n\' "$_hodei_exit" "${EPOCHREALTIME-}" >>"$_hodei_files.status"',
            "exit $_hodei_exit",
            "",
        )
    )
    _check(argv, script)
    return script


def _memory_limit(limit: int) -> tuple[str, ...]:
    """Limit the address space, as the agent does, unless a control group of the batch system limits the memory."""
    return (
        "_hodei_limited=",
        "while IFS=: read -r _ _hodei_kind _hodei_path; do",
        'case ",$_hodei_kind," in ,,) _hodei_root=/sys/fs/cgroup _hodei_file=memory.max;;',
        "*,memory,*) _hodei_root=/sys/fs/cgroup/memory _hodei_file=memory.limit_in_bytes;; *) continue;; esac",
        # A larger limit of a group further up, such as that of a container, is not the job's.
        'while [ -n "$_hodei_path" ] && [ "$_hodei_path" != / ]; do',
        'read -r _hodei_has 2>/dev/null <"$_hodei_root$_hodei_path/$_hodei_file" &&',
        f'[ "$_hodei_has" != max ] && [ "$_hodei_has" -le {limit * 2} ] && _hodei_limited=1',
        "_hodei_path=${_hodei_path%/*}; done; done 2>/dev/null </proc/self/cgroup",
        f'[ -n "$_hodei_limited" ] || ulimit -v {max(limit >> 10, 1)}',
        "unset _hodei_limited _hodei_kind _hodei_path _hodei_root _hodei_file _hodei_has",
    )


def array_script(scripts: Sequence[tuple[str, str, str]], variable: str) -> str:
    """Several (script, stdout, stderr) as one script; `variable` of the batch system selects the one to run."""
    lines = [f"#!{SHELL} -p", f'case "${{{variable}-}}" in']
    for number, (script, stdout, stderr) in enumerate(scripts):
        body = script.partition("\n")[2].rstrip("\n")
        lines += [f"{number})", f"exec >>{quoted(stdout)} 2>>{quoted(stderr)}", body, ";;"]
    return "\n".join((*lines, "esac", ""))


def _split_environment(env: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Variables that bash can export, and the others."""
    exported, by_env = [], []
    for name, value in env.items():
        if not name or "=" in name:
            raise BackendRefused(f"{name[:80]!r} cannot be the name of a variable", hint="rename it")
        reserved = _RESERVED.fullmatch(name)
        if _NAME.fullmatch(name) and not reserved:
            exported.append((name, value))
        elif looks_secret(name) and not reserved:
            raise BackendRefused(
                f"the variable {name[:80]!r} looks like a secret, and with this name it could only be passed on a command line "
                "that others can read",
                hint="use only letters, digits and _ in its name",
            )
        else:
            by_env.append((name, value))
    return exported, by_env


def _check(argv: Sequence[str], script: str) -> None:
    try:
        longest = max(len(argument.encode()) for argument in argv)
        size = len(script.encode())
    except UnicodeEncodeError:
        raise BackendRefused(
            "the command or its environment is not valid Unicode", hint="correct the job file"
        ) from None
    if "\0" in script:
        raise BackendRefused("the command or its environment contains a NUL", hint="remove it")
    if size > SCRIPT_LIMIT or longest > ARGUMENT_LIMIT:
        raise BackendRefused(
            f"the command and its environment have {size} bytes, the longest argument {longest}; the limits are "
            f"{SCRIPT_LIMIT} and {ARGUMENT_LIMIT}",
            hint="move data into a file",
        )
