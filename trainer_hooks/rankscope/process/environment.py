"""What the environment says, where a variable may hold anything.

What is taken from it is a number, or can be printed and is no longer than others read. What makes no sense is told in
one warning that names the variable.
"""

from __future__ import annotations

import os

from rankscope.guard import logger
from rankscope.record.labels import MOST_LABELS, complaint
from rankscope.record.text import NUMBER, replace_unprintable

SHOWN = 40  # characters of a value that makes no sense
NAMED = 3  # labels that are not used

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


def labels(variable: str) -> dict[str, str]:
    """Return the labels of a list such as `team=nlp,project=llama`. Warn once about those that cannot be used."""
    found: dict[str, str] = {}
    unused = []
    for entry in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if separator and not value:
            continue  # a variable that expands to nothing
        if reason := _complaint(name, value, found) if separator else "no NAME=VALUE":
            unused.append(f"{replace_unprintable(entry, SHOWN)!r} ({reason})")
        else:
            found[name] = value
    if unused:
        more = f" and {len(unused) - NAMED} more" if len(unused) > NAMED else ""
        _warn(variable, f"has labels that are not used: {', '.join(unused[:NAMED])}{more}")
    return found


def _complaint(name: str, value: str, before: dict[str, str]) -> str:
    if name in before:
        return f"{name} is named twice"
    return complaint(name, value) or (f"a rank has at most {MOST_LABELS}" if len(before) == MOST_LABELS else "")


def _warn(variable: str, what: str) -> None:
    if variable not in _warned:
        _warned.add(variable)
        logger.warning("rankscope: %s %s", variable, what)
