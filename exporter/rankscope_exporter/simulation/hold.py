"""Hold memory of a simulated GPU until SIGTERM or SIGINT.

python -m rankscope_exporter.simulation.hold --dir /dev/shm/holders --gpu 2 --memory 20GiB
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rankscope_exporter.simulation.holders import announced
from rankscope_exporter.simulation.values import ScenarioError, size


def main(arguments: Sequence[str] | None = None) -> int:
    """Announce the process, wait, and withdraw it. Returns 2 if an argument is invalid, after printing its name."""
    parser = argparse.ArgumentParser(prog="hold", description="Hold memory of a simulated GPU until SIGTERM or SIGINT.")
    parser.add_argument("--dir", type=Path, required=True, help="the scenario's processes_dir")
    parser.add_argument("--gpu", type=int, required=True, help="index of the GPU")
    parser.add_argument("--memory", required=True, help="such as 20GiB")
    options = parser.parse_args(arguments)
    # Signals are blocked before the announcement, so that an early one waits for sigwait.
    stops = {signal.SIGTERM, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, stops)
    try:
        size("--memory", options.memory)
        with announced(options.dir, options.gpu, options.memory):
            signal.sigwait(stops)
    except (ScenarioError, OSError) as error:
        sys.stderr.write(f"hold: {error}\n")
        return 2
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return 0


if __name__ == "__main__":
    sys.exit(main())
