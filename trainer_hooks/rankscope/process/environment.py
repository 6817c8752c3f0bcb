"""What the environment says, where a variable may hold anything.

What is taken from it is a number, or can be printed and is no longer than others read. What makes no sense is told in
one warning that names the variable.
"""

from __future__ import annotations

import os
import re

from rankscope.guard import logger

NUMBER = re.compile(r"[0-9]{1,10}")  # as the exporter reads them
SHOWN = 40  # characters of a value that makes no sense

_warned: set[str] = set()


def number(*variables: str, default: str) -> str:
    """The first that is one; the others are passed over, and those that are set warned about."""
    for variable in variables:
        value = os.environ.get(variable, "").strip()
        if NUMBER.fullmatch(value):
            return value
        if value:
            _warn(variable, f"is no number and is not used: {printable(value, SHOWN)!r}")
    return default


def text(variable: str, limit: int) -> str:
    """At most `limit` characters, all printable; empty if it is not set or blank."""
    value = os.environ.get(variable, "").strip()
    fit = printable(value, limit).strip()
    if fit != value:
        _warn(variable, f"is cut to {limit} characters that can be printed: {printable(value, SHOWN)!r}")
    return fit


def printable(value: str, limit: int) -> str:
    """The beginning of a text, with `?` for what would spoil a line, a label or a terminal."""
    return "".join(character if character.isprintable() else "?" for character in value[:limit])


def _warn(variable: str, what: str) -> None:
    if variable not in _warned:
        _warned.add(variable)
        logger.warning("rankscope: %s %s", variable, what)
