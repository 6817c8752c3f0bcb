"""The exporter with a wrong wall clock: `time.time` is off by the seconds that a file says.

    python -m validation.soak.exporter CLOCK_FILE [FLAG …]

Monotonic clocks are not changed, as on a real machine whose clock is set.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def skewed(true: Callable[[], float], file: Path) -> Callable[[], float]:
    """Return a clock that is ahead of the true one by the seconds that `file` says at each call."""
    return lambda: true() + float(file.read_text())


if __name__ == "__main__":
    time.time = skewed(time.time, Path(sys.argv[1]))
    from rankscope_exporter.__main__ import main  # must not read the time before

    main(sys.argv[2:])
