"""`hodei agent join URL`: enrol this host with a one-time token if it has none, then serve its server from here."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import secrets
import sys
from pathlib import Path

from hodei.agent.credentials import (
    CREDENTIAL_PREFIX,
    ENROLMENT_PREFIX,
    JOINED_FILE,
    Joined,
    NotJoined,
    is_well_formed,
    load_joined,
    new_secret,
)
from hodei.agent.facts import host_facts
from hodei.agent.https import BadUrl, Unreachable, server_address
from hodei.agent.outbound import Dialer, Refused, __version__, enrol

TOKEN_VARIABLE = "HODEI_ENROL_TOKEN"
PENDING_FILE = "joining.json"
EXIT_REFUSED, EXIT_ALREADY_RUNNING, EXIT_USAGE = 1, 3, 2
_DURATION = re.compile(r"(\d+)(s|m|h|d)")
_UNIT_MS = {"s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_LABEL = re.compile(r"[^=\s]{1,317}=[^\s]{0,253}")
_TAINT = re.compile(r"[^=:\s]+(=[^:\s]*)?:(NoSchedule|PreferNoSchedule|NoExecute)")


class Usage(Exception):
    """The options cannot be used; the message says why."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="hodei agent join",
        description="Let a Hodei server run jobs on this host. The agent dials out; the host needs no open port.",
    )
    parser.add_argument("url", nargs="?", default="", help="address of the server; not needed again later")
    parser.add_argument("--home", default="~/.hodei-agent", help="directory of the agent [default: %(default)s]")
    parser.add_argument(
        "--token-file", default="", help=f"file with the enrolment token, - for stdin; or {TOKEN_VARIABLE}"
    )
    parser.add_argument("--node", default="", help="name of the node [default: that of the token, or the host name]")
    parser.add_argument("--label", action="append", metavar="KEY=VALUE", help="label of the node; may be repeated")
    parser.add_argument("--taint", action="append", metavar="KEY[=VALUE]:EFFECT", help="taint; may be repeated")
    parser.add_argument("--offline-ok", metavar="D", help="how long it may normally be offline: 4h, 30m, 0s")
    parser.add_argument("--ca", default="", help="file with the certificate of the server's CA")
    parser.add_argument("--insecure", action="store_true", help="allow plain HTTP beyond loopback")
    parser.add_argument("--enrol-only", action="store_true", help="exit when the host has its credential")
    parser.add_argument("--keep-logs", type=float, default=7 * 86_400, help="seconds to keep output of ended runs")
    parser.add_argument("--version", action="version", version=__version__)
    return parser


def join(words: list[str]) -> int:
    from hodei.agent.__main__ import lock_home, recovered_runs

    options = _parser().parse_args(words)
    home = os.path.realpath(os.path.expanduser(options.home))
    os.umask(0o077)
    os.makedirs(home, mode=0o700, exist_ok=True)
    if lock_home(home) is None:
        return EXIT_ALREADY_RUNNING
    facts = host_facts(Path(home))

    async def serve(joined: Joined) -> None:
        address = server_address(joined.url, ca=joined.ca, insecure=joined.insecure)
        with recovered_runs(home, None, options.keep_logs) as service:
            dialer = Dialer(home, joined, address, service, facts)
            service.server_now_ms = dialer.clock.latest_ms
            dialing = asyncio.create_task(dialer.run(), name="dial")
            try:
                await service.tick_until_done()
            finally:
                dialing.cancel()
                await asyncio.gather(dialing, return_exceptions=True)

    try:
        joined = _joined(home, options)
        if joined is None:
            joined = _pending(home, options)
            address = server_address(joined.url, ca=joined.ca, insecure=joined.insecure)
            joined = asyncio.run(enrol(address, _token(options), joined, facts=facts))
            joined.save(home)
            os.unlink(f"{home}/{PENDING_FILE}")
            print(f"this host has joined as node {joined.node} of backend {joined.backend}", flush=True)
        if not options.enrol_only:
            asyncio.run(serve(joined))
    except (Usage, BadUrl) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except (Refused, Unreachable, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return 0


def _joined(home: str, options: argparse.Namespace) -> Joined | None:
    """As it joined before, with the options of now; None if it did not."""
    if not os.path.lexists(f"{home}/{JOINED_FILE}"):
        return None
    try:
        joined = load_joined(home)
    except NotJoined as error:
        raise Usage(f"{error}; remove it to join again with a new token") from None
    if options.node and options.node != joined.node:
        raise Usage(f"{home} has joined as node {joined.node}; use another --home to join as {options.node}")
    _apply(joined, options)
    joined.save(home)
    return joined


def _pending(home: str, options: argparse.Namespace) -> Joined:
    """Chosen once and kept, so that an enrolment whose answer was lost can be repeated."""
    if not options.url:
        raise Usage("the address of the server is missing: hodei agent join https://NAME:PORT")
    path = f"{home}/{PENDING_FILE}"
    try:
        pending = load_joined(home, PENDING_FILE)
    except NotJoined:
        pending = Joined("", "", "", new_secret(CREDENTIAL_PREFIX), secrets.token_hex(8))
    pending.node = options.node
    _apply(pending, options)
    pending.save(home, os.path.basename(path))
    return pending


def _apply(joined: Joined, options: argparse.Namespace) -> None:
    joined.url = options.url or joined.url
    joined.ca = os.path.abspath(options.ca) if options.ca else joined.ca
    joined.insecure = options.insecure or joined.insecure
    if options.label is not None:
        for label in options.label:
            if not _LABEL.fullmatch(label):
                raise Usage(f"{label!r} is not KEY=VALUE")
        joined.labels = dict(label.split("=", 1) for label in options.label)
    if options.taint is not None:
        for taint in options.taint:
            if not _TAINT.fullmatch(taint):
                raise Usage(f"{taint!r} is not KEY=VALUE:EFFECT, with an effect of Kubernetes")
        joined.taints = list(options.taint)
    if options.offline_ok is not None:
        parts = _DURATION.fullmatch(options.offline_ok)
        if parts is None:
            raise Usage(f"{options.offline_ok!r} is not a duration such as 30m or 4h")
        joined.offline_ok_ms = int(parts[1]) * _UNIT_MS[parts[2]]


def _token(options: argparse.Namespace) -> str:
    """Never from the command line, which every user of the host can read."""
    if options.token_file == "-":
        token = sys.stdin.readline()
    elif options.token_file:
        token = Path(options.token_file).read_text()
    else:
        token = os.environ.pop(TOKEN_VARIABLE, "")
    token = token.strip()
    if not token:
        raise Usage(
            f"a new host needs a token (hodei agent token create): give it by --token-file, or in {TOKEN_VARIABLE}"
        )
    if not is_well_formed(token, ENROLMENT_PREFIX):
        raise Usage("the enrolment token is incomplete or mistyped: its checksum does not match")
    return token
