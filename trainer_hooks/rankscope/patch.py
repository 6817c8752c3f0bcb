"""Replacing an attribute of somebody else's class or module, with the exact inverse."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

Undo = Callable[[], None]


def replace(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Undo:
    """Put `make(original)` in the place of `owner.name`; returns what puts the original back.

    The original is taken from `owner.__dict__` where it stands there: for a method of a C++ class, getattr gives
    another object, and restoring that one breaks the class.
    """
    inherited = name not in vars(owner)
    stored = getattr(owner, name) if inherited else vars(owner)[name]
    replacement = functools.wraps(getattr(owner, name))(make(getattr(owner, name)))
    setattr(owner, name, replacement)

    def undo() -> None:
        # Somebody who patched after us keeps what he put there; our replacement is still harmless inside it.
        if vars(owner).get(name) is not replacement:
            return
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, stored)

    return undo
