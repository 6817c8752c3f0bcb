"""Escaping untrusted text for a terminal: any user can name a run, a thread or a function."""

from __future__ import annotations


def printable(text: str, limit: int | None = None) -> str:
    """Return the text on one line, at most `limit` characters, with unprintable ones escaped as in Python (`\\x1b`).

    Otherwise an escape sequence controls the terminal, a line break forges a line, and a bidi mark reverses a name.
    """
    if limit is not None and len(text) > limit:
        return f"{printable(text[:limit])}..."
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)
