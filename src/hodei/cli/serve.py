"""`hodei up`, `down`, `replay`, `test`, `bench`: what needs more of the house than the terminal knows runs as a program of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.options import output_option, settings
from hodei.cli.output import emit_one, note
from hodei.model.errors import Conflict, HodeiError, NotFound

_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
_POLL_S = 0.05
# As in `hodei.server.home`, but smaller: there is room left for what the server says first.
_LARGE_LOG_BYTES, _OLDER_LOGS = 15 << 20, 3


@click.command()
@click.option("--home", metavar="DIR", help="Home directory of the server [env: HODEI_HOME; default: ~/.hodei].")
@click.option("--host", metavar="ADDRESS", help="Address to listen on [default: 127.0.0.1].")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    metavar="N",
    help="Port; 0 for any free one [default: 7680, or any if taken].",
)
@click.option("--config", metavar="FILE", help="A TOML or YAML file [default: HOME/config.toml or HOME/hodei.yaml].")
@click.option(
    "--decision-log",
    metavar="NAME",
    help="Write every decision to this file in HOME, for `hodei replay` [default: decisions.jsonl; '' for none].",
)
@click.option("--insecure", is_flag=True, help="Allow listening beyond loopback without TLS.")
@click.option("--instant", is_flag=True, help="End jobs at once without running anything, for tests and benchmarks.")
@click.option(
    "--fresh",
    is_flag=True,
    help="Create a new store if that of an earlier server is lost; its remains are moved aside.",
)
@click.option("--trust-clock", is_flag=True, help="Trust the clock, however far it is ahead of the store's records.")
@click.option(
    "-d",
    "--detach",
    is_flag=True,
    help="Run in the background; the log is HOME/server.log, with up to three older files.",
)
@click.option(
    "--timeout",
    type=float,
    default=30,
    show_default=True,
    metavar="S",
    help="With -d: how long to wait until it is ready.",
)
@click.option("--verbose", is_flag=True, hidden=True)
@click.option("--log-file", metavar="FILE", hidden=True)
def up(
    detach: bool,
    timeout: float,
    insecure: bool,
    instant: bool,
    fresh: bool,
    trust_clock: bool,
    verbose: bool,
    **given: Any,
) -> None:
    """Start a server with its scheduler, store and local agent: one command, one process tree, one directory."""
    need_server()
    home = given.pop("home") or settings()["home"]
    args = [f"--home={home}"] if home else []
    args += [f"--{name.replace('_', '-')}={value}" for name, value in given.items() if value is not None]
    args += [
        f"--{name}"
        for name, wanted in (
            ("insecure", insecure),
            ("instant", instant),
            ("fresh", fresh),
            ("trust-clock", trust_clock),
            ("verbose", verbose),
        )
        if wanted
    ]
    if detach:
        _start_detached(home, args, timeout)
    else:
        _become("hodei.server", args)


@click.command()
@click.option("--home", metavar="DIR", help="The home of the server to stop [env: HODEI_HOME; default: ~/.hodei].")
@click.option(
    "--timeout", type=float, default=60, show_default=True, metavar="S", help="How long to wait until it has exited."
)
@output_option
def down(home: str | None, timeout: float, output: str) -> None:
    """Stop the server of HOME and wait until it has exited. Its jobs are kept."""
    from hodei.client.transport import home_dir, read_server_file

    where = home_dir(home or settings()["home"])
    found = read_server_file(where)
    if found is None or not found.pid or not is_alive(found.pid):
        raise NotFound(f"no server runs in {where}", hint="another one? name its home: hodei down --home DIR")
    if not is_our_server(found.pid):
        hint = f"the server has gone without cleaning up; if so, remove {where}/server.json"
        raise Conflict(f"process {found.pid} is not a Hodei server, so it is left alone", hint=hint)
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while is_alive(found.pid):
        if time.monotonic() > deadline:
            hint = f"it may be busy with an orderly end; see {where}/server.log"
            raise HodeiError(f"server {found.pid} has not ended within {timeout:g} s", hint=hint, code="STILL_RUNNING")
        time.sleep(_POLL_S)
    stopped = {"pid": found.pid, "address": found.address, "home": str(where)}
    emit_one(stopped, output, name=lambda s: str(s["pid"]), text=lambda s: f"server at {s['address']} stopped")


@click.command(context_settings=_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def replay(args: tuple[str, ...]) -> None:
    """Replay a decision log and report whether the plans are the same: hodei replay [FILE] [--all] [--list]."""
    need_server(args)
    home = settings()["home"]
    _become("hodei.sim.replay", [*([f"--home={home}"] if home else []), *args])


@click.command(context_settings=_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def test(args: tuple[str, ...]) -> None:
    """Run scenario files with the real scheduler and check their expectations: hodei test --help."""
    need_server(args)
    _become("hodei.sim.scenario", list(args))


@click.command(context_settings=_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def sim(args: tuple[str, ...]) -> None:
    """Simulate policies on recorded or generated workloads: hodei sim replay|compare|forecasts|policies|traces --help."""
    need_server(args)
    _become("hodei.sim", list(args))


@click.command(context_settings=_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def kube(args: tuple[str, ...]) -> None:
    """Schedule the pods of a Kubernetes cluster, or explain why one waits: hodei kube run|why|plan --help."""
    ask_kube(list(args))


def ask_kube(args: list[str]) -> NoReturn:
    if not all(find_spec(name) for name in ("starlette", "uvicorn", "numpy", "kubernetes")):
        _help_without(args, "hodei[server,kubernetes]")
        raise UsageProblem("this installation cannot talk to Kubernetes", hint="pip install 'hodei[server,kubernetes]'")
    _become("hodei.kube", args)


@click.command(context_settings=_THROUGH, add_help_option=False)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def bench(args: tuple[str, ...]) -> None:
    """Benchmark the engine or a server, in a source checkout: hodei bench engine|server --help."""
    need_server(args)
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise UsageProblem("benchmarks are part of the source checkout, not of an installed package")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    _become("benchmarks", list(args))


def need_server(args: Sequence[str] = ()) -> None:
    """UsageProblem, with what to install, if this is only the client. Help that `args` ask for can be had all the same."""
    if not all(find_spec(name) for name in ("starlette", "uvicorn", "numpy", "prometheus_client")):
        _help_without(args, "hodei[server]")
        what = "this installation has only the client; this command needs the extra 'server'"
        raise UsageProblem(what, hint="pip install 'hodei[server]'")


def _help_without(args: Sequence[str], extra: str) -> None:
    """The short help of a command whose program is not installed, if help is what was asked for."""
    if {"-h", "--help"} & set(args):
        ctx = click.get_current_context()
        click.echo(ctx.get_help())
        click.echo(f"\nIts options are told by its program, which is not installed here: pip install '{extra}'")
        ctx.exit(0)


def is_alive(pid: int) -> bool:
    """Whether the process is there and has not ended (one that nobody has reaped yet has)."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (OSError, IndexError):
        return True


