"""Labels of the user's own for a rank: which names and values are allowed."""

from __future__ import annotations

import re
from typing import TypeGuard

MOST_LABELS = 10
VALUE_LIMIT = 128  # characters; all labels together then take a fifth of the info's 8 KiB
NAME = re.compile(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]{0,39}")  # of a label in Prometheus, which keeps `__` for itself
OWN_NAMES = frozenset(
    (
        *("run", "rank", "owner", "user", "node", "pid", "local_rank", "world_size", "group", "backend"),
        *("torch_version", "rankscope_version", "gpu", "uuid", "phase", "op", "cause", "job", "instance", "cluster"),
    )
)
"""What a label means is the same everywhere: these are Rankscope's, or Prometheus sets them for a target."""


def complaint(name: str, value: str) -> str:
    """Return why a rank cannot have this label; empty if it can."""
    if name in OWN_NAMES:
        return f"{name} is a label of Rankscope's own"
    if not NAME.fullmatch(name):
        return "the name is no name of a Prometheus label, or has more than 40 characters"
    if not (value and value.isprintable() and len(value) <= VALUE_LIMIT):
        return f"the value is no printable text of 1 to {VALUE_LIMIT} characters"
    return ""


def are_labels(value: object) -> TypeGuard[dict[str, str]]:
    """Whether a rank can have these labels."""
    return (
        isinstance(value, dict)
        and len(value) <= MOST_LABELS
        and all(isinstance(text, str) and not complaint(name, text) for name, text in value.items())
    )
