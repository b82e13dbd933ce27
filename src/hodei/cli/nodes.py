"""`hodei node …`, with the verbs of kubectl."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

import click

from hodei.api.views import HoldView, NodePatch, NodeView, SocketView, TaintView
from hodei.cli import errors
from hodei.cli.errors import UsageProblem
from hodei.cli.exec import exec_on_node
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, node_argument, output_option, redraw, watch_option
from hodei.cli.output import (
    Column,
    clean,
    counted,
    emit_list,
    emit_one,
    fields,
    is_for_people,
    labels_text,
    note,
    short_amount,
)
from hodei.cli.resources import Verb, add_verbs
from hodei.cli.times import clock, duration_text, ms_of, now_ms, parse_timeout_ms
from hodei.jobfile.values import format_numbers
from hodei.model.errors import NotFound
from hodei.model.node import TaintEffect

if TYPE_CHECKING:
    from hodei.api.views import NodeRunView
    from hodei.client import Client

EFFECTS: tuple[str, ...] = get_args(TaintEffect)
_TAINT = re.compile(r"(?P<key>[^=:\s]+)(?:=(?P<value>[^:\s]*))?(?::(?P<effect>\S*))?")

COLUMNS = (
    Column("NAME", lambda n: n.name),
    Column("STATE", lambda n: n.state),
    Column("BACKEND", lambda n: n.backend),
    Column("CPU", lambda n: _share(n, "cpu")),
    Column("MEMORY", lambda n: _share(n, "memory")),
    Column("GPU", lambda n: _share(n, "gpu") + (f" {n.gpu_type}" if n.gpu_type else ""), if_any=True),
    Column("OVERCOMMIT", lambda n: _ratios(n, ",") or "-", if_any=True),
    Column("RUNS", lambda n: str(n.runs)),
    Column("ARCH", lambda n: n.arch or "-", wide=True),
    Column("LABELS", lambda n: labels_text(n.labels, ",") or "-", wide=True),
    Column("SOCKETS", lambda n: "; ".join(map(socket_text, n.sockets)) or "-", wide=True),
    Column("ADDRESS", lambda n: n.address or "-", wide=True),
    Column("GROUP", lambda n: (n.group or "-") + (" (spot)" if n.spot else ""), if_any=True),
    Column("COST", lambda n: f"{n.cost:g}" if n.cost else "-", wide=True),
    Column("DATA", lambda n: ",".join(n.data) or "-", wide=True),
    Column("VERSION", lambda n: n.version or "-", wide=True),
    Column("TAINTS", lambda n: ",".join(map(taint_text, n.taints)) or "-", if_any=True),
    Column("HELD", lambda n: "; ".join(map(hold_text, n.holds[:2])) or "-", if_any=True),
    Column("REASON", lambda n: n.reason or "-", if_any=True),
)


@click.group(cls=Group)
def node() -> None:
    """List, show, cordon, drain, taint or label nodes."""


@node.command("list")
@click.option("-l", "--selector", default="", help="Only nodes with these labels: disk=ssd, zone in (a, b), !spot.")
@output_option
@headers_option
@watch_option
def list_nodes(selector: str, output: str, no_headers: bool, watch: bool) -> None:
    """List nodes with their capacity and usage."""
    from hodei.model.affinity import all_match, parse_selector

    wanted = parse_selector(selector) if selector else ()

    def draw(found: Iterable[NodeView]) -> None:
        emit_list(found, output, COLUMNS, headers=not no_headers, empty="no nodes")

    def fetch() -> list[NodeView]:
        return [node for node in server.nodes() if all_match(wanted, node.labels)]

    with client() as server:
        if watch:
            redraw(server, fetch, draw, output)
        else:
            draw(fetch())


add_verbs(
    node,
    Verb("show", lambda server, name: server.node(name), lambda n: _describe(n), "Show one node."),
    Verb("cordon", lambda server, name: server.patch_node(name, NodePatch(cordon=True)),
         lambda n: f"node {clean(n.name)} cordoned", "Start nothing new on a node; running jobs continue."),
    Verb("uncordon", lambda server, name: server.patch_node(name, NodePatch(cordon=False)),
         lambda n: f"node {clean(n.name)} uncordoned", "Allow new work on a node again."),
    Verb("revoke", lambda server, name: server.revoke_node(name), lambda h: f"credential of node {clean(h.name)} revoked",
         "Revoke the credential of a joined host: its agent is disconnected at once."),
    argument=node_argument,
)  # fmt: skip
node.add_command(exec_on_node)


@node.command("drain")
@node_argument
@click.option("--wait", is_flag=True, help="Return when nothing runs there any more; reports how many runs are left.")
@click.option("--timeout", metavar="TIME", help="With --wait: give up after this long (90s, 1h30m): exit code 6.")
@output_option
@click.pass_context
def drain(ctx: click.Context, name: str, wait: bool, timeout: str | None, output: str) -> None:
    """Cordon a node and move its work elsewhere; jobs take a checkpoint if they can."""
    with client() as server:
        found = server.patch_node(name, NodePatch(cordon=True, drain=True))
        if wait:
            found, code = until_empty(server, found, timeout)
            _print_node(found, output, "drained" if not code else "still draining")
            ctx.exit(code)
        _print_node(found, output, f"draining: {counted(found.runs, 'run')} left" if found.runs else "drained")


POLL_S = 0.5


def until_empty(server: Client, node: NodeView, timeout: str | None) -> tuple[NodeView, int]:
    """Wait until no run is left on the node; returns the node and the exit code. Progress goes to stderr."""
    deadline = None if timeout is None else time.monotonic() + parse_timeout_ms(timeout) / 1000
    terminal, shown = sys.stderr.isatty(), -1
    try:
        while node.runs:
            if node.runs != shown:
                shown = node.runs
                line = f"{counted(shown, 'run')} left on {node.name}"
                click.echo(f"\r{line}\x1b[K" if terminal else line, nl=not terminal, err=True)
            if deadline is not None and time.monotonic() >= deadline:
                return node, errors.TIMED_OUT
            time.sleep(POLL_S)
            node = server.node(node.name)
    finally:
        if terminal and shown >= 0:
            click.echo("", err=True)
    return node, errors.OK


@node.command("taint", context_settings={"ignore_unknown_options": True})
@node_argument
@click.argument("taints", metavar="KEY[=VALUE]:EFFECT[-]...", nargs=-1, required=True)
@output_option
def taint(name: str, taints: tuple[str, ...], output: str) -> None:
    """Taint a node to keep off jobs that do not tolerate it; a trailing minus removes the taint.

    \b
      hodei node taint node7 maintenance=disk:NoSchedule
      hodei node taint node7 maintenance:NoSchedule-
      hodei node taint node7 maintenance-
    """
    with client() as server:
        patch = _taint_patch(server, name, taints)
        _print_node(server.patch_node(name, patch), output, "tainted" if patch.add_taints else "untainted")


@node.command("label", context_settings={"ignore_unknown_options": True})
@node_argument
@click.argument("labels", metavar="KEY=VALUE... KEY-...", nargs=-1, required=True)
@output_option
def label(name: str, labels: tuple[str, ...], output: str) -> None:
    """Set (KEY=VALUE) and remove (KEY-) labels of a node."""
    wanted: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals and text.endswith("-") and len(text) > 1:
            wanted[text[:-1]] = None
        elif key and equals:
            wanted[key] = value
        else:
            raise UsageProblem(f"{text[:80]!r} is not a label", hint="write KEY=VALUE to set it, KEY- to remove it")
    with client() as server:
        found = server.node(name).labels
        removed = [key for key, value in wanted.items() if value is None]
        for key in removed:
            if key not in found:
                raise NotFound(f"node {name} has no label {key}", hint=f"hodei node show {name}")
        word = "unlabeled" if len(removed) == len(wanted) else "labeled"
        _print_node(server.patch_node(name, NodePatch(labels=wanted)), output, word)


def parse_taint(text: str) -> tuple[str, str, str, bool]:
    """`key=value:Effect` -> (key, value, effect, False); `key:Effect-` and `key-` -> (key, "", effect or "", True)."""
    remove = text.endswith("-")
    found = _TAINT.fullmatch(text.removesuffix("-"))
    if found is None or (not found["effect"] and not remove):
        raise UsageProblem(f"{text[:80]!r} is not a taint", hint="write KEY=VALUE:EFFECT, or KEY:EFFECT- to remove one")
    effect = found["effect"] or ""
    if effect and effect not in EFFECTS:
        raise UsageProblem(f"{effect[:40]!r} is not an effect", hint=f"one of {', '.join(EFFECTS)}")
    return found["key"], found["value"] or "", effect, remove


def taint_text(taint: TaintView) -> str:
    return f"{taint.key}{'=' + taint.value if taint.value else ''}:{taint.effect}"


def socket_text(socket: SocketView) -> str:
    """`cpu 0-3, gpu 0-1`"""
    pairs = (("cpu", socket.cpus), ("gpu", socket.gpus))
    return ", ".join(f"{what} {format_numbers(numbers)}" for what, numbers in pairs if numbers)


def hold_text(hold: HoldView) -> str:
    """`for job 12 until 14:05` (its start), or `for project ml (nightly) from 20:00 until 23:00`"""
    start, end = clock(ms_of(hold.start_at)), clock(ms_of(hold.end_at))
    what = ", ".join(
        f"{resource} {short_amount(resource, amount)}" for resource, amount in sorted(hold.resources.items())
    )
    if hold.job:
        return f"for job {hold.job} until {start} ({what})"
    return f"for project {hold.project} ({hold.reservation}) from {start} until {end} ({what})"


def _taint_patch(server: Client, name: str, texts: tuple[str, ...]) -> NodePatch:
    add, remove = [], []
    for key, value, effect, remove_it in map(parse_taint, texts):
        if not remove_it:
            add.append(TaintView(key, value, effect))
            continue
        matching = [t for t in server.node(name).taints if t.key == key and effect in ("", t.effect)]
        if not matching:
            what = f"node {name} has no taint {key}{':' + effect if effect else ''}"
            raise NotFound(what, hint=f"hodei node show {name}")
        remove += matching
    return NodePatch(add_taints=add, remove_taints=remove)


def _print_node(found: NodeView, output: str, word: str) -> None:
    emit_one(found, output, text=lambda n: f"node {clean(n.name)} {word}")


def _share(view: NodeView, resource: str) -> str:
    capacity = view.capacity.get(resource)
    if capacity in (None, "0"):
        return "-"
    return f"{short_amount(resource, view.used.get(resource, '0'))}/{short_amount(resource, capacity)}"


def _ratios(view: NodeView, separator: str) -> str:
    return separator.join(f"{resource} x{ratio:g}" for resource, ratio in sorted(view.overcommit.items()))


def _describe(view: NodeView) -> str:
    return fields([
        ("name", view.name),
        ("state", view.state),
        ("reason", view.reason),
        ("backend", f"{view.backend} ({view.kind})"),
        ("arch", view.arch),
        ("gpu type", view.gpu_type),
        ("location", ", ".join(f"{k} {v}" for k, v in view.location.items() if v not in ("", None))),
        ("address", view.address),
        ("runs", str(view.runs)),
        *((name, _share(view, name)) for name in sorted(view.capacity)),
        *((f"socket {number}", socket_text(socket)) for number, socket in enumerate(view.sockets)),
        ("overcommit", _ratios(view, ", ")),
        ("cost", f"{view.cost:g} an hour" if view.cost else ""),
        ("data", ", ".join(view.data)),
        ("labels", labels_text(view.labels)),
        ("taints", ", ".join(map(taint_text, view.taints))),
        ("version", view.version),
        *(("held", hold_text(hold)) for hold in view.holds),
    ])  # fmt: skip


_PAGE = 1000
HISTORY_COLUMNS = (
    Column("RUN", lambda r: r.run),
    Column("NAME", lambda r: r.name or "-"),
    Column("PROJECT", lambda r: r.project or "-"),
    Column("USER", lambda r: r.user or "-"),
    Column("STATE", lambda r: r.state),
    Column("FROM", lambda r: clock(ms_of(r.placed_at))),
    Column("TO", lambda r: clock(ms_of(r.finished_at)) or "now"),
    Column("HELD", lambda r: duration_text((ms_of(r.finished_at) or now_ms()) - ms_of(r.placed_at))),
    Column("CPU", lambda r: _amount(r, "cpu")),
    Column("MEMORY", lambda r: _amount(r, "memory")),
    Column("GPU", lambda r: _amount(r, "gpu"), if_any=True),
    Column("EXIT", lambda r: "-" if r.exit_code is None else str(r.exit_code), wide=True),
    Column("REASON", lambda r: r.reason_code or "-", wide=True),
)


@node.command("history")
@node_argument
@click.option("--since", default="24h", show_default=True, metavar="TIME", help="Start: 6h, 2d, 2026-01-31T08:00Z.")
@click.option("--until", default="", metavar="TIME", help="End [default: now].")
@click.option("--limit", type=click.IntRange(1), default=100, show_default=True, help="Maximum number of runs.")
@click.option("--all", "every", is_flag=True, help="All runs.")
@output_option
@headers_option
def history(name: str, since: str, until: str, limit: int, every: bool, output: str, no_headers: bool) -> None:
    """Show which runs held capacity on a node, and when; the newest job first.

    Runs are kept as long as their jobs (server.retention), also on nodes that were removed.
    """
    runs: list[NodeRunView] = []
    busy_ms: dict[str, int] = {}
    with client() as server:
        page = server.node_history(name, since=since, until=until, limit=_PAGE if every else min(limit, _PAGE))
        span = (page.since, page.until)
        while True:
            runs += page.runs
            for resource, ms in page.busy_ms.items():
                busy_ms[resource] = busy_ms.get(resource, 0) + ms
            if not page.next or (not every and len(runs) >= limit):
                break
            # All pages use the window of the first one.
            left = _PAGE if every else min(limit - len(runs), _PAGE)
            page = server.node_history(name, since=span[0], until=span[1], after=page.next, limit=left)
    emit_list(runs, output, HISTORY_COLUMNS, name=lambda r: r.run, headers=not no_headers, empty="no runs")
    if is_for_people(output):
        more = f"there may be more than these {len(runs)}: --limit, --all"
        note(more if page.next else _utilisation(busy_ms, span))


def _utilisation(busy_ms: dict[str, int], span: tuple[str, str]) -> str:
    since, until = (ms_of(moment) for moment in span)
    percent = {name: 100 * busy_ms.get(name, 0) / max(until - since, 1) for name in ("cpu", "memory", *busy_ms)}
    shares = ", ".join(f"{name} {share:.1f}%" for name, share in sorted(percent.items()))
    return f"allocated on average from {clock(since)} to {clock(until)}: {shares}"


def _amount(run: NodeRunView, resource: str) -> str:
    return short_amount(resource, run.resources[resource]) if resource in run.resources else "-"
