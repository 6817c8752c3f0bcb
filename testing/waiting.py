"""Wait for an effect of another thread or process."""

from __future__ import annotations

import time
from collections.abc import Callable


def eventually(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.01) -> None:
    """Wait until `condition` holds. Fails after `seconds`: a busy machine needs many."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        time.sleep(pause)