def is_our_server(pid: int) -> bool:
    """A pid is used again after its process has gone, so the command line is looked at before any signal is sent."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
        words = shown.stdout.split()
    return any(word == "hodei.server" or word.endswith(("/hodei/server", "hodei/server/__main__.py")) for word in words)


def _become(module: str, args: list[str]) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def _start_detached(home: str | None, args: list[str], timeout_s: float) -> None:
    from hodei.client.transport import home_dir, read_server_file
    from hodei.detached_process import DetachedProcess

    where = home_dir(home)
    running = read_server_file(where)
    if running is not None and running.pid and is_alive(running.pid) and is_our_server(running.pid):
        note(f"already running at {running.address} (process {running.pid})")
        return
    where.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = where / "server.log"
    _set_aside(log_path)
    log_offset = log_path.stat().st_size if log_path.exists() else 0
    server = DetachedProcess([sys.executable, "-m", "hodei.server", f"--log-file={log_path}", *args], log_path)
    deadline = time.monotonic() + timeout_s
    while (missing := _not_ready(where, server.pid)) is not None:
        if server.poll() is not None:
            said, next_step = _last_words(log_path, log_offset)
            raise HodeiError(
                f"the server ended at once (exit code {server.exit_code}): {said}",
                hint=next_step or f"see {log_path}", code="NOT_STARTED",
            )  # fmt: skip
        if time.monotonic() > deadline:
            hint = missing.hint or f"it goes on starting as process {server.pid}; see {log_path}"
            text = f"the server is not ready after {timeout_s:g} s: {missing.message}"
            raise HodeiError(text, hint=hint, code="NOT_READY")
        time.sleep(_POLL_S)
    found = read_server_file(where)
    click.echo(found.address if found else "")
    note(f"server {server.pid} is ready; its log is {log_path}")
    if where != home_dir():
        note(f"to talk to it: export HODEI_HOME={where}")
    note(f"this user's commands find its token in {where}/token; elsewhere set HODEI_SERVER and HODEI_TOKEN")
    note("try: hodei run -- echo hello        stop it: hodei down")


def _set_aside(log_path: Path) -> None:
    """A log that is large already is set aside now, so that what the server says first is at the end of this file."""
    if not log_path.exists() or log_path.stat().st_size < _LARGE_LOG_BYTES:
        return
    for number in range(_OLDER_LOGS - 1, 0, -1):
        older = log_path.with_name(f"{log_path.name}.{number}")
        if older.exists():
            older.replace(log_path.with_name(f"{log_path.name}.{number + 1}"))
    log_path.replace(log_path.with_name(f"{log_path.name}.1"))


def _not_ready(where: Path, pid: int) -> HodeiError | None:
    """What is still missing before the server takes jobs; None if nothing is."""
    from hodei.client import Client
    from hodei.client.transport import read_server_file

    found = read_server_file(where)
    if found is None or found.pid != pid:
        return HodeiError("it has not said where it listens")
    try:
        with Client(found.address, home=where, timeout_s=5) as server:
            server.ready()
    except HodeiError as error:
        return error
    return None


def _last_words(log_path: Path, since: int) -> tuple[str, str]:
    """Why it ended, and what to do about it if it said so."""
    with open(log_path, "rb") as log:
        log.seek(since)
        lines = [line for line in log.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
    said = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    hints = [line.strip().removeprefix("next: ") for line in lines if line.strip().startswith("next: ")]
    return said[-1].strip() if said else "it said nothing", hints[-1] if hints else ""
