"""`make demo` shows the story and stays up for looking around.

`make demo ONCE=1` exits by itself: 0 only if both faults were notified, in time, and nothing else was.
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from examples.demo.story import Demo, say


@contextmanager
def directories() -> Iterator[tuple[Path, Path]]:
    """A directory for the servers' files, and a run directory in memory for the ranks' records."""
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-demo-") as directory,
        tempfile.TemporaryDirectory(prefix="rankscope-demo-", dir="/dev/shm") as run_dir,
    ):
        yield Path(directory), Path(run_dir)


def main() -> int:
    """Tell the story; the status is 0 if it went as promised."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="exit when the story is over")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the servers are stopped then too
    with directories() as (directory, run_dir), Demo(directory, run_dir) as demo:
        demo.run()
        problems = demo.verdict()
        for name, delay in demo.delays.items():
            say(f"{name}: " + ("not notified" if delay is None else f"notified {delay:.1f} s after the onset"))
        for problem in problems:
            say(f"WRONG: {problem}")
        if not options.once:
            say("everything stays up for looking around; Ctrl-C ends it")
            signal.pause()
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(f"demo: {error}")
