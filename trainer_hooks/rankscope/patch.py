"""Replacing an attribute of a foreign class or module, with the exact inverse."""

from __future__ import annotations

import functools
import os
import posix
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]
_INHERITED = object()
"""What an owner has that inherits the attribute."""
_COVERED: dict[int, tuple[Any, Any]] = {}
"""Undone replacements below a later patch, by their `id`, with what was there before."""


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> Undo:
    """Replace `owner.name` with `make(original)`. Returns a function that restores the original.

    The original comes from `owner.__dict__` if it is there: for a method of a C++ class, getattr returns another
    object, and restoring that would break the class.
    """
    below: Any = vars(owner).get(name, _INHERITED)
    replacement = functools.wraps(getattr(owner, name))(make(getattr(owner, name)))
    setattr(owner, name, replacement)

    def undo() -> None:
        if vars(owner).get(name) is not replacement:
            # A later patch stays. If it is one of ours, its undo restores what was there before this one.
            _COVERED[id(replacement)] = replacement, below
            return
        restored = below
        while id(restored) in _COVERED:
            _, restored = _COVERED.pop(id(restored))
        if restored is _INHERITED:
            delattr(owner, name)
        else:
            setattr(owner, name, restored)

    return undo


class Patches:
    """Replacements that are undone together, the last one first."""

    def __init__(self) -> None:
        self._undo: dict[tuple[int, str], Undo] = {}

    def __bool__(self) -> bool:
        return bool(self._undo)

    def add(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace `owner.name`, unless these patches have replaced it already."""
        place = id(owner), name
        if place not in self._undo:
            self._undo[place] = replace(owner, name, make)

    def add_in_os(self, name: str, make: Callable[[Callable[..., Any]], Any]) -> None:
        """Replace a function of `os` under both of its names: multiprocessing pickles it by that of `posix`."""
        self.add(posix, name, make)
        self.add(os, name, lambda _: getattr(posix, name))

    def undo(self) -> None:
        """Restore everything."""
        while self._undo:
            self._undo.popitem()[1]()
