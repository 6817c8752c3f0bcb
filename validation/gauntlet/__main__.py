"""Inject faults and decoys into a real training job with simulated GPUs, and score the notifications (`make gauntlet`).

    make gauntlet                                            five seeds on each kind of device (6 hours)
    make gauntlet GAUNTLET="--seeds 1 --only f03 drift"      some cases
    make gauntlet GAUNTLET="--doses 1.4 1.15 2"              also steps 1.15 times and twice as long
    python -m validation.gauntlet --device asynchronous      cases about ranks; the host runs ahead, as with CUDA
    RANKS=2 python -m validation.gauntlet                    a job of two ranks
    python -m validation.gauntlet --nodes 2                  cases about ranks; the ranks are on several nodes
    python -m validation.gauntlet --table                    print the ledger; run nothing

A seed draws the order of the cases, the rank or GPU, and when the fault begins. The ledger has a line of JSON for each
run; an interrupted gauntlet adds the missing runs. Thresholds may be tuned with the seeds 1 to 5. Seeds from 101 on are
for published figures: use each of them once.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any

from testing import report
from testing.job.device import ASYNCHRONOUS, DEVICES, GLOO
from testing.job.launch import RANKS, JobError
from testing.report import Ledger
from testing.servers import directories
from validation.gauntlet.arena import LoneArena
from validation.gauntlet.case import LOUD
from validation.gauntlet.report import ABOUT, body
from validation.gauntlet.runner import Runner
from validation.gauntlet.schedule import Run, schedule

TITLES = {GLOO: "The gauntlet", ASYNCHRONOUS: "The gauntlet on the asynchronous device"}
SIZE = "" if RANKS == 4 else f"_{RANKS}_ranks"
NAMES = {GLOO: f"gauntlet{SIZE}", ASYNCHRONOUS: f"gauntlet_asynchronous{SIZE}"}
BOUND = "each fault notified with the right place and cause, no false alarm"


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = report.parser(__doc__, prog="make gauntlet")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--doses", type=float, nargs="+", default=[LOUD], help="factors of the step time (%(default)s)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[], help="cases whose name starts with this")
    parser.add_argument("--no-pairs", dest="pairs", action="store_false", help="without two faults at once")
    parser.add_argument("--device", choices=DEVICES, default=GLOO)
    nodes = [nodes for nodes in range(1, RANKS + 1) if RANKS % nodes == 0]
    parser.add_argument("--nodes", type=int, choices=nodes, default=1, help="nodes with an analyzer (%(default)s)")
    parser.add_argument("--table", action="store_true", help="print the ledger, run nothing")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run cases that are not in the ledger yet. Return 2 if a case is unknown or training does not work."""
    options = parse(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # stop the servers and the job, too
    ledger = (options.save or report.Directories()).ledger(_name(options))
    runs = schedule(options.seeds, options.doses, options.pairs, options.device, options.nodes)
    planned = [run for run in runs if _is_wanted(run, options.only)]
    if not planned:
        sys.stderr.write(f"gauntlet: --only: no case starts with {' or '.join(options.only)}\n")
        return 2
    try:
        if not options.table:
            _run_all([run for run in planned if not ledger.has(run.id)], ledger, options)
    except (JobError, RuntimeError, FileNotFoundError) as error:
        sys.stderr.write(f"gauntlet: {error}\n")
        return 2
    print(page(ledger, options).page())
    return 0


def _name(options: argparse.Namespace) -> str:
    return NAMES[options.device] + (f"_{options.nodes}_nodes" if options.nodes > 1 else "")


def _run_all(runs: Sequence[Run], ledger: Ledger, options: argparse.Namespace) -> None:
    with directories("gauntlet") as places, LoneArena(*places, options.device, options.nodes) as arena:
        runner = Runner(arena)
        for number, run in enumerate(runs, start=1):
            line = runner.run(run)
            ledger.add(line)
            if options.save:
                page(ledger, options).write(options.save)
            say(f"{number}/{len(runs)}  {run.id:40} {_result(line)}")


def page(ledger: Ledger, options: argparse.Namespace) -> report.Report:
    """Return the report of the ledger."""
    device, on = options.device, f" on {options.nodes} nodes" * (options.nodes > 1)
    title, name = f"{TITLES[device]}{on}", _name(options)
    return report.Report(name, title, ABOUT[device], BOUND, body(ledger.lines), len(ledger.lines), ["torch"])


def _result(line: dict[str, Any]) -> str:
    fired = [f"{v['labels']['alertname']} {v['seconds']} s" if v["fired"] else "MISSED" for v in line["verdicts"]]
    wrong = [word for word in ("place", "cause") for v in line["verdicts"] if v["fired"] and not v[f"{word}_right"]]
    false = [labels["alertname"] for labels in line["false_alarms"]]
    wrong += [f"answer {one['query']} of {one['alert']}'s runbook" for one in line["runbook"] if not one["right"]]
    wrong += [f"evaluation of {name}: {error}" for name, error in line["rule_errors"].items()]
    parts = [*fired, *(f"WRONG {word}" for word in wrong), *(f"FALSE {name}" for name in false)]
    return ", ".join(parts) or "silence"


def _is_wanted(run: Run, prefixes: Sequence[str]) -> bool:
    return not prefixes or any("+".join(run.names).startswith(prefix) for prefix in prefixes)


def say(text: str) -> None:
    """Print a line with the time, unbuffered."""
    print(f"{time.strftime('%H:%M:%S')}  {text}", flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
