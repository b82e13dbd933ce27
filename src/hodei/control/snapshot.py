"""The whole state of a controller as bytes, and a controller that goes on from there as the first one would have.

A decision log is kept in segments, and old ones are deleted: what is left can only be decided again if the state at its
beginning is known. It is written object by object, so a new part of the controller needs no word here, as long as it is
made of plain values, objects and methods (a lambda cannot be written: use a method). Values of jobs' variables are left
out, no decision depends on them.

The format is pickle, but reading runs no code that the bytes choose: only classes of the rooms below (which do no input
or output) and of the plugins in use are made, and nothing else can be named. Bytes are for the version that wrote them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from types import FunctionType, MethodType
from typing import Any

import numpy as np
from msgspec import structs

from hodei.control.admission import Gate
from hodei.control.controller import Controller
from hodei.engine.cycle import Engine
from hodei.engine.preempt import Preemptions
from hodei.engine.profile import Profile
from hodei.model.errors import InvalidInput
from hodei.model.job import TaskSpec
from hodei.model.secrets import MASK, looks_secret, masked

_ROOMS = ("hodei.control.", "hodei.engine.", "hodei.model.", "hodei.plugins.")
_PLAIN: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (set, frozenset, slice, range, bytearray, complex, Counter, OrderedDict, defaultdict, deque)
} | {("builtins", kind.__name__): kind for kind in (int, float, str, bool, list, dict, tuple)}
_LEVEL = 1
# Objects hold each other some hundreds deep, each level being a few calls.
_DEPTH = 20_000


def dump(controller: Controller) -> bytes:
    """Costs some microseconds for each job that waits or runs: not for the loop of a server."""
    out = io.BytesIO()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEPTH))
    try:
        writer = _Writer(out, protocol=5)
        writer.remake = controller.remake
        writer.strangers = frozenset(name for name in modules_of(controller) if not name.startswith(_ROOMS))
        writer.dump(controller)
    finally:
        sys.setrecursionlimit(limit)
    return zlib.compress(out.getvalue(), _LEVEL)


def load(state: bytes, plugin_modules: Collection[str] = ()) -> Controller:
    """`plugin_modules`: where plugins come from that are not Hodei's own. InvalidInput if it is not of this version."""
    try:
        controller = _Reader(io.BytesIO(zlib.decompress(state)), plugin_modules).load()
    except InvalidInput:
        raise
    except Exception as error:  # bytes of another version fail in any way
        raise InvalidInput(f"a saved state cannot be read by this version: {error}") from error
    if not isinstance(controller, Controller):
        raise InvalidInput("a saved state is not that of a scheduler")
    return controller


def modules_of(controller: Controller) -> set[str]:
    """Where the plugins of a controller come from."""
    found = set()
    for profile in controller.engine.profiles.values():
        for plugin in (profile.queue, *profile.readers, *profile.judges, *profile.post_filters, *profile.binds):
            found.add(type(plugin).__module__)
    return found


def _without_secrets(reduced: Any) -> Any:
    """Options of others' plugins are anything, secrets too: their attributes whose names look secret are not told."""
    if isinstance(reduced, tuple) and len(reduced) > 2 and isinstance(reduced[2], dict):
        return (*reduced[:2], _masked(reduced[2]), *reduced[3:])
    return reduced


def _masked(named: dict[Any, Any]) -> dict[Any, Any]:
    return {
        name: MASK
        if isinstance(value, str) and isinstance(name, str) and looks_secret(name)
        else _masked(value)
        if type(value) is dict
        else value
        for name, value in named.items()
    }


def _gate(it: Gate) -> tuple[Any, ...]:
    return Gate, (it._engine, it._policy), {"routing": it.routing, "unknown": it.unknown}


# Caches are not written: they are made anew when they are asked for, and are exact.
_AS_NEW: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Engine: lambda it: (Engine, (it.table, it.profiles)),
    Gate: _gate,
    Preemptions: lambda it: (Preemptions, (it._engine, it._tenancy)),
    Profile: lambda it: structs.replace(it, specs={}, same={}).__reduce__(),
}


class _Writer(pickle.Pickler):
    remake: Any = None
    strangers: frozenset[str] = frozenset()

    def reducer_override(self, it: Any) -> Any:
        kind = type(it)
        if kind is TaskSpec:
            return (structs.replace(it, env=masked(it.env, "names")) if it.env else it).__reduce__()
        if kind in _AS_NEW:
            return _AS_NEW[kind](it)
        if kind is np.ndarray:
            return _array, (it.dtype.str, it.shape, it.tobytes())
        if kind is MethodType:
            return _method, (it.__self__, it.__func__.__name__)
        if kind is itertools.count:
            return _count, (int(repr(it)[len("count(") : -1]),)
        if kind.__module__ in self.strangers:
            return _without_secrets(it.__reduce_ex__(5))
        if it is self.remake:
            return _nothing, ()  # whoever loads it knows how to make another
        if kind is FunctionType and it not in _HELPERS:
            if "<" in it.__qualname__ or "." in it.__qualname__:
                raise pickle.PicklingError(f"{it.__module__}.{it.__qualname__} is no method, it cannot be written")
            return _function, (it.__module__, it.__qualname__)
        return NotImplemented


class _Reader(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, plugin_modules: Collection[str]) -> None:
        super().__init__(file)
        self._modules = frozenset(plugin_modules)

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _BY_NAME:
            return _BY_NAME[name]
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module.startswith(_ROOMS) or module in self._modules:
            found = vars(_module(module)).get(name)  # no dots: nothing is reached through something else
            if isinstance(found, type) and found.__module__ == module:
                return found
        raise InvalidInput(f"a saved state names {module}.{name}, which is no part of a scheduler")


def _module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape).copy()


def _method(owner: Any, name: str) -> MethodType:
    for base in type(owner).__mro__:
        if isinstance(found := vars(base).get(name), FunctionType):
            return MethodType(found, owner)
    raise InvalidInput(f"a saved state names a method {name} that {type(owner).__name__} has not")


def _count(start: int) -> itertools.count[int]:
    return itertools.count(start)


def _function(module: str, name: str) -> FunctionType:
    found = vars(_module(module)).get(name) if module.startswith(_ROOMS) else None
    if not isinstance(found, FunctionType) or found.__module__ != module:
        raise InvalidInput(f"a saved state names {module}.{name}, which is no part of a scheduler")
    return found


def _nothing() -> None:
    return None


_HELPERS = (_nothing, _array, _method, _count, _function)
_BY_NAME = {helper.__name__: helper for helper in _HELPERS}
