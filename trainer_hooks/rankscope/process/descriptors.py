"""Watching the calls with which a job may close or replace the hook's file descriptors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rankscope.patch import Patches, Undo

CALLS = ("closerange", "dup2")


def watch(on_change: Callable[[], object]) -> Undo:
    """Call `on_change` after each of these calls. Returns the function that undoes that."""

    def wrap(original: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any, **kwargs: Any) -> Any:
            try:
                return original(*args, **kwargs)
            finally:
                on_change()

        return watched

    patches = Patches()
    for name in CALLS:
        patches.add_in_os(name, wrap)
    return patches.undo
