"""The batch script: the only place where words of users meet a shell. Everything of theirs goes through `quoted`.

The script is for bash, which every cluster has, and runs one command: it writes down that it began and how that ended
(so that an exit code outlives the queue's memory of it), and takes care that a signal for the whole job does not keep it
from doing so.

A run may be in the system twice, if a lost reply was taken for a lost job; and a system that crashed may start a job again that
has run, because it wrote that down too late. So the first thing that the script does is to make the record, which only one can:
a script that finds one ends there and then. Nothing runs twice under one run id, whatever the queue does, unless the operator
lets the system start jobs again (`rerun`).

Values are in the script's text alone: never on a command line, where others could read them. Bash repeats the text of a command
that a signal ended on its stderr; so no value, and no word of the user's, is in the text of the command that it waits for,
and what bash says goes nowhere. Names that bash keeps for itself, or could not hand on, are given by `env` instead; for
secrets of such a name there is no way.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from hodei.model.audit import looks_secret
from hodei.model.errors import BackendRefused

SHELL = "/bin/bash"
NOT_TRIED = 125
# The kernel takes no longer word; said here, because asking again cannot help.
WORD_LIMIT = (128 << 10) - 1
SCRIPT_LIMIT = 2 << 20

_PLAIN = re.compile(r"[A-Za-z0-9_@%+:,./-]+")
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
# In $'...' a backslash introduces an escape and a quote ends it. Control characters are written as three octal digits: no
# line of the script begins with anything of a user's, and nothing in it looks like a line's end of another system.
_ESCAPES = {"\\": "\\\\", "'": "\\'", **{chr(code): f"\\{code:03o}" for code in (*range(1, 32), 127)}}
_TABLE = str.maketrans(_ESCAPES)
# Names that bash keeps for itself, may not change, or acts upon when they are set.
_SHELLS_OWN = re.compile(
    r"IFS|OPTIND|OPTARG|OPTERR|PWD|OLDPWD|_|SHLVL|PPID|UID|EUID|GROUPS|LINENO|RANDOM|SRANDOM|SECONDS|EPOCH\w+|PS[0-4]|ENV|"
    r"BASH\w*|SHELLOPTS|FUNCNAME|FUNCNEST|DIRSTACK|HIST\w+|PIPESTATUS|MAPFILE|REPLY|POSIXLY_CORRECT|TMOUT|GLOBIGNORE|"
    r"COMP\w+|COPROC|READLINE\w+|LANG|LC_\w+|TEXTDOMAIN\w*|TIMEFORMAT|EXECIGNORE|CHILD_MAX|IGNOREEOF|FCEDIT|"
    r"PROMPT\w*|auto_resume|histchars|_hodei\w*"
)


def quoted(word: str) -> str:
    """One word for bash, whatever is in it."""
    return word if _PLAIN.fullmatch(word) else f"$'{word.translate(_TABLE)}'"


def batch_script(
    *,
    files: str,
    argv: Sequence[str],
    env: Mapping[str, str],
    workdir: str,
    claim: str,
    job_variable: str,
    node_variable: str,
    element: str = "",
    rerun: bool = False,
    hidden: Sequence[str] = (),
    memory_bytes: int = 0,
) -> str:
    """Runs `argv` with `env` in `workdir` and keeps a record in `files`.status. BackendRefused if bash could not do so.

    `job_variable` and `node_variable` name the system's own variables for the number of the job and for the node;
    `element` is what bash reads as the number of an element of an array, as the queue shows it. `claim`: a word that no other
    script has; a script with another one does nothing once this one has begun. If the script is called with a word, that is
    its claim. `rerun`: the same script may run again, because the system may start a job again. `hidden`: variables of the
    system's own that the command must not see.
    `memory_bytes`: the most memory that the command may use (0: no limit of its own).
    """
    if not argv or not argv[0]:
        raise BackendRefused("the task has no command", hint="give it a `command`")
    plain, odd = _environment(env)
    if odd and "=" in argv[0]:
        raise BackendRefused(
            f"a command with = in its name, and the variables {', '.join(name for name, _ in odd)[:200]}",
            hint="rename one of them",
        )
    where = quoted(workdir) if workdir else '"$HOME"'
    command = " ".join(map(quoted, (*_by_env(odd), *argv)))
    values = " ".join(quoted(value) for _, value in plain)
    exports = [f'export {name}="${{_hodei_env[{place}]}}"' for place, (name, _) in enumerate(plain)]
    script = "\n".join(
        (
            f"#!{SHELL} -p",
            f"_hodei_files={quoted(files)}; _hodei_claim=${{1:-{quoted(claim)}}}",
            "trap : HUP INT QUIT USR1 USR2 ALRM VTALRM; trap _hodei_stop=1 TERM",
            # With -C a file that is there is not opened: making it is one step, also on NFS.
            'if set -C; ! printf \'claim %s\\n\' "$_hodei_claim" >"$_hodei_files.status"; then',
            # The same script once more is the same job, which the system has started again.
            '_hodei_owner=; read -r _ _hodei_owner <"$_hodei_files.status"' if rerun else "_hodei_owner=",
            f'[ "$_hodei_owner" = "$_hodei_claim" ] || exit {NOT_TRIED}; fi 2>/dev/null; set +C',
            f'printf \'began %s %s %s %s\\n\' "${{{job_variable}-}}" "${{{node_variable}-}}" '
            f'"${{EPOCHREALTIME-}}" "{element}" >>"$_hodei_files.status"',
            # A stop that came this early found nobody else to tell.
            '[ -z "${_hodei_stop-}" ] || exit 143',
            f"_hodei_env=({values})",
            f"_hodei_argv=({command})",
            "exec 9>&2 2>/dev/null",
            "(",
            "exec 2>&9 9>&-",
            f"cd -- {where} || {{ printf 'error workdir\\n' >>\"$_hodei_files.status\"; exit {NOT_TRIED}; }}",
            'printf \'pid %s\\n\' "$BASHPID" >>"$_hodei_files.status"',
            *(_memory_fence(memory_bytes) if memory_bytes else ()),
            " ".join(("unset OLDPWD _hodei_files _hodei_claim _hodei_stop", *hidden)),
            *exports,
            'exec -- "${_hodei_argv[@]}"',
            ") </dev/null",
            "_hodei_exit=$?",
            'printf \'exit %s %s\\n\' "$_hodei_exit" "${EPOCHREALTIME-}" >>"$_hodei_files.status"',
            "exit $_hodei_exit",
            "",
        )
    )
    _check(argv, script)
    return script


def _memory_fence(most: int) -> tuple[str, ...]:
    """Where the system holds jobs to their memory by a control group, that is enough. Elsewhere the address space is limited,
    as the agent does on a host without control groups."""
    return (
        "_hodei_fenced=",
        "while IFS=: read -r _ _hodei_kind _hodei_path; do",
        'case ",$_hodei_kind," in ,,) _hodei_root=/sys/fs/cgroup _hodei_file=memory.max;;',
        "*,memory,*) _hodei_root=/sys/fs/cgroup/memory _hodei_file=memory.limit_in_bytes;; *) continue;; esac",
        # A limit of a group further up, such as a container's around the whole system, is not the job's.
        'while [ -n "$_hodei_path" ] && [ "$_hodei_path" != / ]; do',
        'read -r _hodei_has 2>/dev/null <"$_hodei_root$_hodei_path/$_hodei_file" &&',
        f'[ "$_hodei_has" != max ] && [ "$_hodei_has" -le {most * 2} ] && _hodei_fenced=1',
        "_hodei_path=${_hodei_path%/*}; done; done 2>/dev/null </proc/self/cgroup",
        f'[ -n "$_hodei_fenced" ] || ulimit -v {max(most >> 10, 1)}',
        "unset _hodei_fenced _hodei_kind _hodei_path _hodei_root _hodei_file _hodei_has",
    )


def array_script(scripts: Sequence[tuple[str, str, str]], variable: str) -> str:
    """Several batch scripts as one, each with where its two streams go; the system's `variable` says which is meant."""
    lines = [f"#!{SHELL} -p", f'case "${{{variable}-}}" in']
    for number, (script, stdout, stderr) in enumerate(scripts):
        body = script.partition("\n")[2].rstrip("\n")
        lines += [f"{number})", f"exec >>{quoted(stdout)} 2>>{quoted(stderr)}", body, ";;"]
    return "\n".join((*lines, "esac", ""))


