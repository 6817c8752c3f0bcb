"""Replacing an attribute of a foreign class or module, with the exact inverse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Replace `owner.name` with `make(original)`. Returns a function that restores the original.

    The original comes from `owner.__dict__` if it is there: for a method of a C++ class, getattr returns another
    object, and restoring that would break the class.
    """
    inherited = name not in vars(owner)
    stored = getattr(owner, name) if inherited else vars(owner)[name]
    replacement = functools.wraps(getattr(owner, name))(make(getattr(owner, name)))
    setattr(owner, name, replacement)

    def undo() -> None:
        # A later patch by other code stays; our replacement inside it does no harm.
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)

    return undo
