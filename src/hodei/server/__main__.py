"""`python -m hodei.server`, which `hodei up` executes: the API, the scheduler and the supervisor of the local agent.

Prints its address and where the token is when it is ready. Stops in order on SIGTERM or Ctrl-C; jobs continue.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import click
import msgspec

from hodei import __version__
from hodei.cli.groups import exit_code
from hodei.configuration import load_config
from hodei.extensions import AUTHENTICATORS, make
from hodei.model.config import Config, LimitsConfig
from hodei.model.errors import Conflict, HodeiError, InvalidInput
from hodei.model.resources import parse_duration_ms
from hodei.process import call_on_stop_signal
from hodei.runtime.service import Service
from hodei.server.app import make_app
from hodei.server.home import LogFile, check_store_exists, find_config_file, lock_home, prepare_home
from hodei.server.serving import Limits, Server, make_server, require_tls
from hodei.wiring import make_service

log = logging.getLogger("hodei.server")
_READY_TIMEOUT_S = 30.0
_RETRY_S = 1.0
_BACKLOG = 2048
# Not an exit code: the process executes a new server.
_RESTART = -1
# File descriptors that are not client connections.
_OTHER_FILES = 200
_PATH = click.Path(path_type=Path)


@click.command("up", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--home", type=_PATH, help="Home directory of the server [env: HODEI_HOME; default: ~/.hodei].")
@click.option("--config", type=_PATH, help="A TOML or YAML file [default: HOME/config.toml or HOME/hodei.yaml].")
@click.option("--host", help="Address to listen on [default: 127.0.0.1].")
@click.option("--port", type=int, help="Port; 0 for any free one [default: 7680, or any if taken].")
@click.option("--insecure", is_flag=True, help="Allow listening beyond loopback without TLS.")
@click.option("--decision-log", help="Write every decision to this file in HOME, for `hodei replay`; '' for none.")
@click.option("--instant", is_flag=True, help="End jobs at once without running anything.")
@click.option("--fresh", is_flag=True, help="Create a new store if that of an earlier server is lost.")
@click.option("--trust-clock", is_flag=True, help="Trust the clock, however far it is ahead of the store's records.")
@click.option("--log-file", type=_PATH, help="Write the log to this file, which is rotated.")
@click.option("--verbose", is_flag=True)
def up(**options: Any) -> int:
    """Start a server: API, scheduler, store and local agent."""
    given = SimpleNamespace(**options)
    try:
        handler = LogFile(given.log_file) if given.log_file else logging.StreamHandler(sys.stderr)
    except OSError as error:
        raise HodeiError(f"cannot write the log {given.log_file}: {error.strerror}") from None
    logging.basicConfig(
        level=logging.DEBUG if given.verbose else logging.INFO, handlers=[handler],
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    try:
        return _serve(given)
    except HodeiError:
        raise
    except Exception:
        log.exception("the server failed")
        raise


def main(args: list[str] | None = None) -> int:
    return exit_code(up.main, args, "hodei up", invalid_input=2)


def _serve(given: SimpleNamespace) -> int:
    home: Path = given.home or Path(os.environ.get("HODEI_HOME") or "~/.hodei").expanduser()
    try:
        prepare_home(home)
        lock = lock_home(home)
        config = _with_options(given, load_config(_config_path(given, home), starting=True))
        renamed = [] if config.server.store else check_store_exists(home, fresh=given.fresh)
    except OSError as error:
        hint = "choose a directory that this user can write to: --home DIR"
        raise InvalidInput(f"{home} cannot be used as a home: {error.strerror}", hint=hint) from error
    for path in renamed:
        log.warning("starting with a new store; files of an earlier server are now in %s", path)
    require_tls(config.server.host, tls=bool(config.server.tls_cert), insecure=given.insecure)
    listener = _listen(config, any_port=given.port is None)
    port: int = listener.getsockname()[1]
    try:
        # Jobs are long-lived: fewer collections that traverse all of them.
        gc.set_threshold(50_000, 20, 50)
        sys.setswitchinterval(0.001)  # short waits for the store's writer thread
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            reread = partial(_reread, given, home, _if_not_empty(_config_path(given, home)))
            code = runner.run(_run_server(home, config, listener, reread, given))
    finally:
        listener.close()
        lock.close()
    if code == _RESTART:
        _restart(given, port)
    return code


def _restart(given: SimpleNamespace, port: int) -> NoReturn:
    """Executes the same program with the same options and port in this process; runs continue."""
    options = {"home": given.home, "config": given.config, "host": given.host, "decision-log": given.decision_log,
               "log-file": given.log_file}  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--{name}" for name in ("insecure", "instant", "verbose") if getattr(given, name)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hodei.server", f"--port={port}", *words])


def _config_path(given: SimpleNamespace, home: Path) -> Path | None:
    return Path(given.config) if given.config is not None else find_config_file(home)


def _reread(given: SimpleNamespace, home: Path, before: Path | None) -> Config:
    """A file that is missing or empty, because it is just being written, does not mean all defaults."""
    path = _config_path(given, home)
    if before is not None and path is None:
        raise InvalidInput(
            f"the configuration {before} does not exist any more", hint="restore it; nothing was changed"
        )
    config = load_config(path)
    if before is not None and _if_not_empty(path) is None:
        hint = "nothing was changed; for all defaults write [scheduling] (in YAML scheduling: {})"
        raise InvalidInput(f"the configuration {path} is empty", hint=hint)
    return _with_options(given, config)


def _if_not_empty(path: Path | None) -> Path | None:
    return path if path is not None and path.read_bytes().strip() else None


def _with_options(given: SimpleNamespace, config: Config) -> Config:
    """The configuration, overridden by the command line."""
    changes = {"host": given.host, "port": given.port, "decision_log": given.decision_log}
    server = msgspec.structs.replace(config.server, **{k: v for k, v in changes.items() if v is not None})
    return msgspec.structs.replace(config, server=server)


def _listen(config: Config, *, any_port: bool) -> socket.socket:
    """`any_port`: a free port, if the configured one is in use."""
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    ports = [config.server.port, 0] if any_port and config.server.port else [config.server.port]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.server.host, port))
            # At once: two sockets may be bound to one port as long as neither listens.
            listener.listen(_BACKLOG)
            return listener
        except OverflowError:
            listener.close()
            raise InvalidInput(f"there is no port {port}", hint="choose one from 0 to 65535") from None
        except OSError as error:
            listener.close()
            failure = error
    raise Conflict(
        f"cannot listen on {config.server.host}:{ports[0]}: {failure.strerror}", hint="choose another --port"
    )


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    try:
        import uvloop
    except ImportError:
        return None
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


async def _run_server(
    home: Path,
    config: Config,
    listener: socket.socket,
    reread: Callable[[], Config],
    given: SimpleNamespace,
) -> int:
    authenticator, token_created = make(AUTHENTICATORS, config.server.authenticator, "authenticator", home)
    service = make_service(home, config, instant=given.instant, trust_clock=given.trust_clock, reread=reread)
    scheme = "https" if config.server.tls_cert else "http"
    host, port = listener.getsockname()[:2]
    address = f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
    limits = config.server.limits
    app = make_app(
        service,
        authenticator,
        hosts=(host, *config.server.names),
        metrics_public=config.server.metrics_public,
        limits=limits,
        body_timeout_s=parse_duration_ms(limits.body_timeout) / 1000,
    )
    server = make_server(
        app,
        host=host,
        port=port,
        certificate=config.server.tls_cert,
        key=config.server.tls_key,
        insecure=given.insecure,
        limits=_connection_limits(limits),
    )
    await service.start()
    announcement = asyncio.create_task(_announce(service, home, address, token_created))
    loop_end = asyncio.create_task(_stop_with_loop(service, server))
    clock_step = asyncio.create_task(_stop_when_clock_set_back(service, server))
    stop_signal = _stop_on_signals(service, server)
    try:
        await server.serve(sockets=[listener])
    finally:
        restart = clock_step.done() and not stop_signal.is_set()
        for task in (announcement, loop_end, clock_step):
            task.cancel()
        (home / "server.json").unlink(missing_ok=True)
        await service.stop()
    if service.loop.fatal is not None:
        return 1
    return _RESTART if restart else 0


def _connection_limits(limits: LimitsConfig) -> Limits:
    """Bounded by the limit on open files."""
    most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, 1)
    if limits.connections > most:
        log.info("at most %d connections: the limit on open files (ulimit -n) allows no more", most)
    return Limits(
        connections=min(limits.connections, most),
        connections_per_address=limits.connections_per_address,
        headers_s=parse_duration_ms(limits.headers_timeout) / 1000,
    )


def _stop_on_signals(service: Service, server: Server) -> asyncio.Event:
    """Returns an event that is set by SIGTERM or SIGINT."""
    stopped = asyncio.Event()

    def stop() -> None:
        stopped.set()
        service.loop.begin_shutdown()
        server.should_exit = True

    call_on_stop_signal(stop)
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()  # the event loop holds only weak references to tasks

    def reload() -> None:
        task = loop.create_task(_reload(service))
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    loop.add_signal_handler(signal.SIGHUP, reload)
    return stopped


async def _reload(service: Service) -> None:
    """On SIGHUP: reads the configuration file. Errors go to the log, and nothing is changed."""
    if service.config_changes is None:
        return
    try:
        change = await service.config_changes.reload("SIGHUP")
        for difference in change.needs_restart:
            log.warning("%s has changed, which needs a restart", difference.path)
    except HodeiError as error:
        log.error("the configuration was not reloaded: %s; %s", error, error.hint)


async def _stop_with_loop(service: Service, server: Server) -> None:
    await service.until_loop_ends()
    server.should_exit = True


async def _stop_when_clock_set_back(service: Service, server: Server) -> None:
    """A restart computes everything that depends on times that are now ahead (pauses, reservations, shares) from the store."""
    while not getattr(service.clock, "set_back_ms", 0):
        await asyncio.sleep(_RETRY_S)
        service.clock.now_ms()
    log.warning("restarting because the clock was set back; jobs continue")
    service.loop.begin_shutdown()
    server.should_exit = True


async def _announce(service: Service, home: Path, address: str, token_created: bool) -> None:
    """Writes the address for the CLI, and prints what to do next."""
    await _write_address(home, address)
    ready = await service.until_ready(_READY_TIMEOUT_S)
    gc.freeze()
    state = "is up" if ready else f"is up, but not ready: {service.not_ready_reason}"
    where = "" if home == Path("~/.hodei").expanduser() else f" (set HODEI_HOME={home})"
    with suppress(BrokenPipeError):
        print(f"Hodei {__version__} {state} at {address}", flush=True)
        print(f"  token    {home / 'token'}{'  (just created, mode 0600)' if token_created else ''}", flush=True)
        print(f"  log in   the hodei command finds both{where}", flush=True)
        print("  try      hodei run -- python3 -c 'print(6*7)'", flush=True)


async def _write_address(home: Path, address: str) -> None:
    path = home / "server.json"
    part = path.with_suffix(".part")
    while True:
        try:
            part.write_text(json.dumps({"address": address, "pid": os.getpid(), "version": __version__}))
            part.chmod(0o600)
            part.replace(path)
            return
        except OSError as error:
            log.error("cannot write %s, next try in %g s: %s", path, _RETRY_S, error.strerror)
            await asyncio.sleep(_RETRY_S)


if __name__ == "__main__":
    sys.exit(main())
