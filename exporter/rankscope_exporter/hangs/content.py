"""Values of a dump with checked types and bounded sizes: any user may write next to a job's dumps."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

VISITS_LIMIT = 8_000_000
"""Values and characters of a dump that are read. torch writes about 150 for an operation of the run."""
TEXT_LIMIT = 1024
LARGEST = 2**63
WHOLE_NUMBER = re.compile(r"-?[0-9]{1,19}")


class Content:
    """Returns a dump's values as the expected types, or raises ValueError, which names the value.

    It counts each visit: a dump of some bytes can have a value a billion times.
    """

    def __init__(self) -> None:
        self._left = VISITS_LIMIT

    def mapping(self, value: object, name: str) -> Mapping[Any, Any]:
        """Return a dictionary, whose keys and values are of any type."""
        if not isinstance(value, dict):
            raise ValueError(f"{name} is no dictionary")
        self._count(len(value))
        return value

    def sequence(self, value: object, name: str) -> Sequence[Any]:
        """Return a list or tuple of values of any type."""
        if not isinstance(value, (list, tuple)):
            raise ValueError(f"{name} is no list")
        self._count(len(value))
        return value

    def text(self, value: object, name: str, limit: int = TEXT_LIMIT) -> str:
        """Return a string of at most `limit` characters."""
        if not isinstance(value, str) or len(value) > limit:
            raise ValueError(f"{name} is no string of at most {limit} characters")
        self._count(len(value))
        return value

    def number(self, value: object, name: str) -> int:
        """Return a whole number. JSON has the numbers of a status as strings."""
        self._count(0)
        if isinstance(value, str) and WHOLE_NUMBER.fullmatch(value):
            value = int(value)
        if not isinstance(value, int) or abs(value) > LARGEST:
            raise ValueError(f"{name} is no whole number")
        return value

    def _count(self, inner: int) -> None:
        self._left -= inner + 1
        if self._left < 0:
            raise ValueError(f"more than {VISITS_LIMIT} values")
