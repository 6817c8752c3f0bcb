"""The common type of a capture's sources: a source returns text, or raises `UnavailableError` with the reason."""

from __future__ import annotations


class UnavailableError(Exception):
    """A source has nothing to add to a capture. The message names the reason, in one line without a full stop."""
