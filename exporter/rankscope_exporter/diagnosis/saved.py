"""Saved state as JSON values: a record is the list of its fields, and a time is its age.

The next process may have another clock, so `restored` returns times of that clock.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, get_args, get_origin, get_type_hints

Time = Annotated[float, "seconds of the caller's clock"]
"""The type of the fields that are times."""
UNREADABLE = (KeyError, TypeError, ValueError, OverflowError)
"""The exceptions that restoring a damaged state raises."""


def saved(kind: Any, value: Any, at: float) -> Any:
    """Return a value of that type as JSON values, at that time."""
    return _converted(kind, value, at, list)


def restored(kind: Any, value: Any, at: float) -> Any:
    """Return a value of that type from what `saved` returned. Raise one of UNREADABLE if it is damaged."""
    return _converted(kind, value, at, tuple)


def finite(value: Any) -> float:
    """Return a saved number. Raise TypeError or ValueError if it is damaged."""
    if not math.isfinite(number := float(value)):
        raise ValueError(f"{value!r} is not a finite number")
    return number


def rounded(number: float) -> float:
    """Return a number with six digits, which takes less space."""
    return float(f"{number:.6g}")


def _converted(kind: Any, value: Any, at: float, sequence: type[list[Any] | tuple[Any, ...]]) -> Any:
    """Return a value as JSON values if sequences become lists, and the opposite if they become tuples."""
    if kind is float:
        return finite(value)
    if kind == Time:
        return at - finite(value)
    inner = get_args(kind)
    if NoneType in inner:
        return None if value is None else _converted(inner[0], value, at, sequence)
    if get_origin(kind) in (dict, Mapping):
        return {str(name): _converted(inner[1], one, at, sequence) for name, one in dict(value).items()}
    if get_origin(kind) is tuple:
        return sequence(_converted(inner[0], one, at, sequence) for one in value)
    if not (record := _record(kind)):
        return kind(value)
    values = [getattr(value, name) for name in record] if isinstance(value, kind) else value
    converted = [_converted(of, one, at, sequence) for of, one in zip(record.values(), values, strict=True)]
    return converted if sequence is list else kind(*converted)


@cache
def _record(kind: Any) -> Mapping[str, Any]:
    """Return the types of a record's fields by name; empty if it is none."""
    names = [one.name for one in fields(kind)] if is_dataclass(kind) else getattr(kind, "_fields", ())
    types = get_type_hints(kind, include_extras=True) if names else {}
    return {name: types[name] for name in names}
