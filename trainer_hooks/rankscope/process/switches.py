"""Environment variables that are on or off. Imported with torch by every process: nothing but `os` is imported here."""

from __future__ import annotations

import os

ON = frozenset({"1", "true", "yes", "on"})


def is_on(variable: str) -> bool:
    """Whether the environment says so; anything else than ON's words does not."""
    return os.environ.get(variable, "").lower() in ON
