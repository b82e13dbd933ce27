"""Options of the command line as Slurm's commands read them: short ones joined, long ones cut short, values behind `=`."""

from __future__ import annotations

import getopt
from collections.abc import Mapping, Sequence


class Refused(Exception):
    """What is said behind the command's name, and the exit code."""

    def __init__(self, text: str, code: int = 1) -> None:
        super().__init__(text)
        self.code = code


class Given:
    """The options that were given by their long names, the last of each, and the other words."""

    def __init__(self, options: Mapping[str, str], rest: Sequence[str]) -> None:
        self._options, self.rest = dict(options), list(rest)

    def __contains__(self, name: str) -> bool:
        return name in self._options

    def get(self, name: str, default: str = "") -> str:
        return self._options.get(name, default)

    def several(self, name: str) -> list[str]:
        """`a,b,c`"""
        return [part for part in self.get(name).split(",") if part]


def read(words: Sequence[str], known: str, code: int = 1) -> Given:
    """`known`: `h/noheader u/user= me`: letter and name, `=` for those with a value."""
    letters, names, by_letter = "", [], {}
    for one in known.split():
        letter, slash, name = one.partition("/") if "/" in one else ("", "", one)
        names.append(name)
        if slash:
            by_letter[f"-{letter}"] = name.rstrip("=")
            letters += letter + (":" if name.endswith("=") else "")
    try:
        found, rest = getopt.gnu_getopt(list(words), letters, names)
    except getopt.GetoptError as error:
        word = f"-{error.opt}" if len(error.opt) == 1 else f"--{error.opt}"
        if "argument" in error.msg:
            raise Refused(f"{error.msg}", code) from None
        raise Refused(f"unrecognized option '{word}'\nit is not known here; see docs/how-to/slurm.md", code) from None
    return Given({by_letter.get(name, name.lstrip("-")): value for name, value in found}, rest)
