"""The whole state of a controller as bytes, and a controller that goes on from there as the first one would have.

A decision log is kept in segments, and old ones are deleted: what is left can only be decided again if the state at its
beginning is known. It is written object by object, so a new part of the controller needs no word here, as long as it is
made of plain values, objects and methods (a function cannot be written: use a method). Values of jobs' variables are left
out, no decision depends on them.

The format is pickle, but bytes may come from others, so the reader is narrow. It knows only the operations that the writer
uses. It makes objects of the classes of the rooms below (which do no input or output) and of the plugins in use, calls the
few helpers of this file, and nothing else: no method, no function, no class of another module. It sets attributes only of
objects that it made. Bytes are for the version that wrote them.
"""

from __future__ import annotations

import io
import itertools
import pickle
import sys
import zlib
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection
from functools import partial
from types import FunctionType, MethodType
from typing import Any, ClassVar

import numpy as np
from msgspec import structs

from hodei.control.admission.gate import Gate
from hodei.control.controller import Controller
from hodei.engine.cycle import Engine
from hodei.engine.preemption.search import Preemptions
from hodei.engine.profile import Profile
from hodei.model.audit import MASK, looks_secret, mask_env
from hodei.model.errors import InvalidInput
from hodei.model.facts import Fact
from hodei.model.job import TaskSpec

_ROOMS = ("hodei.control.", "hodei.engine.", "hodei.model.", "hodei.plugins.")
_PLAIN: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (set, frozenset, slice, range, bytearray, complex, Counter, OrderedDict, defaultdict, deque)
} | {("builtins", kind.__name__): kind for kind in (int, float, str, bool, list, dict, tuple)}
# Those of them that are made by a call with arguments. The others have operations of their own in the format, or are only
# named (as the factory of a defaultdict): a call could ask for any amount of memory.
_CALLED = frozenset((slice, range, complex, Counter, OrderedDict, defaultdict, deque))
_LEVEL = 1
# A state is some 5 to 20 times as large as its bytes. More than this is a trick to fill the memory.
_MOST_TIMES = 200
_LEAST_BOUND = 64 << 20
# Objects hold each other some hundreds deep, each level being a few calls.
_DEPTH = 20_000


def dump(controller: Controller) -> bytes:
    """Costs some microseconds for each job that waits or runs: not for the loop of a server."""
    out = io.BytesIO()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEPTH))
    try:
        writer = _Writer(out, protocol=5)
        writer.rebuild = controller.rebuild
        writer.strangers = frozenset(name for name in modules_of(controller) if not name.startswith(_ROOMS))
        writer.dump(controller)
    finally:
        sys.setrecursionlimit(limit)
    return zlib.compress(out.getvalue(), _LEVEL)


def load(state: bytes, plugin_modules: Collection[str] = ()) -> Controller:
    """`plugin_modules`: where plugins come from that are not Hodei's own. InvalidInput if it is not of this version."""
    try:
        controller = _Reader(io.BytesIO(_unpacked(state)), plugin_modules).load()
    except InvalidInput:
        raise
    except Exception as error:  # bytes of another version fail in any way
        raise InvalidInput(f"a saved state cannot be read by this version: {error}") from error
    if not isinstance(controller, Controller):
        raise InvalidInput("a saved state is not that of a scheduler")
    return controller


def _unpacked(state: bytes) -> bytes:
    bound = max(_MOST_TIMES * len(state), _LEAST_BOUND)
    unpacker = zlib.decompressobj()
    out = unpacker.decompress(state, bound)
    if not unpacker.eof:
        larger = bool(unpacker.unconsumed_tail) or len(out) >= bound
        raise InvalidInput("a saved state is too large for its file" if larger else "a saved state is cut off")
    return out


def modules_of(controller: Controller) -> set[str]:
    """Where the plugins of a controller come from."""
    found = set()
    for profile in controller.engine.profiles.values():
        for plugin in (
            profile.queue,
            *profile.node_plugins,
            *profile.gang_plugins,
            *profile.post_filters,
            *profile.binds,
        ):
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
    return Gate, (it._engine, it._policy, it.unreached), {"routing": it.routing}


# Caches are not written: they are made anew when they are asked for, and are exact.
_AS_NEW: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Engine: lambda it: (Engine, (it.table, it.profiles)),
    Gate: _gate,
    Preemptions: lambda it: (Preemptions, (it._engine, it._victim_index)),
    Profile: lambda it: structs.replace(it, specs={}, same={}).__reduce__(),
}


class _Writer(pickle.Pickler):
    rebuild: Any = None
    strangers: frozenset[str] = frozenset()

    def reducer_override(self, it: Any) -> Any:
        kind = type(it)
        if kind is TaskSpec:
            return (structs.replace(it, env=mask_env(it.env, "names")) if it.env else it).__reduce__()
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
        if isinstance(it, Fact):
            return _by_names, (kind, structs.asdict(it))  # as it has fields that are only ever named
        if it is self.rebuild:
            return _nothing, ()  # whoever loads it knows how to make another
        if kind is FunctionType and it not in _HELPERS:
            raise pickle.PicklingError(f"{it.__module__}.{it.__qualname__} is not a method, so it cannot be written")
        return NotImplemented


