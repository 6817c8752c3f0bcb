"""Environment variables that are on or off. Every process that imports torch imports this, so it imports only `os`."""

from __future__ import annotations

import os

ON = frozenset({"1", "true", "yes", "on"})


def is_on(variable: str) -> bool:
    """Return whether the variable is one of the words in ON."""
    return os.environ.get(variable, "").lower() in ON
