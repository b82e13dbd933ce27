"""The command line of `hodei kube`. Exit codes: 0 done, 1 it failed or the lead was lost, 2 wrong input, 130 Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import re
import sys
from pathlib import Path

import msgspec
from msgspec import structs

from hodei.kube.api.client import Access
from hodei.kube.scheduler.build import Options
from hodei.kube.scheduler.reservations import read_file
from hodei.kube.scheduler.run import Election, run
from hodei.kube.scheduler.why import Answer, look_ahead, look_why
from hodei.model.errors import HodeiError, InvalidInput
from hodei.model.subcommands import Parser, or_help

_ABOUT = """\
Hodei as a pod scheduler of a Kubernetes cluster: it schedules the pods whose schedulerName is its own.

  hodei kube run --scheduler-name hodei
  hodei kube why default/my-pod
  hodei kube plan -f pod.yaml
"""
_PORT = 10259


def main(args: list[str] | None = None) -> int:
    parser = Parser(prog="hodei kube", description=_ABOUT, formatter_class=argparse.RawDescriptionHelpFormatter)
    kinds = parser.add_subparsers(dest="kind", required=True, metavar="COMMAND")
    _run_arguments(kinds.add_parser("run", help="schedule pods until told to stop"))
    _why_arguments(kinds.add_parser("why", help="say why a pod waits, whoever schedules it"))
    _plan_arguments(kinds.add_parser("plan", help="say where pods would go, or why they would wait"))
    given = parser.parse_args(or_help(sys.argv[1:] if args is None else args))
    logging.basicConfig(
        level=logging.DEBUG if given.verbose else logging.INFO, stream=sys.stderr,
        format="%(asctime)s %(levelname)s %(name)s: %(message)s",
    )  # fmt: skip
    try:
        code: int = given.go(given)
        return code
    except HodeiError as error:
        hint = error.hint or "see docs/how-to/kubernetes-troubleshooting.md"
        print(f"error: {error.message}\n  next: {hint}", file=sys.stderr)
        return 2 if isinstance(error, InvalidInput) else 1
    except KeyboardInterrupt:
        return 130


def _reaching(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kubeconfig", default="", metavar="FILE", help="else $KUBECONFIG, ~/.kube/config, or in-cluster"
    )
    parser.add_argument("--context", default="", metavar="NAME", help="which of its contexts (the current one)")
    parser.add_argument(
        "--scheduler-name", default="hodei", metavar="NAME", help="whose pods: spec.schedulerName (hodei)"
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="a TOML file: its [scheduling], [[reservations]]")
    parser.add_argument(
        "--priority-annotation", default="", metavar="NAME",
        help="believe this annotation of pods without a priority class; whoever may create a pod chooses its priority then",
    )  # fmt: skip
    parser.add_argument(
        "--prefer-priority-annotation", action="store_true",
        help="believe that annotation before a priority class too (not before Kubernetes' own classes)",
    )  # fmt: skip
    parser.add_argument("--one-pod-per-node", action="store_true", help="a node takes one pod of ours at a time")
    parser.add_argument("-v", "--verbose", action="store_true")


def _run_arguments(parser: argparse.ArgumentParser) -> None:
    _reaching(parser)
    parser.add_argument(
        "--leader-elect", action=argparse.BooleanOptionalAction, default=True, help="only one of several acts (yes)"
    )
    parser.add_argument("--lease-name", default="hodei", metavar="NAME", help="the Lease that tells who leads (hodei)")
    parser.add_argument("--lease-namespace", default="", metavar="NS", help="where it is (the account's own namespace)")
    parser.add_argument(
        "--lease-seconds", type=int, default=15, metavar="N",
        help="how long the others wait for a leader that is silent (15); it renews in a seventh of that",
    )  # fmt: skip
    parser.add_argument("--identity", default="", metavar="ID", help="who holds it (host and process)")
    parser.add_argument("--listen", default="", metavar="HOST:PORT", help="for probes and metrics (127.0.0.1:10259)")
    parser.add_argument(
        "--events", choices=("all", "failures"), default="all", help="post Events for every pod, or for trouble only"
    )
    parser.add_argument(
        "--forecast-annotation", action="store_true",
        help="write on pods that wait when they will probably start; needs the role hodei-forecast",
    )  # fmt: skip
    parser.add_argument(
        "--usage-configmap", default="hodei-usage", metavar="NAME",
        help="where fair share and budgets remember what was used, in the Lease's namespace (hodei-usage; '' for nowhere)",
    )  # fmt: skip
    parser.set_defaults(go=_run)


def options_of(given: argparse.Namespace) -> tuple[Access, Options]:
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


def _why_arguments(parser: argparse.ArgumentParser) -> None:
    _reaching(parser)
    parser.add_argument("pod", metavar="NAMESPACE/NAME")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.set_defaults(go=_why)


def _plan_arguments(parser: argparse.ArgumentParser) -> None:
    _reaching(parser)
    parser.add_argument("-f", "--file", type=Path, action="append", required=True, help="a manifest; may be repeated")
    parser.add_argument("-o", "--output", choices=("text", "json"), default="text")
    parser.set_defaults(go=_plan)


def _why(given: argparse.Namespace) -> int:
    namespace, slash, name = given.pod.partition("/")
    access, options = options_of(given)
    if not slash:
        namespace, name = "default", given.pod
    answer = asyncio.run(look_why(access, options, namespace, name))
    _show([answer], given.output, planned=False)
    return 0


def _plan(given: argparse.Namespace) -> int:
    access, options = options_of(given)
    _show(asyncio.run(look_ahead(access, options, given.file)), given.output, planned=True)
    return 0


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


def _run(given: argparse.Namespace) -> int:
    access, options = options_of(given)
    if not 3 <= given.lease_seconds <= 3600:
        raise InvalidInput("--lease-seconds must be from 3 to 3600", hint="15 suits nearly everywhere")
    election = Election(given.lease_name, given.lease_namespace, given.identity, given.lease_seconds)
    _uvloop()
    # What is kept is kept for long, and cycles are few: looking for them less often saves a tenth of the time.
    gc.set_threshold(50_000, 20, 50)
    return asyncio.run(run(access, options, _address(given.listen), election if given.leader_elect else None))


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
