"""Text in a rank record and in the environment: what counts as a number, and what can be printed."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[0-9]{1,10}")  # a rank, a process id, a world size


def replace_unprintable(text: str, limit: int | None = None) -> str:
    """Return the first `limit` characters, with `?` for each that would break a line, a label or a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])