def _by_env(odd: Sequence[tuple[str, str]]) -> tuple[str, ...]:
    return ("/usr/bin/env", "--", *(f"{name}={value}" for name, value in odd)) if odd else ()


def _environment(env: Mapping[str, str]) -> tuple[list[tuple[str, str]], list[tuple[str, str]]]:
    """Those that bash can hand on as they are; and the others."""
    plain, odd = [], []
    for name, value in env.items():
        if not name or "=" in name:
            raise BackendRefused(f"{name[:80]!r} cannot be the name of a variable", hint="rename it")
        if _NAME.fullmatch(name) and not _SHELLS_OWN.fullmatch(name):
            plain.append((name, value))
        elif looks_secret(name) and not _SHELLS_OWN.fullmatch(name):
            raise BackendRefused(
                f"the variable {name[:80]!r} looks like a secret, and by this name it could only be handed on where "
                "others can read it",
                hint="name it with letters, digits and _ only",
            )
        else:
            odd.append((name, value))
    return plain, odd


def _check(argv: Sequence[str], script: str) -> None:
    try:
        longest = max(len(word.encode()) for word in argv)
        size = len(script.encode())
    except UnicodeEncodeError:
        raise BackendRefused("the command or its environment is no valid Unicode", hint="see the job file") from None
    if "\0" in script:
        raise BackendRefused("there is a NUL in the command or its environment", hint="leave it out")
    if size > SCRIPT_LIMIT or longest > WORD_LIMIT:
        raise BackendRefused(
            f"the command and its environment are {size} bytes, the longest word {longest}; the system takes "
            f"{SCRIPT_LIMIT} and {WORD_LIMIT}",
            hint="put the data into a file",
        )
