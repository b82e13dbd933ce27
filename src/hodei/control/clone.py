"""A clone of the controller: an independent copy in the same state.

Immutable objects (values, plugins) are shared; everything else is copied object by object, so that a new part of the
controller needs no code here. The caches of the engine are left out: they are exact, and are rebuilt on demand. A pending
job costs a few microseconds, so that a server never clones on its event loop (see `runtime.fork_worker`).
"""

from __future__ import annotations

import copy
import gc
import itertools
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType, MethodType, NoneType
from typing import Any

import msgspec
import numpy as np
from msgspec import structs

from hodei.control.accounting.ledger import Factors
from hodei.control.admission.gate import Gate
from hodei.control.controller import Controller
from hodei.engine.availability import Claim, Span
from hodei.engine.cycle import Engine
from hodei.engine.preemption.search import Preemptions
from hodei.engine.profile import Profile
from hodei.engine.view import Gang

# A shared `count` stays in order for both users. Factors are computed once and never change, as are spans and claims.
_VALUES: tuple[type, ...] = (
    int, float, complex, bool, str, bytes, NoneType, frozenset, range, slice, type, FunctionType, BuiltinFunctionType, itertools.count,
    Factors, Span, Claim,
)  # fmt: skip


def clone_controller(controller: Controller) -> Controller:
    """An independent copy that decides like the original. Plugins are shared; those with `reserve` are copied."""
    collecting = gc.isenabled()
    gc.disable()  # collecting among thousands of new objects takes longer than copying
    try:
        return _Copier().copy(controller)  # type: ignore[no-any-return]
    finally:
        if collecting:
            gc.enable()


class _Copier:
    def __init__(self) -> None:
        self._done: dict[int, Any] = {}
        self._shared: set[type] = set(_VALUES)
        self._by_type: dict[type, Callable[[Any], Any]] = {
            dict: self._dict, OrderedDict: self._dict, Counter: self._counter, defaultdict: self._defaultdict,
            list: self._list, set: self._set, deque: self._deque, tuple: self._tuple, np.ndarray: self._array,
            MethodType: self._method, Gang: self._gang, Profile: self._profile, Engine: self._engine,
            Gate: self._gate, Preemptions: self._preemptions,
        }  # fmt: skip

    def copy(self, it: Any) -> Any:
        kind = type(it)
        if kind in self._shared:
            return it
        done = self._done.get(id(it))
        if done is not None:
            return done
        how = self._by_type.get(kind)
        if how is None:
            how = self._learn(kind)
        return it if how is None else how(it)

    def _learn(self, kind: type) -> Callable[[Any], Any] | None:
        """How to copy objects of a new type; None to share them."""
        how: Callable[[Any], Any] | None = self._object
        if issubclass(kind, msgspec.Struct):
            how = None if kind.__struct_config__.frozen else self._struct
        elif issubclass(kind, tuple):
            how = self._tuple
        elif issubclass(kind, np.generic | np.dtype):
            how = None
        if how is None:
            self._shared.add(kind)
        else:
            self._by_type[kind] = how
        return how

    def _dict(self, it: dict[Any, Any]) -> dict[Any, Any]:
        out = self._done[id(it)] = type(it)()
        shared, one = self._shared, self.copy
        for key, value in it.items():
            out[key if type(key) in shared else one(key)] = value if type(value) in shared else one(value)
        return out

    def _counter(self, it: Counter[Any]) -> Counter[Any]:
        out = self._done[id(it)] = Counter({self.copy(key): number for key, number in it.items()})
        return out

    def _defaultdict(self, it: defaultdict[Any, Any]) -> defaultdict[Any, Any]:
        out = self._done[id(it)] = defaultdict(it.default_factory)
        for key, value in it.items():
            out[self.copy(key)] = self.copy(value)
        return out

    def _list(self, it: list[Any]) -> list[Any]:
        out: list[Any] = []
        self._done[id(it)] = out
        shared, one = self._shared, self.copy
        out += [each if type(each) in shared else one(each) for each in it]
        return out

    def _set(self, it: set[Any]) -> set[Any]:
        out = self._done[id(it)] = {self.copy(each) for each in it}
        return out

    def _deque(self, it: deque[Any]) -> deque[Any]:
        out = self._done[id(it)] = deque((self.copy(each) for each in it), it.maxlen)
        return out

    def _tuple(self, it: tuple[Any, ...]) -> tuple[Any, ...]:
        """The tuple itself, if nothing in it is mutable."""
        shared, one = self._shared, self.copy
        out = [each if type(each) in shared else one(each) for each in it]
        if all(new is old for new, old in zip(out, it, strict=True)):
            return it
        return type(it)(*out) if hasattr(it, "_fields") else tuple(out)

    def _array(self, it: Any) -> Any:
        out = self._done[id(it)] = it.copy()
        return out

    def _method(self, it: MethodType) -> MethodType:
        return MethodType(it.__func__, self.copy(it.__self__))

    def _struct(self, it: msgspec.Struct) -> msgspec.Struct:
        out = self._done[id(it)] = copy.copy(it)
        for field in it.__struct_fields__:
            value = getattr(it, field)
            if type(value) not in self._shared:
                setattr(out, field, self.copy(value))
        return out

    def _object(self, it: Any) -> Any:
        kind = type(it)
        out = self._done[id(it)] = object.__new__(kind)
        names = [name for base in kind.__mro__ for name in _slots(base)]
        for name in (*names, *getattr(it, "__dict__", ())):
            if hasattr(it, name):
                object.__setattr__(out, name, self.copy(getattr(it, name)))
        return out

    def _gang(self, it: Gang) -> Gang:
        # A short cut for the most frequent object: all of its fields are values.
        out: Gang = copy.copy(it)
        self._done[id(it)] = out
        if it.layout_plugins:
            out.layout_plugins = tuple(self._done.get(id(plugin), plugin) for plugin in it.layout_plugins)
        return out

    def _profile(self, it: Profile) -> Profile:
        for plugin in (it.queue, *it.node_plugins, *it.gang_plugins, *it.post_filters, *it.binds, *it.gpu_choosers):
            if id(plugin) not in self._done:
                self._done[id(plugin)] = copy.deepcopy(plugin) if hasattr(plugin, "reserve") else plugin

        def mine(plugins: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(self._done.get(id(plugin), plugin) for plugin in plugins)

        out = self._done[id(it)] = structs.replace(
            it,
            filters=mine(it.filters),
            scores=tuple(structs.replace(one, plugin=self._done[id(one.plugin)]) for one in it.scores),
            pre_filters=mine(it.pre_filters),
            layouts=mine(it.layouts),
            post_filters=mine(it.post_filters),
            reserves=mine(it.reserves),
            permits=mine(it.permits),
            binds=mine(it.binds),
            gpu_choosers=mine(it.gpu_choosers),
            shapes=self.copy(it.shapes),
            specs={},
            same={},
        )
        return out

    def _engine(self, it: Engine) -> Engine:
        profiles = {name: self.copy(profile) for name, profile in it.profiles.items()}
        out = self._done[id(it)] = Engine(self.copy(it.table), profiles)
        return out

    def _gate(self, it: Gate) -> Gate:
        out = self._done[id(it)] = Gate(self.copy(it._engine), it._policy, self.copy(it.unreached))
        out.routing = self.copy(it.routing)
        return out

    def _preemptions(self, it: Preemptions) -> Preemptions:
        out = self._done[id(it)] = Preemptions(self.copy(it._engine), self.copy(it._victim_index))
        return out


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return tuple(
        name for name in ((slots,) if isinstance(slots, str) else slots) if name not in ("__dict__", "__weakref__")
    )
