"""The common type of a capture's sources: a source returns text, or raises `UnavailableError` with the reason."""

from __future__ import annotations

PERMISSION = "run it as the job's user, or with CAP_SYS_PTRACE and CAP_DAC_READ_SEARCH"
"""How the exporter may see the descriptors, the environment and the directories of another user's process."""


class UnavailableError(Exception):
    """A source has nothing to add to a capture. The message names the reason, in one line without a full stop."""


def cut(text: str, size: int) -> str:
    """Return a text of at most `size` bytes in UTF-8. A longer one ends with a line that says that it is cut off."""
    data = text.encode(errors="replace")
    if len(data) <= size:
        return text
    note = f"\n(cut off after {size} bytes)\n"
    return data[: size - len(note)].decode(errors="ignore") + note
