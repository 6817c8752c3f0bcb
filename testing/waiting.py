"""Wait for another thread or process, or for its effect."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any


def eventually(condition: Callable[[], object], seconds: float = 60.0, pause: float = 0.01) -> None:
    """Wait until `condition` holds. Fails after `seconds`: a busy machine needs many."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not hold within {seconds:g} s"
        time.sleep(pause)


def in_a_thread(function: Callable[..., object], *arguments: Any) -> None:
    """Call the function in another thread, and wait until it returns."""
    thread = threading.Thread(target=function, args=arguments)
    thread.start()
    thread.join()
