"""`hodei up` and `down`, and commands that run as programs of their own: `replay`, `test`, `sim`, `kube`, `bench`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import click

from hodei.cli.errors import UsageProblem
from hodei.cli.options import output_option, settings
from hodei.cli.output import emit_one, note
from hodei.model.errors import Conflict, HodeiError, NotFound

_PASS_THROUGH = {"ignore_unknown_options": True, "allow_extra_args": True, "allow_interspersed_args": False}
_POLL_S = 0.05
# Smaller than the limit of the server itself, so that its first messages fit.
_MAX_LOG_BYTES, _OLD_LOGS = 15 << 20, 3


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
@output_option
def up(detach: bool, timeout: float, output: str, **given: Any) -> None:
    """Start a server with its scheduler, store and local agent: one command, one process tree, one directory.

    With -d the address is printed when the server is ready; -o is its format.
    """
    need_server()
    home = given.pop("home") or settings()["home"]
    args = [f"--home={home}"] if home else []
    for name, value in given.items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            args.append(option)
        elif value is not None and value is not False:
            args.append(f"{option}={value}")
    if detach:
        _start_detached(home, args, timeout, output)
    else:
        run_program("hodei.server", args)


@click.command()
@click.option("--home", metavar="DIR", help="The home of the server to stop [env: HODEI_HOME; default: ~/.hodei].")
@click.option(
    "--timeout", type=float, default=60, show_default=True, metavar="S", help="How long to wait until it has exited."
)
@output_option
def down(home: str | None, timeout: float, output: str) -> None:
    """Stop the server of HOME and wait until it has exited. Its jobs are kept."""
    from hodei.client.transport import home_dir, read_server_file

    home_path = home_dir(home or settings()["home"])
    found = read_server_file(home_path)
    if found is None or not found.pid or not is_alive(found.pid):
        raise NotFound(f"no server runs in {home_path}", hint="for another home: hodei down --home DIR")
    if not is_server_process(found.pid):
        hint = f"the server ended without removing its file; if so, remove {home_path}/server.json"
        raise Conflict(f"process {found.pid} is not a Hodei server, so it is not stopped", hint=hint)
    os.kill(found.pid, signal.SIGTERM)
    deadline = time.monotonic() + timeout
    while is_alive(found.pid):
        if time.monotonic() > deadline:
            hint = f"it may still be shutting down; see {home_path}/server.log"
            raise HodeiError(f"server {found.pid} has not ended within {timeout:g} s", hint=hint, code="STILL_RUNNING")
        time.sleep(_POLL_S)
    stopped = {"pid": found.pid, "address": found.address, "home": str(home_path)}
    emit_one(stopped, output, name=lambda s: str(s["pid"]), text=lambda s: f"server at {s['address']} stopped")


def _program(name: str, start: Callable[[list[str]], NoReturn], help: str) -> click.Command:
    """A command whose arguments are parsed by another program."""

    @click.command(name, context_settings=_PASS_THROUGH, add_help_option=False, help=help)
    @click.argument("args", nargs=-1, type=click.UNPROCESSED)
    def command(args: tuple[str, ...]) -> None:
        start(list(args))

    return command


def _start(module: str, args: list[str]) -> NoReturn:
    need_server(args)
    run_program(module, args)


def _start_replay(args: list[str]) -> NoReturn:
    home = settings()["home"]
    need_server(args)
    run_program("hodei.sim.replay", [*([f"--home={home}"] if home else []), *args])


def start_kube(args: list[str]) -> NoReturn:
    if not all(find_spec(name) for name in ("starlette", "uvicorn", "numpy", "kubernetes")):
        _help_without(args, "hodei[server,kubernetes]")
        raise UsageProblem("this installation cannot talk to Kubernetes", hint="pip install 'hodei[server,kubernetes]'")
    run_program("hodei.kube", args)


def _start_bench(args: list[str]) -> NoReturn:
    need_server(args)
    checkout = Path(__file__).resolve().parents[3]
    if not (checkout / "benchmarks" / "__main__.py").is_file():
        raise UsageProblem("benchmarks are part of the source checkout, not of an installed package")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(checkout), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_program("benchmarks", args)


replay = _program(
    "replay",
    _start_replay,
    "Replay a decision log and report whether the plans are the same: hodei replay [FILE] [--all] [--list].",
)
test = _program(
    "test",
    partial(_start, "hodei.sim.scenario"),
    "Run scenario files with the real scheduler and check their expectations: hodei test --help.",
)
sim = _program(
    "sim",
    partial(_start, "hodei.sim"),
    "Simulate policies on recorded or generated workloads: hodei sim replay|compare|forecasts|policies|traces --help.",
)
kube = _program(
    "kube",
    start_kube,
    "Schedule the pods of a Kubernetes cluster, or explain why one waits: hodei kube run|why|plan --help.",
)
bench = _program(
    "bench", _start_bench, "Benchmark the engine or a server, in a source checkout: hodei bench engine|server --help."
)


def need_server(args: Sequence[str] = ()) -> None:
    """UsageProblem, with what to install, if only the client is installed; with `--help` in `args`, a short help."""
    if not all(find_spec(name) for name in ("starlette", "uvicorn", "numpy", "prometheus_client")):
        _help_without(args, "hodei[server]")
        what = "this installation has only the client; this command needs the extra 'server'"
        raise UsageProblem(what, hint="pip install 'hodei[server]'")


def _help_without(args: Sequence[str], extra: str) -> None:
    """Print the short help of a command whose program is not installed, if `args` ask for help."""
    if {"-h", "--help"} & set(args):
        ctx = click.get_current_context()
        click.echo(ctx.get_help())
        click.echo(f"\nFor its options install the program: pip install '{extra}'")
        ctx.exit(0)


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
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


def is_server_process(pid: int) -> bool:
    """A pid may have been reused by another process, so check its command line before sending a signal."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        shown = subprocess.run(["ps", "-o", "command=", "-p", str(pid)], capture_output=True, text=True, check=False)
        words = shown.stdout.split()
    return any(word == "hodei.server" or word.endswith(("/hodei/server", "hodei/server/__main__.py")) for word in words)


