"""Wait until something that another thread or process does has happened."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.01) -> None:
    """Wait until `condition` holds; fail after `seconds`, of which a busy machine needs many."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"it never came true within {seconds:g} s"
        time.sleep(pause)
