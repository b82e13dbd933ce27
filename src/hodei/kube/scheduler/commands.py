"""The command line of `hodei kube`. Exit codes: 0 done, 1 failed or lost the lead, 2 invalid input, 130 Ctrl-C."""

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
from msgspec import structs

from hodei.cli.groups import Group, exit_code
from hodei.cli.options import output_option
from hodei.cli.output import emit_list, emit_one, is_for_people
from hodei.kube.api.client import Access
from hodei.kube.scheduler.explain import Answer, explain_pod, plan_manifests
from hodei.kube.scheduler.reservations import read_file
from hodei.kube.scheduler.run import Election, Options, run
from hodei.model.errors import InvalidInput

_PORT = 10259
_FILE = click.Path(path_type=Path)
_COMMON = (
    click.option("--kubeconfig", default="", metavar="FILE", help="Access to the cluster [default: $KUBECONFIG, ~/.kube/config, or in-cluster]."),
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


def _set_up_logging(options: dict[str, Any]) -> SimpleNamespace:
    args = SimpleNamespace(**options)
    logging.basicConfig(
        level=logging.DEBUG if args.verbose else logging.INFO, stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    return args


def parse_options(args: SimpleNamespace) -> tuple[Access, Options]:
    if args.prefer_priority_annotation and not args.priority_annotation:
        raise InvalidInput(
            "--prefer-priority-annotation needs --priority-annotation", hint="add --priority-annotation NAME"
        )
    config, reservations = read_file(args.config)
    options = Options(
        args.scheduler_name, getattr(args, "events", "all"), args.priority_annotation, args.one_pod_per_node,
        config.scheduling, reservations=reservations, forecast_annotation=getattr(args, "forecast_annotation", False),
        usage_configmap=getattr(args, "usage_configmap", ""), namespace=getattr(args, "lease_namespace", ""),
        priority_preferred=args.prefer_priority_annotation,
    )  # fmt: skip
    return Access(args.kubeconfig, args.context), options


@kube.command("why")
@click.argument("pod", metavar="NAMESPACE/NAME")
@_common_options
@output_option
def why(**options: Any) -> None:
    """Explain why a pod is pending, also one of another scheduler."""
    args = _set_up_logging(options)
    namespace, slash, name = args.pod.partition("/")
    access, settings = parse_options(args)
    if not slash:
        namespace, name = "default", args.pod
    _print_answers([asyncio.run(explain_pod(access, settings, namespace, name))], args.output, planned=False)


@kube.command("plan")
@click.argument("file", metavar="FILE...", nargs=-1, required=True, type=_FILE)
@_common_options
@output_option
def plan(**options: Any) -> None:
    """Report where the pods of manifests would go, or why they would wait; - reads stdin."""
    args = _set_up_logging(options)
    access, settings = parse_options(args)
    _print_answers(asyncio.run(plan_manifests(access, settings, list(args.file))), args.output, planned=True)


def _print_answers(answers: list[Answer], output: str, *, planned: bool) -> None:
    if is_for_people(output):
        click.echo("\n\n".join(render_answer(answer, planned=planned) for answer in answers))
    elif planned:
        emit_list(answers, output, (), name=lambda answer: answer.pod)
    else:
        emit_one(answers[0], output, name=lambda answer: answer.pod, text=str)


def render_answer(answer: Answer, *, planned: bool) -> str:
    from hodei.cli.why import render

    lines = []
    if answer.kind:
        lines.append(render_workload(answer))
        if answer.now == answer.total:
            answer = structs.replace(answer, explanation=None)  # the line above has the nodes
    if answer.explanation is not None:
        explanation = structs.replace(answer.explanation, job=0, name=answer.pod)
        text = render(explanation, planned=planned).replace(f"the job ({answer.pod})", f"pod {answer.pod}", 1)
        for number, name in answer.names.items():
            text = re.sub(rf"\bjob {number}\b( \([^)]*\))?", name, text)
        lines.append(text)
        if answer.message:
            lines.append(f"  as kube-scheduler would report it: {answer.message}")
    elif not answer.kind:
        lines.append(f"pod {answer.pod}: {answer.message}")
    elif answer.message:
        lines.append(f"  {answer.message}")
    if answer.unread:
        lines.append(f"  not readable with these rights: {', '.join(answer.unread)}")
    return "\n\n".join(lines)


def render_workload(answer: Answer) -> str:
    """How many of its pods would start now, and where."""
    started = f"{answer.now} of {answer.total} pods" if answer.now < answer.total else f"all {answer.total} pods"
    by_count = sorted(answer.nodes.items(), key=lambda entry: (-entry[1], entry[0]))
    nodes_text = ", ".join(f"{count} on {node}" if answer.total > 1 else node for node, count in by_count[:5])
    text = f"{answer.kind} {answer.pod}: {started} would start now"
    if not answer.total:
        return f"{answer.kind} {answer.pod}: it creates no pods"
    if nodes_text:
        text += f" ({nodes_text}{', and more' if len(by_count) > 5 else ''})"
    if answer.preempting:
        text += f"; {answer.preempting} would preempt other pods, each considered alone"
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
    help="Lease duration: how long standbys wait for a silent leader, which renews seven times as often.",
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
    args = _set_up_logging(options)
    access, settings = parse_options(args)
    if not 3 <= args.lease_seconds <= 3600:
        raise InvalidInput("--lease-seconds must be from 3 to 3600", hint="15 is a good value nearly everywhere")
    election = Election(args.lease_name, args.lease_namespace, args.identity, args.lease_seconds)
    _use_uvloop()
    # Objects live long and cycles are rare: fewer collections save a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    return asyncio.run(run(access, settings, _address(args.listen), election if args.leader_elect else None))


def _address(text: str) -> tuple[str, int]:
    if not text:
        inside = "KUBERNETES_SERVICE_HOST" in os.environ
        return ("0.0.0.0" if inside else "127.0.0.1", _PORT)
    host, colon, port = text.rpartition(":")
    if not colon or not port.isdigit() or int(port) > 65535:
        raise InvalidInput(f"--listen {text!r} is not an address", hint="write HOST:PORT, such as 127.0.0.1:10259")
    return host.strip("[]") or "127.0.0.1", int(port)


def _use_uvloop() -> None:
    try:
        import uvloop
    except ImportError:
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
