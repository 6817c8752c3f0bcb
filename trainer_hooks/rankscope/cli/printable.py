"""Text that others wrote, made harmless for a terminal: names of runs, threads and functions are anybody's."""

from __future__ import annotations


def printable(text: str, limit: int | None = None) -> str:
    """One line: what is not printable as in Python's source (`\\x1b`), and no more than `limit` characters of it.

    A terminal obeys escapes, a line break forges a line, and a mark for right-to-left text turns a name around.
    """
    if limit is not None and len(text) > limit:
        return f"{printable(text[:limit])}..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
