"""What a backend says of itself: what it can do, whether it is well, what is used on its nodes, how a command went."""

from __future__ import annotations

from msgspec import Struct, structs

from hodei.model.resources import Resources


class Capabilities(Struct, frozen=True, omit_defaults=True):
    """Which of the things that not every system can do this one can. Whoever asks for one that is not there is refused.

    `commands`: runs do what their command says (only fakes do not). `images`: tasks with an `image`; `bare`: tasks without
    one. `gpus`: runs are given those that they were granted. `limits`: cpu and memory limits hold. `two_streams`: stdout
    and stderr are kept apart, else all is in stdout. `checkpoint`, `health_checks`: as a job's file asks for.
    `gpu_shares`: runs can share a GPU. `idle_timeouts`: a run that does nothing is noticed and stopped. `execute`:
    a command beside a run. `node_execute`: a command on a node, for operators. `usage`: what is used on its nodes. `suspend`: a run can be frozen in its place. `reserve`: room
    can be set aside before a start. `delegates`: it queues and places by itself, a start only joins its line; `expects`:
    it tells when those in its line will begin.
    """

    commands: bool = True
    images: bool = False
    bare: bool = True
    gpus: bool = False
    gpu_shares: bool = False
    limits: bool = False
    two_streams: bool = True
    checkpoint: bool = False
    health_checks: bool = False
    idle_timeouts: bool = False
    execute: bool = False
    node_execute: bool = False
    usage: bool = False
    suspend: bool = False
    reserve: bool = False
    delegates: bool = False
    expects: bool = False

    def named(self) -> tuple[str, ...]:
        """Those that are there, by name."""
        return tuple(name for name, there in sorted(structs.asdict(self).items()) if there)


class Health(Struct, frozen=True, omit_defaults=True):
    """`text`: what is wrong, or a word on what answered (its version). `took_ms`: how long the answer took."""

    ok: bool
    text: str = ""
    took_ms: int = 0


class NodeUsage(Struct, frozen=True, omit_defaults=True):
    """What is in use on a node as measured, not as promised, by whomever; resources that nobody measured are left out."""

    used: Resources = {}


class Executed(Struct, frozen=True, omit_defaults=True):
    """How a command beside a run went. `exit_code` is 128 + the signal's number if a signal ended it, None if it was not
    over in time. `cut`: more was said than is kept. Systems with one stream only leave `stderr` empty."""

    exit_code: int | None
    stdout: bytes = b""
    stderr: bytes = b""
    cut: bool = False
