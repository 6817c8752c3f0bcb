"""Runs every part, each within its time and none in the way of another; writes the report after each.

Imports nothing but the standard library until what the exporter needs is on the path (wheels.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
REPORT = ROOT / "docs" / "measurements" / "gpu_check.json"


def main(arguments: list[str] | None = None) -> int:
    """The exit status: 0 once there is a report, whatever it says; 2 and one line where there can be none."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__)
    parser.add_argument("--json", type=Path, default=REPORT, help="the report; Markdown goes beside it")
    parser.add_argument("--limit", type=float, default=570, help="seconds for all of it")
    parser.add_argument("--scale", type=float, default=1.0, help="of the load's and the pauses' length")
    parser.add_argument("--load", default="", help="options of load.py, such as --device=cpu")
    parser.add_argument("--only", default="", help="parts whose names have this, such as hook")
    options = parser.parse_args(arguments)
    if shutil.which("nvidia-smi") is None:
        return _complain("no NVIDIA GPU here: there is no nvidia-smi on the PATH")
    sys.path[:0] = [str(ROOT), str(ROOT / "exporter"), str(ROOT / "trainer_hooks")]
    from validation.gpu_check.wheels import WheelsError, provide

    try:
        brought = provide(ROOT / ".gpu-wheels")
    except WheelsError as error:
        return _complain(str(error))
    if brought:
        sys.path.insert(0, str(brought))
    from validation.gpu_check.run import NoGpuError, run

    try:
        run(options.json, options.limit, options.scale, options.load.split(), options.only)
    except NoGpuError as error:
        return _complain(f"no NVIDIA GPU here: {error}")
    return 0


def _complain(text: str) -> int:
    sys.stderr.write(f"gpu-check: {text}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
