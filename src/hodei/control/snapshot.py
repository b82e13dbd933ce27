"""Snapshots: the whole state of a controller as bytes, and a controller that continues from them.

A decision log is kept in segments and old ones are deleted, so that a replay needs the state at the start of a segment. The
state is written object by object, so that a new part of the controller needs no code here, if it consists of plain values,
objects and methods (a function cannot be written: use a method). Values of environment variables are left out, because no
decision depends on them.

The format is pickle, but the bytes may come from an untrusted source, so that the reader is restricted. It knows only the
operations that the writer uses. It creates objects of the packages below (which do no I/O) and of the plugins in use, calls
the helpers of this module, and nothing else: no method, no function, no class of another module. It sets attributes only of
objects that it created. Bytes can be read only by the version that wrote them.
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

_PACKAGES = ("hodei.control.", "hodei.engine.", "hodei.model.", "hodei.plugins.")
_BUILTINS: dict[tuple[str, str], Any] = {
    (kind.__module__, kind.__qualname__): kind
    for kind in (set, frozenset, slice, range, bytearray, complex, Counter, OrderedDict, defaultdict, deque)
} | {("builtins", kind.__name__): kind for kind in (int, float, str, bool, list, dict, tuple)}
# Builtins that are created by a call with arguments. The others have operations of their own, or are only named (as the
# factory of a defaultdict): a call could request any amount of memory.
_CALLABLE = frozenset((slice, range, complex, Counter, OrderedDict, defaultdict, deque))
_LEVEL = 1
# A state is 5 to 20 times as large as its bytes. A larger ratio is an attack on the memory.
_MAX_RATIO = 200
_MIN_LIMIT = 64 << 20
# Objects are nested hundreds of levels deep, with a few calls per level.
_DEPTH = 20_000


def dump(controller: Controller) -> bytes:
    """Costs microseconds per active job: not for the event loop of a server."""
    out = io.BytesIO()
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(max(limit, _DEPTH))
    try:
        writer = _Writer(out, protocol=5)
        writer.rebuild = controller.rebuild
        writer.plugin_modules = frozenset(name for name in modules_of(controller) if not name.startswith(_PACKAGES))
        writer.dump(controller)
    finally:
        sys.setrecursionlimit(limit)
    return zlib.compress(out.getvalue(), _LEVEL)


def load(state: bytes, plugin_modules: Collection[str] = ()) -> Controller:
    """`plugin_modules`: modules of plugins that are not built in. InvalidInput for bytes of another version."""
    try:
        controller = _Reader(io.BytesIO(_decompress(state)), plugin_modules).load()
    except InvalidInput:
        raise
    except Exception as error:  # bytes of another version may fail in any way
        raise InvalidInput(f"a saved state cannot be read by this version: {error}") from error
    if not isinstance(controller, Controller):
        raise InvalidInput("a saved state does not contain a controller")
    return controller


def _decompress(state: bytes) -> bytes:
    bound = max(_MAX_RATIO * len(state), _MIN_LIMIT)
    unpacker = zlib.decompressobj()
    out = unpacker.decompress(state, bound)
    if not unpacker.eof:
        larger = bool(unpacker.unconsumed_tail) or len(out) >= bound
        raise InvalidInput("a saved state is too large for its file" if larger else "a saved state is cut off")
    return out


def modules_of(controller: Controller) -> set[str]:
    """The modules of the plugins of a controller."""
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
    """Options of external plugins may be secrets: attributes whose names look secret are masked."""
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


# Caches are not written: they are exact, and are rebuilt on demand.
_WITHOUT_CACHES: dict[type, Callable[[Any], tuple[Any, ...]]] = {
    Engine: lambda it: (Engine, (it.table, it.profiles)),
    Gate: _gate,
    Preemptions: lambda it: (Preemptions, (it._engine, it._victim_index)),
    Profile: lambda it: structs.replace(it, specs={}, same={}).__reduce__(),
}


class _Writer(pickle.Pickler):
    rebuild: Any = None
    plugin_modules: frozenset[str] = frozenset()

    def reducer_override(self, it: Any) -> Any:
        kind = type(it)
        if kind is TaskSpec:
            return (structs.replace(it, env=mask_env(it.env, "names")) if it.env else it).__reduce__()
        if kind in _WITHOUT_CACHES:
            return _WITHOUT_CACHES[kind](it)
        if kind is np.ndarray:
            return _array, (it.dtype.str, it.shape, it.tobytes())
        if kind is MethodType:
            return _method, (it.__self__, it.__func__.__name__)
        if kind is itertools.count:
            return _count, (int(repr(it)[len("count(") : -1]),)
        if kind.__module__ in self.plugin_modules:
            return _without_secrets(it.__reduce_ex__(5))
        if isinstance(it, Fact):
            return _by_names, (kind, structs.asdict(it))  # because it has keyword-only fields
        if it is self.rebuild:
            return _nothing, ()  # the reader sets its own
        if kind is FunctionType and it not in _HELPERS:
            raise pickle.PicklingError(f"{it.__module__}.{it.__qualname__} is not a method, so it cannot be written")
        return NotImplemented


# The operations that the writer uses, without other ways to name things.
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
    """Based on the Python implementation of the unpickler: only there calls can be restricted."""

    dispatch: ClassVar[dict[int, Any]] = {code[0]: pickle._Unpickler.dispatch[code[0]] for code in _OPERATIONS}
    stack: list[Any]
    metastack: list[list[Any]]

    def __init__(self, file: io.BytesIO, plugin_modules: Collection[str]) -> None:
        super().__init__(file)
        self._modules = frozenset(plugin_modules)
        # Classes that may be instantiated.
        self._classes: set[Any] = set()

    def find_class(self, module: str, name: str) -> Any:
        if module == __name__ and name in _BY_NAME:
            return _BY_NAME[name]
        if (module, name) in _BUILTINS:
            return _BUILTINS[module, name]
        if module != __name__ and (module.startswith(_PACKAGES) or module in self._modules):
            found = vars(_module(module)).get(name)  # no dots: no access through other objects
            if isinstance(found, type) and found.__module__ == module:
                self._classes.add(found)
                return found
        raise InvalidInput(f"a saved state names {module}.{name}, which is not part of a controller")

    def _reduce(self) -> None:
        args = self.stack.pop()
        made = self.stack[-1]
        if made is _by_names:
            allowed = type(args) is tuple and len(args) == 2 and args[0] in self._classes and issubclass(args[0], Fact)
        elif type(made) is FunctionType:
            allowed = made in _HELPERS
        else:
            allowed = isinstance(made, type) and (made in self._classes or made in _CALLABLE)
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
        """An operation that fills an object on the stack, or the one before the mark."""
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
    raise InvalidInput(f"a saved state names a method {name} that {type(owner).__name__} does not have")


def _count(start: int) -> itertools.count[int]:
    return itertools.count(start)


def _by_names(kind: type, fields: dict[str, Any]) -> Any:
    return kind(**fields)


def _nothing() -> None:
    return None


_HELPERS = (_nothing, _array, _method, _count, _by_names)
_BY_NAME = {helper.__name__: helper for helper in _HELPERS}
