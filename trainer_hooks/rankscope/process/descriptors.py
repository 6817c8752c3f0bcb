"""The calls with which a job closes or replaces descriptors that it did not open itself: ours are among them."""

from __future__ import annotations

import os
import posix
from collections.abc import Callable
from typing import Any

from rankscope.patch import Undo, replace

CALLS = ("closerange", "dup2")


def watch(on_change: Callable[[], object]) -> list[Undo]:
    """Call `on_change` after each of these calls; return what takes that back."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                on_change()

        return watched

    undo = []
    for name in CALLS:
        # Under both names one function: multiprocessing pickles it by the second one.
        undo.append(replace(posix, name, wrap))
        undo.append(replace(os, name, lambda _, name=name: getattr(posix, name)))  # type: ignore[misc]
    return undo
