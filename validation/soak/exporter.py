"""The exporter, on a machine whose clock is set: `time.time` is wrong by what a file says.

    python -m validation.soak.exporter CLOCK_FILE [FLAG …]

Monotonic clocks go on, as on a real machine.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path


def wrong(true: Callable[[], float], file: Path) -> Callable[[], float]:
    """A clock that is so many seconds ahead of the true one as `file` says at the moment."""
    return lambda: true() + float(file.read_text())


if __name__ == "__main__":
    time.time = wrong(time.time, Path(sys.argv[1]))
    from rankscope_exporter.__main__ import main  # which must not have asked for the time before

    main(sys.argv[2:])
