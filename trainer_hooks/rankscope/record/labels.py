"""The names and values that are allowed for a user's own labels of a rank."""

from __future__ import annotations

import re
from typing import TypeGuard

MOST_LABELS = 10
VALUE_LIMIT = 128  # characters; all labels then take at most a fifth of the info's 8 KiB
NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,39}")  # as in Prometheus, which reserves `__`
OWN_NAMES = frozenset(
    (
        *("run", "rank", "owner", "user", "node", "pid", "local_rank", "world_size", "group", "backend"),
        *("torch_version", "rankscope_version", "gpu", "uuid", "phase", "op", "cause"),
        *("job", "instance", "cluster", "pod_namespace"),
    )
)
"""Reserved names: labels of Rankscope, and those that Prometheus sets for a target."""


def label_error(name: str, value: str) -> str:
    """Return why a rank cannot have this label; empty if it can."""
    if name in OWN_NAMES:
        return f"{name} is a reserved label"
    if not NAME.fullmatch(name):
        return "the name is not valid in Prometheus, or has more than 40 characters"
    if not (value and value.isprintable() and len(value) <= VALUE_LIMIT):
        return f"the value is not printable text of 1 to {VALUE_LIMIT} characters"
    return ""


def are_labels(value: object) -> TypeGuard[dict[str, str]]:
    """Return whether a rank can have these labels."""
    return (
        isinstance(value, dict)
        and len(value) <= MOST_LABELS
        and all(isinstance(text, str) and not label_error(name, text) for name, text in value.items())
    )
