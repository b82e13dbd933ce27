"""Programs with subcommands (`hodei sim`, `hodei bench`, `hodei kube`): called alone they print their help, and a word that
is no subcommand gets a suggestion."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import NoReturn

from hodei.model.text import did_you_mean

_NO_CHOICE = re.compile(r"argument \S+: invalid choice: '(?P<word>.*)' \(choose from (?P<known>.*)\)", re.DOTALL)


class Parser(argparse.ArgumentParser):
    """Mistakes are told like those of all other commands."""

    def error(self, message: str) -> NoReturn:
        found = _NO_CHOICE.fullmatch(message)
        if found is not None and not found[0].startswith("argument -"):
            known = [word.strip(" '\"") for word in found["known"].split(",")]
            near = did_you_mean(found["word"], known) or f"; there are: {', '.join(known)}"
            message = f"no such command: {found['word'][:60]!r}{near}"
        self.exit(2, f"{self.format_usage()}error: {message}\n  next: {self.prog} --help\n[USAGE]\n")


def or_help(args: Sequence[str]) -> Sequence[str]:
    """Nothing at all is a question about what there is."""
    return args or ("--help",)
