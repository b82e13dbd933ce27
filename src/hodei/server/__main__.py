"""`python -m hodei.server` (what `hodei up` becomes): one process with the API, the scheduler and the local agent's leash.

Prints its address and how to log in when it is ready; goes down in order on SIGTERM or Ctrl-C, and its jobs go on.
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
from hodei.extensions import AUTHENTICATORS, make
from hodei.model.config import Config, LimitsConfig
from hodei.model.errors import Conflict, HodeiError, InvalidInput
from hodei.model.resources import parse_duration_ms
from hodei.runtime.service import Service
from hodei.server.app import make_app
from hodei.server.home import CONFIG_FILES, LogFile, ask_about_lost_store, only_one, settle_in
from hodei.server.serving import Limits, Server, make_server, refuse_clear_text
from hodei.wiring import load_config, make_service

log = logging.getLogger("hodei.server")
_READY_TIMEOUT_S = 30.0
_AGAIN_S = 1.0
# Not an exit code: the process goes on as a new server.
_BEGIN_ANEW = -1
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
        settle_in(home)
        lock = only_one(home)
        config = _configured(given, home)
        aside = [] if config.server.store else ask_about_lost_store(home, fresh=given.fresh)
    except OSError as error:
        hint = "name a directory that this user can write to: --home DIR"
        raise InvalidInput(f"{home} cannot be used as a home: {error.strerror}", hint=hint) from error
    for path in aside:
        log.warning("a fresh start: what an earlier server left is set aside in %s", path)
    refuse_clear_text(config.server.host, tls=bool(config.server.tls_cert), insecure=given.insecure)
    listener = _listen(config, asked=given.port is not None)
    port: int = listener.getsockname()[1]
    try:
        # Lists of jobs are long-lived; the collector need not walk what was loaded at start-up again and again.
        gc.set_threshold(50_000, 20, 50)
        sys.setswitchinterval(0.001)  # the store's writer thread should not wait long for its turn
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            reread = partial(_reread, given, home, _with_settings(_config_path(given, home)))
            code = runner.run(_live(home, config, listener, reread, given))
    finally:
        listener.close()
        lock.close()
    if code == _BEGIN_ANEW:
        _begin_anew(given, port)
    return code


def _begin_anew(given: SimpleNamespace, port: int) -> NoReturn:
    """The same program with the same settings in the same process, as after a restart; runs go on meanwhile."""
    options = {"home": given.home, "config": given.config, "host": given.host, "decision-log": given.decision_log,
               "log-file": given.log_file}  # fmt: skip
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += [f"--{name}" for name in ("insecure", "instant", "verbose") if getattr(given, name)]
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, [sys.executable, "-m", "hodei.server", f"--port={port}", *words])


def _configured(given: SimpleNamespace, home: Path) -> Config:
    return _over(given, load_config(_config_path(given, home)))


def _config_path(given: SimpleNamespace, home: Path) -> Path | None:
    if given.config is not None:
        return Path(given.config)
    found = [home / name for name in CONFIG_FILES if (home / name).exists()]
    if len(found) > 1:
        names = " and ".join(path.name for path in found)
        raise InvalidInput(f"{home} has {names}: which of them counts?", hint="keep one, or name it with --config")
    return found[0] if found else None


def _reread(given: SimpleNamespace, home: Path, before: Path | None) -> Config:
    """For a reload; `before` had settings in it. A file that is gone since, or empty as while it is being written, is no
    wish for all the defaults."""
    path = _config_path(given, home)
    if before is not None and path is None:
        raise InvalidInput(f"the configuration {before} is gone", hint="put it back; nothing was changed")
    config = load_config(path)
    if before is not None and _with_settings(path) is None:
        hint = "nothing was changed; to have all defaults, write [scheduling] (or scheduling: {} in YAML)"
        raise InvalidInput(f"the configuration {path} is empty", hint=hint)
    return _over(given, config)


def _with_settings(path: Path | None) -> Path | None:
    return path if path is not None and path.read_bytes().strip() else None


def _over(given: SimpleNamespace, config: Config) -> Config:
    """The file's settings with those of the command line in their place."""
    changes = {"host": given.host, "port": given.port, "decision_log": given.decision_log}
    server = msgspec.structs.replace(config.server, **{k: v for k, v in changes.items() if v is not None})
    return msgspec.structs.replace(config, server=server)