# The operations that the writer uses, without those that name things in other ways or reach outside.
_OPERATIONS = (
    pickle.PROTO, pickle.FRAME, pickle.STOP, pickle.MARK, pickle.POP, pickle.POP_MARK, pickle.NONE, pickle.NEWTRUE,
    pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.LONG4, pickle.BINFLOAT,
    pickle.BINBYTES, pickle.SHORT_BINBYTES, pickle.BINBYTES8, pickle.BINUNICODE, pickle.SHORT_BINUNICODE,
    pickle.BINUNICODE8, pickle.BYTEARRAY8, pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3,
    pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS,
    pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.MEMOIZE, pickle.BINGET, pickle.LONG_BINGET,
    pickle.STACK_GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.NEWOBJ, pickle.NEWOBJ_EX,
)  # fmt: skip


class _Reader(pickle._Unpickler):
    """The one written in Python, not the fast one: only here can be said what may be called."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPERATIONS}
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, plugin_modules: Collection[str]) -> None:
        super().__init__(file)
        self._modules = frozenset(plugin_modules)
        # What may be made: classes that were named and found to be parts of a scheduler.
        self._classes: set[Any] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _BY_NAME:
            return _BY_NAME[name]
        if (module, name) in _PLAIN:
            return _PLAIN[module, name]
        if module != __name__ and (module.startswith(_ROOMS) or module in self._modules):
            found = vars(_module(module)).get(name)  # no dots: nothing is reached through something else
            if isinstance(found, type) and found.__module__ == module:
                self._classes.add(found)
                return found
        raise InvalidInput(f"a saved state names {module}.{name}, which is no part of a scheduler")

    def _reduce(self) -> None:
        args = self.stack.pop()
        made = self.stack[-1]
        if made is _by_names:
            allowed = type(args) is tuple and len(args) == 2 and args[0] in self._classes and issubclass(args[0], Fact)
        elif type(made) is FunctionType:
            allowed = made in _HELPERS
        else:
            allowed = isinstance(made, type) and (made in self._classes or made in _CALLED)
        if not allowed or type(args) is not tuple:
            raise InvalidInput(f"a saved state calls {_shown(made)}")
        self.stack[-1] = made(*args)

    def _new(self) -> None:
        args = self.stack.pop()
        self._make(args, {})

    def _new_with_names(self) -> None:
        named = self.stack.pop()
        args = self.stack.pop()
        self._make(args, named)

    def _make(self, args: Any, named: Any) -> None:
        kind = self.stack.pop()
        if not isinstance(kind, type) or kind not in self._classes:
            raise InvalidInput(f"a saved state makes {_shown(kind)}")
        self.stack.append(kind.__new__(kind, *args, **named))

    def _build(self) -> None:
        state = self.stack.pop()
        it = self.stack[-1]
        if type(it) not in self._classes:
            raise InvalidInput(f"a saved state sets attributes of {_shown(it)}")
        plain, slots = state if type(state) is tuple and len(state) == 2 else (state, None)
        for names, put in ((plain, it.__dict__.__setitem__ if plain else None), (slots, partial(setattr, it))):
            if names is None or put is None:
                continue
            for name, value in names.items():
                if type(name) is not str or name.startswith("__"):
                    raise InvalidInput(f"a saved state sets the attribute {name!r} of {_shown(it)}")
                put(sys.intern(name), value)

    def _put(self, kinds: tuple[type, ...], place: int | None, act: Callable[[Any], None]) -> None:
        """An operation that fills what is on the stack, or what was there before the mark."""
        it = self.stack[place] if place is not None else self.metastack[-1][-1]
        if not isinstance(it, kinds):
            raise InvalidInput(f"a saved state fills {_shown(it)}")
        act(self)

    dispatch[pickle.REDUCE[0]] = _reduce
    dispatch[pickle.NEWOBJ[0]] = _new
    dispatch[pickle.NEWOBJ_EX[0]] = _new_with_names
    dispatch[pickle.BUILD[0]] = _build


def _checked(code: bytes, kinds: tuple[type, ...], place: int | None) -> None:
    act = _Reader.dispatch[code[0]]
    _Reader.dispatch[code[0]] = lambda reader: reader._put(kinds, place, act)


_checked(pickle.APPEND, (list, deque), -2)
_checked(pickle.APPENDS, (list, deque), None)
_checked(pickle.SETITEM, (dict,), -3)
_checked(pickle.SETITEMS, (dict,), None)
_checked(pickle.ADDITEMS, (set,), None)


def _shown(it: Any) -> str:
    return f"{it.__module__}.{it.__qualname__}" if isinstance(it, type | FunctionType) else f"a {type(it).__name__}"


def _module(name: str) -> Any:
    __import__(name)
    return sys.modules[name]


def _array(kind: str, shape: tuple[int, ...], data: bytes) -> Any:
    return np.frombuffer(data, dtype=np.dtype(kind)).reshape(shape).copy()


def _method(owner: Any, name: str) -> MethodType:
    for base in () if name.startswith("__") else type(owner).__mro__:
        if isinstance(found := vars(base).get(name), FunctionType):
            return MethodType(found, owner)
    raise InvalidInput(f"a saved state names a method {name} that {type(owner).__name__} has not")


def _count(start: int) -> itertools.count[int]:
    return itertools.count(start)


def _by_names(kind: type, fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _nothing() -> None:
    return None


_HELPERS = (_nothing, _array, _method, _count, _by_names)
_BY_NAME = {helper.__name__: helper for helper in _HELPERS}
