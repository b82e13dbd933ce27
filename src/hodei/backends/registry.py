"""Kinds of backend by name. A kind is imported when it is first needed, so a missing library breaks that kind alone.

A kind is a module with `Settings` and `make` (see `hodei.backends.base`), and optionally `check(name, settings)` for what
types cannot express, announced under the entry point group
`hodei.backends`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any, cast

from msgspec import Meta, Struct, structs

from hodei.backends.base import BackendContext, UnusableBackend
from hodei.extensions import BACKENDS, BUILT_IN, ExtensionMissing, load
from hodei.jobfile.check import convert, join_path, refuse
from hodei.jobfile.values import Problems, try_parse
from hodei.model.config import Cost, Labels, LabelValue
from hodei.model.errors import InvalidInput, did_you_mean
from hodei.model.node import Location, Node
from hodei.ports import Backend

KINDS = BUILT_IN[BACKENDS]


class KindBroken(InvalidInput):
    """An installed package announces the kind, and it cannot be loaded."""


class Common(Struct, frozen=True, forbid_unknown_fields=True):
    """The keys of every table. `enabled` false: the backend does not exist. The others are defaults for its nodes."""

    kind: str
    enabled: bool = True
    region: LabelValue = ""
    zone: LabelValue = ""
    datacenter: LabelValue = ""
    lat: Annotated[float, Meta(ge=-90, le=90)] | None = None
    lng: Annotated[float, Meta(ge=-180, le=180)] | None = None
    cost: Cost = 0.0
    labels: Labels = {}


_COMMON = frozenset(Common.__struct_fields__)


def common_of(name: str, table: Mapping[str, Any]) -> Common:
    problems: Problems = []
    common = _common_of(name, table, problems)
    if problems:
        raise _refused(problems)
    return common


def _common_of(name: str, table: Mapping[str, Any], problems: Problems) -> Common:
    at = join_path("backends", name)
    found = convert({key: value for key, value in table.items() if key in _COMMON}, Common, at, problems)
    if found is None:
        return Common("")
    if not problems:
        try_parse(problems, f"{at}.lat", lambda place: place.with_coordinates(found.lat, found.lng), Location(), None)
    return cast("Common", found)


def node_defaults(table: Mapping[str, Any]) -> Callable[[Node], Node]:
    """A function that fills in the table's defaults for a node of its backend."""
    if not table.keys() & (_COMMON - {"kind", "enabled"}):
        return lambda node: node
    common = common_of("", {"kind": "", **table})

    def fill_in(node: Node) -> Node:
        place = node.location
        if place.lat_micro is None:
            place = place.with_coordinates(common.lat, common.lng)
        return structs.replace(
            node,
            location=structs.replace(
                place,
                region=place.region or common.region,
                zone=place.zone or common.zone,
                datacenter=place.datacenter or common.datacenter,
            ),
            cost_milli=node.cost_milli or round(common.cost * 1000),
            labels={**common.labels, **node.labels} if common.labels else node.labels,
        )

    return fill_in


def settings_of(name: str, table: Mapping[str, Any]) -> Struct:
    """The table `[backends.NAME]` as its kind's own Struct. InvalidInput names the key that is wrong."""
    kind = table.get("kind")
    if not isinstance(kind, str) or not kind:
        raise _wrong(name, "kind", f"the table has no kind; use one of: {', '.join(sorted(KINDS))}")
    module = _module(name, kind)
    wanted = module.Settings
    keys = {*wanted.__struct_fields__}
    at, problems = join_path("backends", name), list[tuple[str, str]]()
    _common_of(name, table, problems)
    for key in sorted(table.keys() - keys - _COMMON):
        known = {*keys, *_COMMON}
        text = f"kind {kind} has no key {key!r}{did_you_mean(key, known)}; it has: {', '.join(sorted(known))}"
        problems.append((join_path(at, key), text))
    settings = convert({key: value for key, value in table.items() if key in keys}, wanted, at, problems)
    if problems or settings is None:
        raise _refused(problems)
    if hasattr(module, "check"):
        module.check(name, settings)
    return cast("Struct", settings)


def make_backend(
    name: str, table: Mapping[str, Any], context: BackendContext, *, known_code: Collection[str] | None = None
) -> Backend:
    """A backend that is not open yet. InvalidInput if its table is wrong, or a library that its kind needs is missing."""
    kind = str(table.get("kind", ""))
    if known_code is not None and ":" in kind and kind not in known_code:
        raise _wrong(name, "kind", f"{kind[:80]!r} is code that the server's configuration file does not name")
    settings = settings_of(name, table)
    return _module(name, table["kind"]).make(name, settings, context)  # type: ignore[no-any-return]


def make_or_explain(name: str, table: Mapping[str, Any], context: BackendContext) -> Backend:
    """Like `make_backend`, but a third-party kind that cannot be loaded becomes an UnusableBackend: the others continue."""
    try:
        return make_backend(name, table, context)
    except KindBroken as error:
        return UnusableBackend(name, table["kind"], f"{error.message}; {error.hint}")


def _module(name: str, kind: str) -> Any:
    try:
        found = load(BACKENDS, kind, "kind")
    except ImportError as error:
        raise _wrong(
            name, "kind", f"kind {kind} cannot be used here: {error}", f"install it: pip install 'hodei[{kind}]'"
        ) from error
    except ExtensionMissing as error:
        raise _wrong(name, "kind", f"{error.message}; {error.hint}") from None
    except InvalidInput as error:
        raise KindBroken(f"backends.{name}.kind: {error.message}", hint=error.hint) from error
    missing = [part for part in ("Settings", "make") if not hasattr(found, part)]
    if missing:
        text = f"kind {kind} has no {' and no '.join(missing)}"
        raise KindBroken(f"backends.{name}.kind: {text}", hint="docs/how-to/write-a-plugin.md")
    return found


def _refused(problems: Problems) -> InvalidInput:
    error = refuse(problems, "the backend")
    error.hint = "docs/how-to/backends.md"
    return error


def _wrong(name: str, key: str, text: str, hint: str = "docs/how-to/backends.md") -> InvalidInput:
    path = ".".join(filter(None, ("backends", name, key)))
    return InvalidInput(f"{path}: {text}", hint=hint, problems=((path, text),))
