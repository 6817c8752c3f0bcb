"""Run the demo. `make demo` keeps all servers running afterwards, for exploring.

`make demo ONCE=1` exits by itself, with 0 only if both faults were notified in time and nothing else was.
"""

from __future__ import annotations

import argparse
import signal
import sys

from testing.servers import directories

from examples.demo.story import Demo, say


def main() -> int:
    """Run the demo. Return 0 if everything was notified as expected."""
    parser = argparse.ArgumentParser(
        prog="make demo", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--once", action="store_true", help="exit at the end of the demo")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the servers, too
    with directories("demo") as (directory, run_dir), Demo(directory, run_dir) as demo:
        demo.run()
        problems = demo.verdict()
        for name, delay in demo.delays.items():
            say(f"{name}: " + ("not notified" if delay is None else f"notified {delay:.1f} s after the onset"))
        for problem in problems:
            say(f"WRONG: {problem}")
        if not options.once:
            say("all servers keep running; press Ctrl-C to stop them")
            signal.pause()
    return 1 if problems else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
    except (RuntimeError, FileNotFoundError) as error:
        sys.exit(f"demo: {error}")
