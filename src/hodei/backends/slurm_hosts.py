"""Lists of hosts and numbers as Slurm writes them (`n[1-3,7],gpu2`, `2(x3),1`): folded, and unfolded again."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import groupby

# More names than this in one list is a mistake (`n[1-999999999]`).
MOST_HOSTS = 100_000


def folded_hosts(names: Iterable[str]) -> str:
    """`n[1-4],gpu2`: names that differ in their last number alone, together."""
    groups: dict[tuple[str, int], list[int]] = {}
    for name in dict.fromkeys(names):
        found = re.fullmatch(r"(.*?)(\d+)", name)
        stem, number = (found[1], found[2]) if found else (name, "")
        groups.setdefault((stem, len(number) if number.startswith("0") else 0 if number else -1), []).append(
            int(number or 0)
        )
    out = []
    for (stem, width), numbers in groups.items():
        parts = [f"{first:0{max(width, 1)}}" + (f"-{last:0{max(width, 1)}}" if last > first else "")
                 for first, last in _runs(sorted(numbers))]  # fmt: skip
        alone = len(parts) == 1 and "-" not in parts[0]
        out.append(stem if width < 0 else f"{stem}{parts[0]}" if alone else f"{stem}[{','.join(parts)}]")
    return ",".join(out)


def folded_numbers(numbers: Iterable[int]) -> str:
    """`1,3,7-9`."""
    return ",".join(f"{a}-{b}" if b > a else str(a) for a, b in _runs(sorted(numbers)))


def _runs(numbers: list[int]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for number in numbers:
        if out and number == out[-1][1] + 1:
            out[-1] = (out[-1][0], number)
        else:
            out.append((number, number))
    return out


def hosts_in_order(names: Iterable[str]) -> str:
    """Folded if that keeps the order, which tells the ids of the nodes: scripts take the first for the master."""
    listed = list(dict.fromkeys(names))
    folded = folded_hosts(listed)
    try:
        return folded if hosts(folded) == listed else ",".join(listed)
    except ValueError:  # names with brackets of their own
        return ",".join(listed)


def counts(numbers: Iterable[int]) -> str:
    """`2(x3),1`: how many of each node, as SLURM_TASKS_PER_NODE has it."""
    runs = [(number, len(list(group))) for number, group in groupby(numbers)]
    return ",".join(f"{number}(x{times})" if times > 1 else str(number) for number, times in runs)


def hosts(text: str) -> list[str]:
    """The names in `n[1-3,07],gpu2`, in their order. ValueError if it is no such list."""
    out: list[str] = []
    for word in _split(text):
        found = [""]
        for plain, listed in re.findall(r"([^\[\]]+)|\[([^\[\]]*)\]", word):
            ends = [plain] if plain else _numbers(listed)
            if len(found) * len(ends) > MOST_HOSTS:
                raise ValueError(f"more than {MOST_HOSTS} hosts")
            found = [f"{stem}{end}" for stem in found for end in ends]
        out += found
    return out


def _split(text: str) -> list[str]:
    """At commas that are not within brackets."""
    words = re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text)
    if ",".join(words) != text:
        raise ValueError(f"{text[:60]!r} is no list of hosts")
    return words


def _numbers(text: str) -> list[str]:
    out: list[str] = []
    for part in text.split(","):
        found = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if found is None or int(found[2] or found[1]) < int(found[1]):
            raise ValueError(f"{part[:60]!r} is no range of numbers")
        first, last = int(found[1]), int(found[2] or found[1])
        if last - first >= MOST_HOSTS:
            raise ValueError(f"more than {MOST_HOSTS} hosts")
        out += [f"{number:0{len(found[1])}}" for number in range(first, last + 1)]
    return out
