"""Text in a rank record and in the environment: what counts as a number, and what can be printed."""

from __future__ import annotations

import re

NUMBER = re.compile(r"[0-9]{1,10}")  # a rank, a process id, a world size
LABEL_LIMIT = 200  # characters; the hook's longest is a run's name with 128, Kubernetes allows 253 and generates 63
# No user, password or query, and nothing that a page, a link or a terminal reads as anything but a URL. No @ in the
# path either: it may be the end of a password that has a slash in it.
LINK = re.compile(
    r"https?://(?:[\w.-]+|\[[0-9A-Fa-f:.]+\])(?::[0-9]{1,5})?(?:/[\w.~%+,=:$&/-]*)?(?:#/[\w.~%/-]*)?", re.ASCII
)


def is_label(text: str) -> bool:
    """Whether the text may be a label's value: printable, and at most LABEL_LIMIT characters."""
    return len(text) <= LABEL_LIMIT and text.isprintable()


def is_name(text: str) -> bool:
    """Whether the text may name a phase: a label's value that is not blank."""
    return is_label(text) and bool(text.strip())


def is_link(text: str) -> bool:
    """Whether the text is an http or https URL that may be shown as a link."""
    return len(text) <= LABEL_LIMIT and LINK.fullmatch(text) is not None


def without_credentials(text: str) -> str:
    """Return a URL without its user, password, query and fragment; any other text as it is."""
    scheme, separator, rest = text.partition("://")
    if not separator:
        return text
    host, slash, path = re.split(r"[?#]", rest, maxsplit=1)[0].partition("/")
    return f"{scheme}://{host.rpartition('@')[2]}{slash}{path}"


def replace_unprintable(text: str, limit: int | None = None) -> str:
    """Return the first `limit` characters, with `?` for each that would break a line, a label or a terminal."""
    return "".join(character if character.isprintable() else "?" for character in text[:limit])
