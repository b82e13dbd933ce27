"""`hodei agent …` and `hodei host …`: hosts that run the agent and dial out to the server."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.groups import Group
from hodei.cli.options import client, output_option
from hodei.cli.output import Column, clean, emit_one, fields, is_for_people, labels_text, note
from hodei.cli.resources import Verb, add_list, add_verbs
from hodei.cli.times import ago

if TYPE_CHECKING:
    from hodei.api.agents import HostView, TokenView


@click.group("agent", cls=Group)
def agent() -> None:
    """Join a server from this host; tokens and the file to copy to other hosts."""


@agent.command(
    "join", context_settings={"ignore_unknown_options": True, "help_option_names": []}, add_help_option=False
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="URL [OPTIONS]")
@click.pass_context
def join(ctx: click.Context, words: tuple[str, ...]) -> None:
    """Let a server run jobs on this host, until it is stopped. The agent dials out; the host needs no open port.

    \b
      hodei agent join https://hodei.example:7680 --token-file token
      hodei agent join                            again later: the address and the credential are kept

    Options: hodei agent join --help, and docs/how-to/hosts.md.
    """
    from hodei.agent.join import join as run

    ctx.exit(run(list(words)))


@agent.command("bundle")
@click.argument("path", metavar="[FILE]", default="hodei-agent.pyz")
@output_option
def bundle(path: str, output: str) -> None:
    """Write the agent as one file that any host with Python 3.11 runs: python3 hodei-agent.pyz join URL."""
    from hodei.agent.bundle import write_bundle

    size = write_bundle(Path(path))
    emit_one(
        {"path": path, "bytes": size}, output, name=lambda b: str(b["path"]), text=lambda b: f"{path}, {size} bytes"
    )


@agent.group("token", cls=Group)
def token() -> None:
    """Manage one-time tokens by which hosts join."""


add_list(
    token,
    lambda server: server.agent_tokens(),
    (
        Column("ID", lambda t: t.id),
        Column("BACKEND", lambda t: t.backend),
        Column("NODE", lambda t: t.node or "any"),
        Column("STATE", lambda t: t.state),
        Column("EXPIRES", lambda t: ago(t.expires_at)),
        Column("USED BY", lambda t: t.used_by or "-", if_any=True),
        Column("BY", lambda t: t.by or "-", wide=True),
    ),
    empty="no enrolment tokens",
    help="List the enrolment tokens, without their secrets.",
)
add_verbs(
    token,
    Verb("delete", lambda server, name: server.delete_agent_token(name), lambda t: f"token {clean(t.id)} deleted",
         "Delete a token that was not used."),
    argument=click.argument("name", metavar="ID"),
)  # fmt: skip


@token.command("create")
@click.option("--backend", required=True, metavar="NAME", help="Backend of kind hosts that the host joins.")
@click.option("--node", default="", metavar="NAME", help="The only name it may join as [default: any].")
@click.option("--ttl", default="1h", show_default=True, metavar="D", help="How long the token is valid: 1m to 30d.")
@output_option
def create_token(backend: str, node: str, ttl: str, output: str) -> None:
    """Create a token. It is shown once, and enrols one host."""
    with client() as server:
        made = server.create_agent_token(backend, node=node, ttl=ttl)
    emit_one(made, output, name=lambda t: t.token, text=_token_text)
    if is_for_people(output):
        note(f"valid once, {ago(made.expires_at)}; on the host: hodei agent join URL --token-file -")


def _token_text(view: TokenView) -> str:
    return view.token


@click.group("host", cls=Group)
def host() -> None:
    """Manage the hosts that have joined."""


add_list(
    host,
    lambda server: server.hosts(),
    (
        Column("NAME", lambda h: h.name),
        Column("BACKEND", lambda h: h.backend),
        Column("STATE", lambda h: h.state),
        Column("CONNECTED", lambda h: ago(h.connected_at) or "-"),
        Column("JOINED", lambda h: ago(h.joined_at), wide=True),
        Column("VERSION", lambda h: h.version or "-", wide=True),
        Column("KERNEL", lambda h: h.kernel or "-", wide=True),
        Column("LABELS", lambda h: labels_text(h.labels, ",") or "-", wide=True),
        Column("OFFLINE OK", lambda h: h.offline_ok or "-", if_any=True),
    ),
    empty="no host has joined",
    help="List the hosts that have joined.",
)
add_verbs(
    host,
    Verb("show", lambda server, name: server.host(name), lambda h: _describe(h), "Show one host."),
    Verb("remove", lambda server, name: server.remove_host(name), lambda h: f"host {clean(h.name)} removed",
         "Remove a host. Its credential is void and its runs count as lost; stop the agent there."),
)  # fmt: skip


def _describe(view: HostView) -> str:
    return fields([
        ("name", view.name),
        ("backend", view.backend),
        ("state", view.state),
        ("hostname", view.hostname),
        ("kernel", view.kernel),
        ("agent", view.version),
        ("joined", f"{view.joined_at} ({ago(view.joined_at)})"),
        ("credential", f"since {view.credential_at} ({ago(view.credential_at)})"),
        ("connected", f"{view.connected_at} ({ago(view.connected_at)})" if view.connected_at else "never"),
        ("offline ok", view.offline_ok),
        ("labels", labels_text(view.labels)),
        ("taints", ", ".join(view.taints)),
    ])  # fmt: skip


@host.command("add")
@click.argument("target", metavar="USER@MACHINE")
@click.option("--backend", required=True, metavar="NAME", help="Backend of kind hosts that it joins.")
@click.option(
    "--url", default="", metavar="URL", help="Address of the server as the machine reaches it [default: --server]."
)
@click.option("--node", default="", metavar="NAME", help="Name of the node [default: that of the machine].")
@click.option("--port", type=click.IntRange(1, 65535), default=None, help="Port of SSH.")
@click.option("--identity", default="", metavar="FILE", help="Private key [default: those of ssh, and its agent].")
@click.option("--known-hosts", default="", metavar="FILE", help="Known host keys [default: ~/.ssh/known_hosts].")
@click.option(
    "--accept-new-host-key",
    is_flag=True,
    help="Add the key of a machine that is not known yet; a changed key is always refused.",
)
@click.option("--home", default=".hodei-agent", show_default=True, metavar="DIR", help="Directory of the agent there.")
@click.option("--python", default="python3", show_default=True, metavar="PROGRAM", help="Python 3.11 or newer there.")
@click.option(
    "--service",
    type=click.Choice(["auto", "systemd", "detached"]),
    default="auto",
    show_default=True,
    help="How the agent is started: by systemd where it runs, else detached.",
)
@click.option("--ca", default="", metavar="FILE", help="Certificate of the server's CA, to be copied too.")
@click.option("--insecure", is_flag=True, help="Allow plain HTTP beyond loopback.")
@click.option("--label", multiple=True, metavar="KEY=VALUE", help="Label of the node; may be repeated.")
@click.option("--taint", multiple=True, metavar="TAINT", help="Taint of the node; may be repeated.")
@click.option("--offline-ok", default="", metavar="D", help="How long it may normally be offline: 4h.")
@output_option
def add_host(target: str, backend: str, url: str, output: str, **given: Any) -> None:
    """Install the agent on a machine by SSH and let it join. Needs: pip install 'hodei[hosts]'.

    \b
      hodei host add ops@lab-7 --backend lab --url https://hodei.example:7680

    Copies one file, gives it a one-time token through stdin, and starts it.
    """
    from hodei.cli.ssh_install import Installation, install

    with client() as server:
        address = url or server.address
        plan = Installation(target, address, **given)
        made = server.create_agent_token(backend, node=plan.node, ttl="10m")
        try:
            how = install(plan, made.token)
        except BaseException:
            _ignore_errors(lambda: server.delete_agent_token(made.id))
            raise
    result = {"node": plan.node, "backend": backend, "machine": target, "service": how}
    emit_one(result, output, name=lambda r: str(r["node"]),
             text=lambda r: f"node {plan.node} joined backend {backend}; the agent runs {how}")  # fmt: skip


def _ignore_errors(call: Callable[[], Any]) -> None:
    from hodei.model.errors import HodeiError

    try:
        call()
    except HodeiError:
        pass
