"""The command line of `hodei kube`. Exit codes: 0 done, 1 it failed or the lead was lost, 2 wrong input, 130 Ctrl-C."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import msgspec
from msgspec import structs

from hodei.cli.groups import Group, exit_code
from hodei.kube.api.client import Access
from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.reservations import read_file
from hodei.kube.scheduler.run import Election, run
from hodei.kube.scheduler.why import Answer, look_ahead, look_why
from hodei.model.errors import InvalidInput

_PORT = 10259
_FILE = click.Path(path_type=Path)
_COMMON = (
    click.option("--kubeconfig", default="", metavar="FILE", help="[default: $KUBECONFIG, ~/.kube/config, or in-cluster]"),
    click.option("--context", default="", metavar="NAME", help="Context of that file [default: the current one]."),
    click.option("--scheduler-name", default="hodei", metavar="NAME", show_default=True, help="The pods' spec.schedulerName."),
    click.option("--config", type=_FILE, metavar="FILE", help="A TOML file: its [scheduling] and [[reservations]]."),
    click.option(
        "--priority-annotation", default="", metavar="NAME",
        help="Trust this annotation of pods without a priority class; a pod's creator then chooses its priority.",
    ),
    click.option(
        "--prefer-priority-annotation", is_flag=True,
        help="Trust that annotation before a priority class too (not before Kubernetes' own classes).",
    ),
    click.option("--one-pod-per-node", is_flag=True, help="At most one of our pods on a node at a time."),
    click.option("-v", "--verbose", is_flag=True, help="Log more."),
)  # fmt: skip
_output = click.option("-o", "--output", type=click.Choice(("text", "json")), default="text", show_default=True)


def _common_options(command: Callable[..., Any]) -> Callable[..., Any]:
    for decorate in reversed(_COMMON):
        command = decorate(command)
    return command


@click.group("kube", cls=Group, context_settings={"help_option_names": ["-h", "--help"]})
def kube() -> None:
    """Hodei as a pod scheduler of a Kubernetes cluster: it schedules the pods whose schedulerName is its own.

    \b
      hodei kube run --scheduler-name hodei
      hodei kube why default/my-pod
      hodei kube plan pod.yaml
    """


def main(args: list[str] | None = None) -> int:
    return exit_code(kube.main, args, "hodei kube", invalid_input=2)


def _start(options: dict[str, Any]) -> SimpleNamespace:
    given = SimpleNamespace(**options)
    logging.basicConfig(
        level=logging.DEBUG if given.verbose else logging.INFO, stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    return given


def options_of(given: SimpleNamespace) -> tuple[Access, Options]:
    if given.prefer_priority_annotation and not given.priority_annotation:
        raise InvalidInput(
            "--prefer-priority-annotation does not say which annotation", hint="add --priority-annotation priority"
        )
    config, reserved = read_file(given.config)
    options = Options(
        given.scheduler_name, getattr(given, "events", "all"), given.priority_annotation, given.one_pod_per_node,
        config.scheduling, reserved=reserved, forecast_annotation=getattr(given, "forecast_annotation", False),
        usage_configmap=getattr(given, "usage_configmap", ""), namespace=getattr(given, "lease_namespace", ""),
        priority_preferred=given.prefer_priority_annotation,
    )  # fmt: skip
    return Access(given.kubeconfig, given.context), options


@kube.command("why")
@click.argument("pod", metavar="NAMESPACE/NAME")
@_common_options
@_output
def why(**options: Any) -> None:
    """Explain why a pod waits, also one of another scheduler."""
    given = _start(options)
    namespace, slash, name = given.pod.partition("/")
    access, settings = options_of(given)
    if not slash:
        namespace, name = "default", given.pod
    _show([asyncio.run(look_why(access, settings, namespace, name))], given.output, planned=False)


@kube.command("plan")
@click.argument("file", metavar="FILE...", nargs=-1, required=True, type=_FILE)
@_common_options
@_output
def plan(**options: Any) -> None:
    """Report where the pods of manifests would go, or why they would wait; - reads stdin."""
    given = _start(options)
    access, settings = options_of(given)
    _show(asyncio.run(look_ahead(access, settings, list(given.file))), given.output, planned=True)


def _show(answers: list[Answer], output: str, *, planned: bool) -> None:
    if output == "json":
        print(msgspec.json.format(msgspec.json.encode(answers if planned else answers[0])).decode())
        return
    print("\n\n".join(in_words(answer, planned=planned) for answer in answers))


def in_words(answer: Answer, *, planned: bool) -> str:
    from hodei.cli.why import render

    lines = []
    if answer.kind:
        lines.append(of_workload(answer))
        if answer.now == answer.total:
            answer = structs.replace(answer, explanation=None)  # where they would go is said
    if answer.explanation is not None:
        told = structs.replace(answer.explanation, job=0, name=answer.pod)
        text = render(told, planned=planned).replace(f"the job ({answer.pod})", f"pod {answer.pod}", 1)
        for number, name in answer.names.items():
            text = re.sub(rf"\bjob {number}\b( \([^)]*\))?", name, text)
        lines.append(text)
        if answer.message:
            lines.append(f"  in Kubernetes' words: {answer.message}")
    elif not answer.kind:
        lines.append(f"pod {answer.pod}: {answer.message}")
    elif answer.message:
        lines.append(f"  {answer.message}")
    if answer.unread:
        lines.append(f"  could not be read with these rights: {', '.join(answer.unread)}")
    return "\n\n".join(lines)


def of_workload(answer: Answer) -> str:
    """How many of its pods would start now, and where."""
    start = f"{answer.now} of {answer.total} pods" if answer.now < answer.total else f"all {answer.total} pods"
    where = sorted(answer.nodes.items(), key=lambda entry: (-entry[1], entry[0]))
    told = ", ".join(f"{count} on {node}" if answer.total > 1 else node for node, count in where[:5])
    text = f"{answer.kind} {answer.pod}: {start} would start now"
    if not answer.total:
        return f"{answer.kind} {answer.pod}: it makes no pods as it is"
    if told:
        text += f" ({told}{', and more' if len(where) > 5 else ''})"
    if answer.preempting:
        text += f"; {answer.preempting} would take the place of others, each looked at by itself"
    if answer.waiting:
        text += f"; {answer.waiting} would wait"
    return f"{text}\n  {answer.note}" if answer.note else text


@kube.command("run")
@_common_options
@click.option(
    "--leader-elect/--no-leader-elect", default=True, show_default=True, help="Only one of several instances acts."
)
@click.option("--lease-name", default="hodei", metavar="NAME", show_default=True, help="Lease that names the leader.")
@click.option("--lease-namespace", default="", metavar="NS", help="Its namespace [default: the account's own].")
@click.option(
    "--lease-seconds",
    type=int,
    default=15,
    metavar="N",
    show_default=True,
    help="How long the others wait for a silent leader; it renews in a seventh of that.",
)
@click.option("--identity", default="", metavar="ID", help="Name of this instance [default: host and process].")
@click.option("--listen", default="", metavar="HOST:PORT", help="For probes and metrics [default: 127.0.0.1:10259].")
@click.option(
    "--events",
    type=click.Choice(("all", "failures")),
    default="all",
    show_default=True,
    help="Post Events for every pod, or only for failures.",
)
@click.option(
    "--forecast-annotation",
    is_flag=True,
    help="Annotate pending pods with their expected start; needs the role hodei-forecast.",
)
@click.option(
    "--usage-configmap", default="hodei-usage", metavar="NAME", show_default=True,
    help="ConfigMap in the Lease's namespace with the usage for fair share and budgets; '' for none.",
)  # fmt: skip
def run_scheduler(**options: Any) -> int:
    """Schedule pods until stopped."""
    given = _start(options)
    access, settings = options_of(given)
    if not 3 <= given.lease_seconds <= 3600:
        raise InvalidInput("--lease-seconds must be from 3 to 3600", hint="15 suits nearly everywhere")
    election = Election(given.lease_name, given.lease_namespace, given.identity, given.lease_seconds)
    _uvloop()
    # What is kept is kept for long, and cycles are few: looking for them less often saves a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    return asyncio.run(run(access, settings, _address(given.listen), election if given.leader_elect else None))


def _address(text: str) -> tuple[str, int]:
    if not text:
        inside = "KUBERNETES_SERVICE_HOST" in os.environ
        return ("0.0.0.0" if inside else "127.0.0.1", _PORT)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(f"{text!r} is not an address to listen on", hint="write HOST:PORT, such as 127.0.0.1:10259")
    return host.strip("[]") or "127.0.0.1", int(port)


def _uvloop() -> None:
    try:
        import uvloop
    except ImportError:
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
