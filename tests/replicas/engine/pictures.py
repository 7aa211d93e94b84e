"""An object's whole content as plain comparable values, for tests of equal states."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from enum import Enum
from types import FunctionType

import msgspec
import numpy as np

_PLAIN = (type(None), bool, int, float, str, bytes, Enum)


def picture(value: object) -> object:
    """Nested tuples of all attributes and items, in their order.

    Objects go by their class, functions by name.
    """
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, FunctionType):
        return value.__qualname__
    if isinstance(value, np.ndarray):
        return (value.shape, value.tolist())
    if isinstance(value, Mapping):
        return tuple((picture(k), picture(v)) for k, v in value.items())
    if isinstance(value, list | tuple | deque):
        return tuple(picture(item) for item in value)
    if isinstance(value, set | frozenset):
        return tuple(sorted(repr(picture(item)) for item in value))
    if isinstance(value, msgspec.Struct):
        return (type(value).__name__, picture(msgspec.structs.asdict(value)))
    names = [*getattr(value, "__dict__", {}), *_slots(type(value))]
    assert names, f"nothing to see of {value!r}"
    return (
        type(value).__name__,
        tuple((n, picture(getattr(value, n))) for n in names if hasattr(value, n)),
    )


def _slots(kind: type) -> list[str]:
    found = []
    for base in kind.__mro__:
        slots = base.__dict__.get("__slots__", ())
        found += [slots] if isinstance(slots, str) else list(slots)
    return [n for n in dict.fromkeys(found) if n not in ("__dict__", "__weakref__")]
