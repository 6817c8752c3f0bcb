"""Forks of a watched process: the child is detached from its parent's record before a signal can reach it.

Loader workers and helpers are forked from ranks and get SIGTERM at any time. While a child has its parent's SIGTERM
watch, the signal would be noted in the parent's record. So SIGTERM is blocked until the child has undone the watches.
Meanwhile, a SIGTERM to the parent may reach a thread without Python code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from threading import get_ident

_on_child: Callable[[], None] | None = None
_on_fork: Callable[[bool], None]
_masks: dict[int, set[int]] = {}  # by thread; real-time signals are plain numbers


def watch(on_fork: Callable[[bool], None], on_child: Callable[[], None]) -> None:
    """Call `on_fork` with true before and with false after each fork of this process, and `on_child` in each child.

    Registered once per process; cannot be undone.
    """
    global _on_fork, _on_child
    if _on_child is None:
        os.register_at_fork(before=_hold_sigterm, after_in_parent=_end_fork, after_in_child=_begin_child)
    _on_fork, _on_child = on_fork, on_child


def _hold_sigterm() -> None:
    _on_fork(True)
    _masks[get_ident()] = set(signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM}))


def _end_fork() -> None:
    try:
        _on_fork(False)
    finally:
        _release_sigterm()


def _release_sigterm() -> None:
    mask = _masks.pop(get_ident(), None)
    if mask is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _begin_child() -> None:
    assert _on_child is not None
    try:
        _on_child()
    finally:
        _release_sigterm()
