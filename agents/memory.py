"""What a guard and its policy remember, as JSON and back, so that a replay can begin in the middle.

It walks the attributes of the objects of this package and writes down what can change; what a
fresh object has anyway (plan, settings, networks) is left out. Reading sets attributes of a fresh
guard and makes no object that is named in the file: a log runs no code.
"""

from __future__ import annotations

import enum
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from operator import attrgetter
from typing import Any, Final

import numpy as np
from pydantic import BaseModel

from trimtab.agents.bundle import Bundle
from trimtab.agents.guard import Guard
from trimtab.agents.guard_settings import GuardSettings
from trimtab.agents.policy import Policy
from trimtab.agents.verdict import GuardMode, GuardReason, Verdict
from trimtab.engine_bridge.allocation import Allocation
from trimtab.engine_bridge.telemetry import Telemetry, TierTelemetry
from trimtab.envs.action import ActionMap
from trimtab.envs.observation_schema import ObservationSchema

_FIXED: Final = (BaseModel, GuardSettings, Bundle, ActionMap, ObservationSchema, attrgetter)
"""What never changes once a guard is made for a plan."""
_VALUES: Final = {kind.__name__: kind for kind in (Allocation, Verdict, Telemetry, TierTelemetry)}
_NAMES: Final = {kind.__name__: kind for kind in (GuardMode, GuardReason)}
_KIND: Final = "is"


class MemoryFault(ValueError):
    """A memory is not that of this guard, policy and version."""


def remember(guard: Guard) -> dict[str, object] | None:
    """What the guard and the policy behind it remember now; None if that cannot be told.

    While a policy around the policy says that it is `busy` (it is late, and at work in another
    thread), nobody knows what it remembers.

    Raises:
        TypeError: an attribute has a type that this module does not know.
    """
    if getattr(guard.policy, "busy", False):
        return None
    return {"guard": _state(guard, "guard"), "policy": _state(innermost(guard), "policy")}


def recall(guard: Guard, memory: Mapping[str, Any]) -> None:
    """Have a guard that was just reset remember what `remember` gave.

    Args:
        guard: With the same policy, plan, settings and seed as the one that remembered.
        memory: What it gave.

    Raises:
        MemoryFault: it does not fit.
    """
    try:
        _set(guard, memory["guard"], "guard")
        _set(innermost(guard), memory["policy"], "policy")
    except (KeyError, TypeError, AttributeError, ValueError) as fault:
        raise MemoryFault(f"{type(fault).__name__}: {fault}") from fault


def innermost(guard: Guard) -> Policy:
    """The policy that decides, without what was put around it."""
    policy = guard.policy
    while isinstance(inner := getattr(policy, "policy", None), Policy):
        policy = inner
    return policy


def _state(owner: object, where: str) -> dict[str, object]:
    return {
        name: _written(value, f"{where}.{name}")
        for name, value in sorted(vars(owner).items())
        if not isinstance(value, (*_FIXED, Policy)) and not callable(value)
    }


def _set(owner: object, state: Mapping[str, Any], where: str) -> None:
    own = vars(owner)
    for name, written in state.items():
        if name not in own:
            raise MemoryFault(f"{where} has no {name}")
        setattr(owner, name, _read(written, own[name], f"{where}.{name}"))


def _written(value: Any, where: str) -> object:
    """A value as JSON; what JSON does not know is an object with `_KIND`."""
    if isinstance(value, enum.Enum):
        return {_KIND: type(value).__name__, "name": value.name}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_KIND: "float", "text": repr(float(value))}
    if isinstance(value, np.bool_ | np.integer | np.float16 | np.float32):
        # Its type decides how a policy goes on to compute with it.
        return {_KIND: "scalar", "type": value.dtype.str, "entry": _written(value.item(), where)}
    if isinstance(value, np.ndarray):
        entries = [_written(entry, where) for entry in value.ravel().tolist()]
        return {_KIND: "array", "type": value.dtype.str, "shape": value.shape, "entries": entries}
    if isinstance(value, list | tuple | deque):
        return {_KIND: type(value).__name__, "entries": [_written(entry, where) for entry in value]}
    if isinstance(value, dict):
        pairs = [[_written(key, where), _written(entry, where)] for key, entry in value.items()]
        return {_KIND: "dict", "entries": pairs}
    if type(value).__name__ in _VALUES and is_dataclass(value):
        named = {f.name: _written(getattr(value, f.name), where) for f in fields(value)}
        return {_KIND: type(value).__name__, "fields": named}
    if type(value).__module__.partition(".")[0] == "trimtab":
        return {_KIND: "object", "state": _state(value, where)}
    raise TypeError(f"{where}: nobody knows how to remember a {type(value).__name__}")


def _read(written: Any, fresh: Any, where: str) -> Any:
    """The value that was written; `fresh` is what a fresh guard has in its place."""
    if not isinstance(written, dict):
        return written
    kind = written[_KIND]
    if kind == "object":
        _set(fresh, written["state"], where)
        return fresh
    if kind == "float":
        return float(written["text"])
    if kind == "scalar":
        return np.dtype(written["type"]).type(_read(written["entry"], None, where))
    if kind in _NAMES:
        return _NAMES[kind][written["name"]]
    if kind in _VALUES:
        named = written["fields"].items()
        return _VALUES[kind](**{name: _read(entry, None, where) for name, entry in named})
    return _read_entries(kind, written, fresh, where)


def _read_entries(kind: str, written: Mapping[str, Any], fresh: Any, where: str) -> Any:
    entries = written["entries"]
    if kind == "dict":
        return {_read(key, None, where): _read(entry, None, where) for key, entry in entries}
    # Objects in a list are those of the fresh guard.
    old = fresh if isinstance(fresh, list) and len(fresh) == len(entries) else [None] * len(entries)
    values = [_read(entry, own, where) for entry, own in zip(entries, old, strict=True)]
    match kind:
        case "list":
            return values
        case "tuple":
            return tuple(values)
        case "deque":
            return deque(values, maxlen=fresh.maxlen)
        case "array":
            return np.array(values, written["type"]).reshape(written["shape"])
    raise MemoryFault(f"{where}: {kind} is not known")
