"""Text in a rank record and in the environment: what counts as a number, and what can be printed."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[0-9]{1,10}")  # a rank, a process id, a world size
LABEL_LIMIT = 200  # characters; the hook's longest is a run's name with 128, Kubernetes allows 253 and generates 63


def is_label(text: str) -> bool:
    """Whether the text may be a label's value: printable, and at most LABEL_LIMIT characters."""
    return len(text) <= LABEL_LIMIT and text.isprintable()


def is_name(text: str) -> bool:
    """Whether the text may name a phase: a label's value that is not blank."""
    return is_label(text) and bool(text.strip())


def replace_unprintable(text: str, limit: int | None = None) -> str:
    """Return the first `limit` characters, with `?` for each that would break a line, a label or a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])