def run_program(module: str, args: list[str]) -> NoReturn:
    """Replaces this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", module, *args])


def _start_detached(home: str | None, args: list[str], timeout_s: float, output: str) -> None:
    from hodei.client.transport import home_dir, read_server_file
    from hodei.process import DetachedProcess

    home_path = home_dir(home)
    running = read_server_file(home_path)
    if running is not None and running.pid and is_alive(running.pid) and is_server_process(running.pid):
        note(f"already running at {running.address} (process {running.pid})")
        return
    home_path.mkdir(mode=0o700, parents=True, exist_ok=True)
    log_path = home_path / "server.log"
    _rotate(log_path)
    log_offset = log_path.stat().st_size if log_path.exists() else 0
    server = DetachedProcess([sys.executable, "-m", "hodei.server", f"--log-file={log_path}", *args], log_path)
    deadline = time.monotonic() + timeout_s
    while (not_ready := _why_not_ready(home_path, server.pid)) is not None:
        if server.poll() is not None:
            reason, hint = _last_error(log_path, log_offset)
            raise HodeiError(
                f"the server ended at once (exit code {server.exit_code}): {reason}",
                hint=hint or f"see {log_path}", code="NOT_STARTED",
            )  # fmt: skip
        if time.monotonic() > deadline:
            hint = not_ready.hint or f"it is still starting as process {server.pid}; see {log_path}"
            text = f"the server is not ready after {timeout_s:g} s: {not_ready.message}"
            raise HodeiError(text, hint=hint, code="NOT_READY")
        time.sleep(_POLL_S)
    found = read_server_file(home_path)
    started = {"pid": server.pid, "address": found.address if found else "", "home": str(home_path)}
    emit_one(started, output, name=lambda s: str(s["pid"]), text=lambda s: str(s["address"]))
    note(f"server {server.pid} is ready; its log is {log_path}")
    if home_path != home_dir():
        note(f"to use it: export HODEI_HOME={home_path}")
    note(f"this user's commands find its token in {home_path}/token; elsewhere set HODEI_SERVER and HODEI_TOKEN")
    note("try: hodei run -- echo hello        stop it: hodei down")


def _rotate(log_path: Path) -> None:
    """Rotate a large log before the start, so that the first messages of the server are in this file."""
    if not log_path.exists() or log_path.stat().st_size < _MAX_LOG_BYTES:
        return
    for number in range(_OLD_LOGS - 1, 0, -1):
        older = log_path.with_name(f"{log_path.name}.{number}")
        if older.exists():
            older.replace(log_path.with_name(f"{log_path.name}.{number + 1}"))
    log_path.replace(log_path.with_name(f"{log_path.name}.1"))


def _why_not_ready(home: Path, pid: int) -> HodeiError | None:
    """Why the server does not accept jobs yet; None if it does."""
    from hodei.client import Client
    from hodei.client.transport import read_server_file

    found = read_server_file(home)
    if found is None or found.pid != pid:
        return HodeiError("it has not written its address yet")
    try:
        with Client(found.address, home=home, timeout_s=5) as server:
            server.ready()
    except HodeiError as error:
        return error
    return None


def _last_error(log_path: Path, since: int) -> tuple[str, str]:
    with open(log_path, "rb") as log:
        log.seek(since)
        lines = [line for line in log.read()[-4000:].decode(errors="replace").splitlines() if line.strip()]
    found = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")] or lines
    hints = [line.strip().removeprefix("next: ") for line in lines if line.strip().startswith("next: ")]
    return found[-1].strip() if found else "no message", hints[-1] if hints else ""
