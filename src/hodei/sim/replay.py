"""`hodei replay LOG`: decide everything in a decision log again, and say whether every plan is the same.

Exit code 0: identical. 1: the first difference is shown. 2: not a log that can be read.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from hodei.engine.plan import Plan
from hodei.model.config import SchedulingConfig
from hodei.model.errors import HodeiError, InvalidInput
from hodei.model.facts import AnyFact
from hodei.wiring import make_controller

_FORMATS = (1,)


class Header(msgspec.Struct):
    hodei_decision_log: int
    config: SchedulingConfig
    last_event: int = 0


class Line(msgspec.Struct):
    now: int
    facts: list[AnyFact]
    plan: msgspec.Raw


class Difference(msgspec.Struct):
    line: int
    now: int
    logged: bytes
    decided: bytes


class Result(msgspec.Struct):
    steps: int = 0
    facts: int = 0
    binds: int = 0
    difference: Difference | None = None


def replay(path: Path) -> Result:
    lines = _lines(path)
    try:
        number, first = next(lines)
        header = msgspec.json.decode(first, type=Header)
    except (StopIteration, msgspec.DecodeError) as error:
        raise InvalidInput(f"{path} is not a decision log: {str(error) or 'it is empty'}") from error
    if header.hodei_decision_log not in _FORMATS:
        raise InvalidInput(f"{path} is of format {header.hodei_decision_log}, which this version does not know")
    controller = make_controller(header.config, header.last_event)
    decoder, result = msgspec.json.Decoder(Line), Result()
    for number, raw in lines:
        try:
            line = decoder.decode(raw)
        except msgspec.DecodeError as error:
            raise InvalidInput(f"{path}, line {number}: {error}") from error
        plan = controller.step(line.now, line.facts).plan
        result.steps += 1
        result.facts += len(line.facts)
        result.binds += len(plan.binds)
        decided = msgspec.json.encode(plan)
        if decided != bytes(line.plan):
            result.difference = Difference(number, line.now, bytes(line.plan), decided)
            break
    return result


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    return  # the last words of a server that was killed; what they were cannot be known
                yield number, line
    except OSError as error:
        raise InvalidInput(f"cannot read {path}: {error.strerror}") from error


def _show(difference: Difference) -> str:
    """The first entry in which the two plans differ."""
    logged, decided = (msgspec.json.decode(side, type=Plan) for side in (difference.logged, difference.decided))
    for kind in ("binds", "refusals", "faults"):
        pairs = zip(getattr(logged, kind), getattr(decided, kind), strict=False)
        for place, (before, now) in enumerate(pairs):
            if before != now:
                return f"{kind}[{place}]\n  logged:  {before}\n  decided: {now}"
        if len(getattr(logged, kind)) != len(getattr(decided, kind)):
            return f"{len(getattr(logged, kind))} {kind} logged, {len(getattr(decided, kind))} decided"
    return f"\n  logged:  {difference.logged[:400]!r}\n  decided: {difference.decided[:400]!r}"


def main(args: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="hodei replay", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    given = parser.parse_args(args)
    try:
        result = replay(given.log)
    except HodeiError as error:
        print(f"error: {error.message}", file=sys.stderr)
        return 2
    same = result.difference is None
    if given.json:
        at = result.difference.line if result.difference else None
        print(msgspec.json.encode({"identical": same, "steps": result.steps, "facts": result.facts,
                                   "binds": result.binds, "line": at}).decode())  # fmt: skip
    elif result.difference is None:
        print(f"identical: {result.steps} steps, {result.facts} facts, {result.binds} binds")
    else:
        print(f"different at line {result.difference.line} (step {result.steps}): {_show(result.difference)}")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
