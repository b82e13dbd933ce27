"""`hodei nodes` and `hodei node …`, with the words that kubectl users have in their fingers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, get_args

import click

from hodei.api.views import HoldView, NodePatch, NodeView, SocketView, TaintView
from hodei.cli.errors import UsageProblem
from hodei.cli.exec_output import AS_IT_IS, ExecCommand, show_executed, timeout_seconds
from hodei.cli.groups import Group
from hodei.cli.options import client, headers_option, node_argument, output_option, watch_option
from hodei.cli.output import Column, clean, emit_list, emit_one, fields
from hodei.cli.times import clock, ms_of
from hodei.jobfile.number_lists import format_numbers
from hodei.model.node import TaintEffect

if TYPE_CHECKING:
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
    Column("LABELS", lambda n: ",".join(f"{k}={v}" for k, v in sorted(n.labels.items())) or "-", wide=True),
    Column("SOCKETS", lambda n: "; ".join(map(socket_text, n.sockets)) or "-", wide=True),
    Column("ADDRESS", lambda n: n.address or "-", wide=True),
    Column("COST", lambda n: f"{n.cost:g}" if n.cost else "-", wide=True),
    Column("DATA", lambda n: ",".join(n.data) or "-", wide=True),
    Column("VERSION", lambda n: n.version or "-", wide=True),
    Column("TAINTS", lambda n: ",".join(map(taint_text, n.taints)) or "-", if_any=True),
    Column("HELD", lambda n: "; ".join(map(hold_text, n.holds[:2])) or "-", if_any=True),
    Column("REASON", lambda n: n.reason or "-", if_any=True),
)


@click.command()
@output_option
@headers_option
@watch_option
def nodes(output: str, no_headers: bool, watch: bool) -> None:
    """List nodes with what is used of what they have."""

    def draw(found: Iterable[NodeView]) -> None:
        emit_list(found, output, COLUMNS, name=lambda n: n.name, headers=not no_headers, empty="no nodes")

    with client() as server:
        if watch:
            from hodei.cli.watch import redraw

            redraw(server, server.nodes, draw, output)
        else:
            draw(server.nodes())


@click.group(cls=Group)
def node() -> None:
    """Show, cordon, drain, taint or label a node."""


@node.command("exec", cls=ExecCommand, context_settings=AS_IT_IS)
@node_argument
@click.argument("command", nargs=-1, required=True, metavar="-- COMMAND...")
@click.option(
    "--timeout", default="30s", show_default=True, metavar="TIME", help="How long it may take: 30s, 2m; up to 5m."
)
def execute(name: str, command: tuple[str, ...], timeout: str) -> None:
    """Run a command on a node, for administrators; exit with its code (124: not over in time).

    \b
      hodei node exec hpc1-n17 -- uptime

    It is in the audit. Backends that cannot do so say it: see `hodei backend show`.
    """
    command = command[1:] if command[0] == "--" else command
    if not command:
        raise UsageProblem("name a command", hint=f"hodei node exec {name} -- uptime")
    timeout_s = timeout_seconds(timeout)
    with client(timeout_s + 30) as server:
        show_executed(server.execute_on(name, command, timeout_s=timeout_s), timeout_s)


@node.command("show")
@node_argument
@output_option
def show(name: str, output: str) -> None:
    """Everything about one node."""
    with client() as server:
        found = server.node(name)
    emit_one(found, output, name=lambda n: n.name, text=_describe)


@node.command("cordon")
@node_argument
@output_option
def cordon(name: str, output: str) -> None:
    """Start nothing new there; what runs goes on."""
    _patch(name, NodePatch(cordon=True), output, "cordoned")


@node.command("uncordon")
@node_argument
@output_option
def uncordon(name: str, output: str) -> None:
    """Let it take work again."""
    _patch(name, NodePatch(cordon=False), output, "uncordoned")


@node.command("drain")
@node_argument
@click.option("--wait", is_flag=True, help="Return when nothing runs there any more; tells how many are left.")
@click.option("--timeout", metavar="TIME", help="With --wait: give up after this long (90s, 1h30m): exit code 6.")
@output_option
@click.pass_context
def drain(ctx: click.Context, name: str, wait: bool, timeout: str | None, output: str) -> None:
    """Cordon it and move its work elsewhere; jobs that can save their work first."""
    from hodei.cli.drain import until_empty

    with client() as server:
        found = server.patch_node(name, NodePatch(cordon=True, drain=True))
        if wait:
            found, code = until_empty(server, found, timeout)
            _finish(found, output, "drained" if not code else "still draining")
            ctx.exit(code)
        _finish(found, output, f"draining: {found.runs} leaving" if found.runs else "drained")


@node.command("taint", context_settings={"ignore_unknown_options": True})
@node_argument
@click.argument("taints", metavar="KEY[=VALUE]:EFFECT[-]...", nargs=-1, required=True)
@output_option
def taint(name: str, taints: tuple[str, ...], output: str) -> None:
    """Keep work away that does not tolerate it; a minus at the end takes the taint off again.

    \b
      hodei node taint node7 maintenance=disk:NoSchedule
      hodei node taint node7 maintenance:NoSchedule-
      hodei node taint node7 maintenance-
    """
    with client() as server:
        patch = _taint_patch(server, name, taints)
        _finish(server.patch_node(name, patch), output, "tainted" if patch.add_taints else "untainted")


@node.command("label", context_settings={"ignore_unknown_options": True})
@node_argument
@click.argument("labels", metavar="KEY=VALUE... KEY-...", nargs=-1, required=True)
@output_option
def label(name: str, labels: tuple[str, ...], output: str) -> None:
    """Set labels (KEY=VALUE) and remove them (KEY-)."""
    wanted: dict[str, str | None] = {}
    for text in labels:
        key, equals, value = text.partition("=")
        if not equals and text.endswith("-") and len(text) > 1:
            wanted[text[:-1]] = None
        elif key and equals:
            wanted[key] = value
        else:
            raise UsageProblem(f"{text[:80]!r} is not a label", hint="write KEY=VALUE to set it, KEY- to remove it")
    _patch(name, NodePatch(labels=wanted), output, "labeled")


def parse_taint(text: str) -> tuple[str, str, str, bool]:
    """`key=value:Effect` -> (key, value, effect, False); `key:Effect-` and `key-` -> (key, "", effect or "", True)."""
    gone = text.endswith("-")
    found = _TAINT.fullmatch(text.removesuffix("-"))
    if found is None or (not found["effect"] and not gone):
        raise UsageProblem(f"{text[:80]!r} is not a taint", hint="write KEY=VALUE:EFFECT, or KEY:EFFECT- to remove one")
    effect = found["effect"] or ""
    if effect and effect not in EFFECTS:
        raise UsageProblem(f"{effect[:40]!r} is not an effect", hint=f"one of {', '.join(EFFECTS)}")
    return found["key"], found["value"] or "", effect, gone


def taint_text(taint: TaintView) -> str:
    return f"{taint.key}{'=' + taint.value if taint.value else ''}:{taint.effect}"


def socket_text(socket: SocketView) -> str:
    """`cpu 0-3, gpu 0-1`"""
    pairs = (("cpu", socket.cpus), ("gpu", socket.gpus))
    return ", ".join(f"{what} {format_numbers(numbers)}" for what, numbers in pairs if numbers)


def hold_text(hold: HoldView) -> str:
    """`for job 12 until 14:05` (then it starts), or `for project ml (nightly) from 20:00 until 23:00`"""
    start, end = clock(ms_of(hold.start_at)), clock(ms_of(hold.end_at))
    what = ", ".join(
        f"{resource} {short_amount(resource, amount)}" for resource, amount in sorted(hold.resources.items())
    )
    if hold.job:
        return f"for job {hold.job} until {start} ({what})"
    return f"for project {hold.project} ({hold.reservation}) from {start} until {end} ({what})"


def _taint_patch(server: Client, name: str, texts: tuple[str, ...]) -> NodePatch:
    add, remove = [], []
    for key, value, effect, gone in map(parse_taint, texts):
        if not gone:
            add.append(TaintView(key, value, effect))
            continue
        matching = [t for t in server.node(name).taints if t.key == key and effect in ("", t.effect)]
        if not matching:
            from hodei.model.errors import NotFound

            raise NotFound(
                f"node {name} has no taint {key}{':' + effect if effect else ''}", hint=f"hodei node show {name}"
            )
        remove += matching
    return NodePatch(add_taints=add, remove_taints=remove)


def _patch(name: str, patch: NodePatch, output: str, word: str) -> None:
    with client() as server:
        _finish(server.patch_node(name, patch), output, word)


def _finish(found: NodeView, output: str, word: str) -> None:
    emit_one(found, output, name=lambda n: n.name, text=lambda n: f"node {clean(n.name)} {word}")


def _share(view: NodeView, resource: str) -> str:
    has = view.capacity.get(resource)
    return (
        f"{short_amount(resource, view.used.get(resource, '0'))}/{short_amount(resource, has)}"
        if has not in (None, "0")
        else "-"
    )


def _ratios(view: NodeView, between: str) -> str:
    return between.join(f"{resource} x{ratio:g}" for resource, ratio in sorted(view.overcommit.items()))


def short_amount(resource: str, amount: str | None) -> str:
    from hodei.model.errors import InvalidInput
    from hodei.model.quantity import parse_quantity
    from hodei.model.resources import human_amount, scale_of

    try:
        return human_amount(resource, parse_quantity(amount or "0", scale=scale_of(resource)))
    except InvalidInput:
        return amount or "0"


def _describe(view: NodeView) -> str:
    places = ", ".join(f"{k} {v}" for k, v in view.location.items() if v not in ("", None))
    return fields([
        ("name", view.name),
        ("state", view.state),
        ("reason", view.reason),
        ("backend", f"{view.backend} ({view.kind})"),
        ("arch", view.arch),
        ("gpu type", view.gpu_type),
        ("location", places),
        ("address", view.address),
        ("runs", str(view.runs)),
        *((name, _share(view, name)) for name in sorted(view.capacity)),
        *((f"socket {number}", socket_text(socket)) for number, socket in enumerate(view.sockets)),
        ("overcommit", _ratios(view, ", ")),
        ("cost", f"{view.cost:g} an hour" if view.cost else ""),
        ("data", ", ".join(view.data)),
        ("labels", ", ".join(f"{k}={v}" for k, v in sorted(view.labels.items()))),
        ("taints", ", ".join(map(taint_text, view.taints))),
        ("version", view.version),
        *(("held", hold_text(hold)) for hold in view.holds),
    ])  # fmt: skip


from hodei.cli import node_history  # noqa: E402, F401 - `node history` adds itself
