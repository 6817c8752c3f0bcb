"""Text in a rank record and in the environment: valid numbers, names and links, and printable text."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[0-9]{1,10}")  # a rank, a process id, a world size
LABEL_LIMIT = 200  # characters; a run's name has at most 128, a name in Kubernetes 253 (63 if generated)
# No user, password or query, and no character with another meaning in a page, a link or a terminal. No @ in the path:
# it may be the end of a password with a slash.
LINK = re.compile(
    r"https?://(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[\w.~%+,=:$&/-]*)?(?:#/[\w.~%/-]*)?", re.ASCII
)


def is_label(text: str) -> bool:
    """Return whether the text may be a label's value: printable, and at most LABEL_LIMIT characters."""
    return len(text) <= LABEL_LIMIT and text.isprintable()


def is_name(text: str) -> bool:
    """Return whether the text may name a phase: a label's value that is not blank."""
    return is_label(text) and bool(text.strip())


def is_link(text: str) -> bool:
    """Return whether the text is an http or https URL that may be shown as a link."""
    return len(text) <= LABEL_LIMIT and LINK.fullmatch(text) is not None


def without_credentials(text: str) -> str:
    """Return a URL without its user, password, query and fragment; other text unchanged."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def replace_unprintable(text: str, limit: int | None = None) -> str:
    """Return the first `limit` characters, with `?` for each unprintable one."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])
