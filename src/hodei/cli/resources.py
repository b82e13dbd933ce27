"""The verbs that every kind of named resource has: `list`, `show`, `delete`, and verbs that take only a name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import click

from hodei.cli.options import client, headers_option, output_option
from hodei.cli.output import Column, emit_list, emit_one

if TYPE_CHECKING:
    from hodei.client import Client

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]
name_argument: Decorator = click.argument("name", metavar="NAME")


def list_command(
    group: click.Group, fetch: Callable[[Client], Sequence[Any]], columns: Sequence[Column], *, empty: str, help: str
) -> None:
    """`hodei NOUN list`."""

    @group.command("list", help=help)
    @output_option
    @headers_option
    def command(output: str, no_headers: bool) -> None:
        with client() as server:
            found = fetch(server)
        emit_list(found, output, columns, name=lambda item: item.name, headers=not no_headers, empty=empty)


def named_command(
    group: click.Group,
    verb: str,
    call: Callable[..., Any],
    text: Callable[[Any], str],
    *,
    help: str,
    argument: Decorator = name_argument,
    options: Sequence[Decorator] = (),
) -> None:
    """`hodei NOUN VERB NAME`: call the server with the name and the values of `options`, and print the answer."""

    def command(name: str, output: str, **given: Any) -> None:
        with client() as server:
            found = call(server, name, **given)
        emit_one(found, output, name=lambda item: item.name, text=text)

    decorated: Callable[..., Any] = output_option(command)
    for decorate in (*options, argument):
        decorated = decorate(decorated)
    group.command(verb, help=help)(decorated)