def _listen(config: Config, *, asked: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.server.host else socket.AF_INET
    ports = [config.server.port] if asked or config.server.port == 0 else [config.server.port, 0]
    for port in ports:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((config.server.host, port))
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


async def _live(
    home: Path,
    config: Config,
    listener: socket.socket,
    reread: Callable[[], Config],
    given: SimpleNamespace,
) -> int:
    authenticator, first_time = make(AUTHENTICATORS, config.server.authenticator, "authenticator", home)
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
        limits=_connections(limits),
    )
    await service.start()
    announced = asyncio.create_task(_announce(service, home, address, first_time))
    ended = asyncio.create_task(_until_fatal(service, server))
    set_back = asyncio.create_task(_until_set_back(service, server))
    told_to_stop = _stop_on_signals(service, server)
    try:
        await server.serve(sockets=[listener])
    finally:
        begin_anew = set_back.done() and not told_to_stop.is_set()
        for task in (announced, ended, set_back):
            task.cancel()
        (home / "server.json").unlink(missing_ok=True)
        await service.stop()
    if service.loop.fatal is not None:
        return 1
    return _BEGIN_ANEW if begin_anew else 0


def _connections(limits: LimitsConfig) -> Limits:
    """Never more connections than the system lets us open files, with some left for all the rest."""
    most = max(resource.getrlimit(resource.RLIMIT_NOFILE)[0] - _OTHER_FILES, 1)
    if limits.connections > most:
        log.info("at most %d connections at once: the limit on open files (ulimit -n) allows no more", most)
    return Limits(
        connections=min(limits.connections, most),
        connections_each=limits.connections_per_address,
        headers_s=parse_duration_ms(limits.headers_timeout) / 1000,
    )


def _stop_on_signals(service: Service, server: Server) -> asyncio.Event:
    """The event is set by the first of them."""
    told = asyncio.Event()

    def stop() -> None:
        told.set()
        service.hurry()
        server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop)
    loop.add_signal_handler(signal.SIGHUP, lambda: _keep(loop.create_task(_reload(service))))
    return told


_tasks: set[asyncio.Task[None]] = set()


def _keep(task: asyncio.Task[None]) -> None:
    """A task that nobody waits for is held on to until it is done."""
    _tasks.add(task)
    task.add_done_callback(_tasks.discard)


async def _reload(service: Service) -> None:
    """SIGHUP: the configuration's file is read again. What is wrong with it goes to the log, and nothing is changed."""
    if service.configuring is None:
        return
    try:
        change = await service.configuring.reload("SIGHUP")
        for later in change.needs_restart:
            log.warning("%s has changed, which counts after a restart", later.path)
    except HodeiError as error:
        log.error("the configuration was not reloaded: %s; %s", error, error.hint)


async def _until_fatal(service: Service, server: Server) -> None:
    await service.ended()
    server.should_exit = True


async def _until_set_back(service: Service, server: Server) -> None:
    """What was reckoned with times that are ahead now (pauses, promises, shares) is worked out anew from the store."""
    while not getattr(service.clock, "set_back_ms", 0):
        await asyncio.sleep(_AGAIN_S)
        service.clock.now_ms()
    log.warning("the server begins anew because the clock was set back; jobs go on")
    service.hurry()
    server.should_exit = True


async def _announce(service: Service, home: Path, address: str, first_time: bool) -> None:
    """Tell the CLI where we are, and people what to do next."""
    await _leave_address(home, address)
    ready = await service.until_ready(_READY_TIMEOUT_S)
    gc.freeze()
    state = "is up" if ready else f"is up, but not ready: {service.not_ready_reason}"
    where = "" if home == Path("~/.hodei").expanduser() else f" (set HODEI_HOME={home})"
    with suppress(BrokenPipeError):
        print(f"Hodei {__version__} {state} at {address}", flush=True)
        print(f"  token    {home / 'token'}{'  (made just now, mode 0600)' if first_time else ''}", flush=True)
        print(f"  log in   the hodei command finds both by itself{where}", flush=True)
        print("  try      hodei run -- python3 -c 'print(6*7)'", flush=True)


async def _leave_address(home: Path, address: str) -> None:
    path = home / "server.json"
    part = path.with_suffix(".part")
    while True:
        try:
            part.write_text(json.dumps({"address": address, "pid": os.getpid(), "version": __version__}))
            part.chmod(0o600)
            part.replace(path)
            return
        except OSError as error:
            log.error("cannot write %s, trying again: %s", path, error.strerror)
            await asyncio.sleep(_AGAIN_S)


if __name__ == "__main__":
    sys.exit(main())
