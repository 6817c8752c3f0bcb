"""Faults in two real jobs at production speed, while what watches them is killed, stopped, and deceived. `make soak`

    python -m validation.soak --minutes 120 --seed 1 --json docs/measurements/soak.json
    python -m validation.soak --report docs/measurements/soak.jsonl --json docs/measurements/soak.json     runs nothing

What is seen is written as it comes, a line of JSON each, beside the report's .json as .jsonl.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from validation.soak import plan
from validation.soak.observations import Observations, read
from validation.soak.report import page, summary
from validation.soak.soak import Soak


def main() -> int:
    """All of it; 1 if anything is not as it should be, 2 if it did not run."""
    parser = argparse.ArgumentParser(
        prog="make soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=120)
    # In two hours of this one everything is disturbed while an alert fires.
    parser.add_argument("--seed", type=int, default=526)
    parser.add_argument("--json", type=Path, default=Path("soak.json"), help="the figures; the page goes beside it")
    parser.add_argument("--report", type=Path, metavar="FILE", help="of these observations, without a run")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that everything is stopped then too
    observed: Path = options.report or options.json.with_suffix(".jsonl")
    if not options.report:
        observed.unlink(missing_ok=True)
        _run(Observations(observed), options.minutes * 60, options.seed)
    figures = summary(read(observed))
    options.json.write_text(json.dumps(figures, indent=2) + "\n")
    options.json.with_suffix(".md").write_text(page(figures))
    for check in figures["checks"]:
        print(f"{'holds' if check['holds'] else 'FAILS'}  {check['check']}: {check['found']}")
    return 0 if all(check["holds"] for check in figures["checks"]) else 1


def _run(observations: Observations, seconds: float, seed: int) -> None:
    faults = [slot for run in plan.RUNS for slot in plan.faults(seed, run, seconds)]
    chaos = list(plan.chaos(seed, seconds))
    command = shlex.join(["python", "-m", "validation.soak", *sys.argv[1:]])
    observations.add("plan", command=command, seed=seed, seconds=seconds)
    planned: list[plan.Slot | plan.Disturbance] = [*faults, *chaos]
    lines = [(what.at, str(what)) for what in planned]
    print("\n".join(text for _, text in sorted(lines)), flush=True)
    directory = Path(tempfile.mkdtemp(prefix="rankscope-soak-"))  # with Prometheus' database: stays if anything fails
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-soak-", dir="/dev/shm") as memory,
        Soak(directory, Path(memory), observations) as soak,
    ):
        print(f"{time.strftime('%H:%M:%S')}  all runs; logs in {directory}", flush=True)
        soak.run(faults, chaos, seconds)
    shutil.rmtree(directory)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
