"""Validation of values in a scenario. Each function returns the value or raises ScenarioError with its location."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from rankscope_exporter.documents import DocumentError

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(B|KiB|MiB|GiB|TiB)")
_UNITS = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}


class ScenarioError(DocumentError):
    """An invalid scenario. The message names the file and the key."""


def mapping(location: str, value: object, keys: set[str] | None = None) -> Mapping[Any, Any]:
    """Return a mapping. If `keys` is given, other keys are errors."""
    if not isinstance(value, dict):
        raise ScenarioError(f"{location}: expected keys and values, not {value!r}")
    for key in value:
        if keys is not None and key not in keys:
            raise ScenarioError(f"{location}: unknown key {key!r}; known: {', '.join(sorted(keys))}")
    return value


def items(location: str, value: object) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise ScenarioError(f"{location}: expected a list, not {value!r}")
    return value


def text(location: str, value: object) -> str:
    """Return a non-empty string."""
    if not isinstance(value, str) or not value:
        raise ScenarioError(f"{location}: expected text, not {value!r}")
    return value


def boolean(location: str, value: object) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise ScenarioError(f"{location}: expected true or false, not {value!r}")
    return value


def whole_number(location: str, value: object) -> int:
    """Return a non-negative whole number."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ScenarioError(f"{location}: expected a whole number, not {value!r}")
    return value


def number(location: str, value: object) -> float:
    """Return a finite non-negative number."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value) or value < 0:
        raise ScenarioError(f"{location}: expected a number of at least 0, not {value!r}")
    return float(value)


def share(location: str, value: object) -> float:
    """Return a number from 0 to 1."""
    given = number(location, value)
    if given > 1:
        raise ScenarioError(f"{location}: {given:g} is not between 0 and 1")
    return given


def choices(location: str, value: object, known: Iterable[str]) -> tuple[str, ...]:
    """Return a list of known words."""
    for choice in items(location, value):
        if choice not in known:
            raise ScenarioError(f"{location}: unknown {choice!r}; known: {', '.join(known)}")
    return tuple(items(location, value))


def size(location: str, value: object) -> int:
    """Return the bytes of a number or of a text such as "20 GiB"."""
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if not match:
        raise ScenarioError(f"{location}: {value!r} is not a size, such as 20 GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])
