"""What the environment says, where a variable may hold anything.

What is taken from it is a number, or can be printed and is no longer than others read. What makes no sense is told in
one warning that names the variable.
"""

from __future__ import annotations

import os

from rankscope.guard import logger
from rankscope.record.text import NUMBER, replace_unprintable

SHOWN = 40  # characters of a value that makes no sense

_warned: set[str] = set()


def number(*variables: str, default: str) -> str:
    """The first that is one; the others are passed over, and those that are set warned about."""
    for variable in variables:
        value = os.environ.get(variable, "").strip()
        if NUMBER.fullmatch(value):
            return value
        if value:
            _warn(variable, f"is no number and is not used: {replace_unprintable(value, SHOWN)!r}")
    return default


def text(variable: str, limit: int) -> str:
    """At most `limit` characters, all printable; empty if it is not set or blank."""
    value = os.environ.get(variable, "").strip()
    fit = replace_unprintable(value, limit).strip()
    if fit != value:
        _warn(variable, f"is cut to {limit} characters that can be printed: {replace_unprintable(value, SHOWN)!r}")
    return fit


def _warn(variable: str, what: str) -> None:
    if variable not in _warned:
        _warned.add(variable)
        logger.warning("rankscope: %s %s", variable, what)
