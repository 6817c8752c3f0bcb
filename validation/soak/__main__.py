"""Inject faults into two real jobs at production speed while the monitoring servers are disturbed (`make soak`).

    python -m validation.soak --minutes 120 --seed 526
    python -m validation.soak --table                      print the ledger; run nothing

The ledger has a line of JSON for each observation, written at once.
"""

from __future__ import annotations

import shutil
import signal
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

from testing import report
from testing.report import Ledger
from validation.soak import plan
from validation.soak.report import ABOUT, body, by_kind, judge
from validation.soak.soak import Soak


def main() -> int:
    """Run the soak and publish; return 1 if a check fails."""
    parser = report.parser(__doc__, prog="make soak")
    parser.add_argument("--minutes", type=float, default=120)
    # With this seed, two hours disturb each target while an alert fires.
    parser.add_argument("--seed", type=int, default=526)
    parser.add_argument("--table", action="store_true", help="print the ledger, run nothing")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the servers and jobs, too
    ledger = (options.save or report.Directories()).ledger("soak")
    if not options.table:
        ledger.clear()
        _run(ledger, options.minutes * 60, options.seed)
    observed = by_kind(ledger.lines)
    faults, found = judge(observed)
    figures = [asdict(check) for check in found]
    title = "Soak and chaos at production speed"
    page = report.Report("soak", title, ABOUT, "every check holds", body(observed, faults, found), figures)
    page.publish(None if options.table else options.save)
    return 0 if all(check.holds for check in found) else 1


def _run(ledger: Ledger, seconds: float, seed: int) -> None:
    faults = [slot for run in plan.RUNS for slot in plan.faults(seed, run, seconds)]
    chaos = list(plan.chaos(seed, seconds))
    ledger.observe("plan", seed=seed, seconds=seconds)
    planned: list[plan.Slot | plan.Disturbance] = [*faults, *chaos]
    lines = [(item.at, str(item)) for item in planned]
    print("\n".join(text for _, text in sorted(lines)), flush=True)
    directory = Path(tempfile.mkdtemp(prefix="rankscope-soak-"))  # has Prometheus' database; kept on failure
    with (
        tempfile.TemporaryDirectory(prefix="rankscope-soak-", dir="/dev/shm") as memory,
        Soak(directory, Path(memory), ledger) as soak,
    ):
        print(f"{time.strftime('%H:%M:%S')}  both jobs train; logs in {directory}", flush=True)
        soak.run(faults, chaos, seconds)
    shutil.rmtree(directory)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
