"""Watching the calls with which a job may close or replace the hook's file descriptors."""

from __future__ import annotations

import os
import posix
from collections.abc import Callable
from typing import Any

from rankscope.patch import Undo, replace

CALLS = ("closerange", "dup2")


def watch(on_change: Callable[[], object]) -> list[Undo]:
    """Call `on_change` after each of these calls. Returns the functions that undo that."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                on_change()

        return watched

    undo = []
    for name in CALLS:
        # The same function under both names: multiprocessing pickles it by the second.
        undo.append(replace(posix, name, wrap))
        undo.append(replace(os, name, lambda _, name=name: getattr(posix, name)))  # type: ignore[misc]
    return undo
