"""Keys of the terminal, one by one, without waiting for the end of a line."""

from __future__ import annotations

import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

QUIT, NEXT, PREVIOUS = "quit", "next", "previous"
SEQUENCES = {
    "q": QUIT,
    "Q": QUIT,
    "n": NEXT,
    "\x1b[B": NEXT,
    "\x1bOB": NEXT,
    "p": PREVIOUS,
    "\x1b[A": PREVIOUS,
    "\x1bOA": PREVIOUS,
}
"""What the bytes of a key mean: letters, and the arrows down and up."""
MOST_BYTES = 32


@contextmanager
def terminal_keys() -> Iterator[Callable[[float], str]]:
    """Yield a function that waits up to some seconds for a key and returns its meaning; empty without one.

    The terminal is as before at the end. Without a terminal at the standard input there are no keys.
    """
    if not sys.stdin.isatty():
        yield _no_key
        return
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    try:
        tty.setcbreak(terminal)
        yield lambda seconds: _key(terminal, seconds)
    finally:
        termios.tcsetattr(terminal, termios.TCSADRAIN, before)


def _no_key(seconds: float) -> str:
    time.sleep(seconds)
    return ""


def _key(terminal: int, seconds: float) -> str:
    if not select.select([terminal], [], [], seconds)[0]:
        return ""
    pressed = os.read(terminal, MOST_BYTES).decode(errors="replace")
    return SEQUENCES.get(pressed, "") if pressed else QUIT  # the terminal is gone
