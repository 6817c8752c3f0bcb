"""Reading environment variables, which may hold anything.

A value is a number, or printable text that is cut to the length that readers accept. An invalid value is logged once.
"""

from __future__ import annotations

import os

from rankscope.guard import logger
from rankscope.record.labels import MOST_LABELS, label_error
from rankscope.record.text import NUMBER, replace_unprintable

SHOWN = 40  # characters of an invalid value in a warning
NAMED = 3  # invalid labels in a warning

_warned: set[str] = set()


def number(*variables: str, default: str) -> str:
    """Return the first variable that is a number. Warn about those before it that are set to something else."""
    for variable in variables:
        value = os.environ.get(variable, "").strip()
        if NUMBER.fullmatch(value):
            return value
        if value:
            _warn(variable, f"is not a number, ignoring it: {replace_unprintable(value, SHOWN)!r}")
    return default


def text(variable: str, limit: int) -> str:
    """Return at most `limit` characters, all printable; empty if the variable is not set or blank."""
    value = os.environ.get(variable, "").strip()
    fit = replace_unprintable(value, limit).strip()
    if fit != value:
        _warn(variable, f"is cut to {limit} printable characters: {replace_unprintable(value, SHOWN)!r}")
    return fit


def labels(variable: str) -> dict[str, str]:
    """Return the labels of a list such as `team=nlp,project=llama`. Warn once about invalid ones."""
    found: dict[str, str] = {}
    invalid = []
    for entry in filter(None, map(str.strip, os.environ.get(variable, "").split(","))):
        name, separator, value = (part.strip() for part in entry.partition("="))
        if separator and not value:
            continue  # a variable that expands to nothing
        if reason := _label_error(name, value, found) if separator else "not NAME=VALUE":
            invalid.append(f"{replace_unprintable(entry, SHOWN)!r} ({reason})")
        else:
            found[name] = value
    if invalid:
        more = f" and {len(invalid) - NAMED} more" if len(invalid) > NAMED else ""
        _warn(variable, f"has invalid labels, ignoring them: {', '.join(invalid[:NAMED])}{more}")
    return found


def _label_error(name: str, value: str, before: dict[str, str]) -> str:
    if name in before:
        return f"{name} is a duplicate"
    return label_error(name, value) or (f"a rank has at most {MOST_LABELS}" if len(before) == MOST_LABELS else "")


def _warn(variable: str, problem: str) -> None:
    if variable not in _warned:
        _warned.add(variable)
        logger.warning("rankscope: %s %s", variable, problem)
