"""Judge simulated weeks of healthy and faulty runs with the production rules: false alarms, and time to alert.

    make month                                         runs that are not in the ledger yet, of a thousand days
    python -m validation.month --days 0 100            only these, and no faults
    python -m validation.month --faults 10             this number of runs of each fault and dose
    python -m validation.month --rules c6cba88         with the rules of that revision, for comparison
    python -m validation.month --table                 print the ledger; run nothing

Days without a fault count false alarms; runs with a fault count the time to alert. The ledger has a line of JSON for
each. Each day and run is drawn from its number, so that it is reproducible.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import NamedTuple

from deploy.prometheus.shipped import HERE
from testing import report, servers
from testing.report import Ledger, Line
from validation.month import engine, quiet
from validation.month import plan as plans
from validation.month.engine import Firing, fire
from validation.month.plan import DOSES, HANG, Plan
from validation.month.record import simulate
from validation.month.report import body
from validation.month.samples import Stretch

TASKS_PER_CALL = 8  # tasks that a process gets at a time
MAX_RANKS = 128  # in one Prometheus
WHOLE_EVERY = 50  # one of 50 days is also judged completely
SHIPPED = HERE / "rules/15s.yml"
BEFORE_THE_TIERS = "deploy/prometheus/rules/production/rankscope.yml"


class Task(NamedTuple):
    """One day, or one run with a fault; its name in the ledger is `id`."""

    id: str
    kind: str
    number: int
    fault: str = ""
    dose: float = 1.0

    def plan(self) -> Plan:
        return plans.faulty(self.fault, self.dose, self.number) if self.fault else plans.healthy(self.number)


def tasks(days: range, faults: int) -> Iterator[Task]:
    """Yield all tasks, in an order in which the first ones are a fair sample."""
    for number in range(faults):
        for fault, dose in [*product(plans.FAULTS, DOSES), (HANG, 1.0)]:
            yield Task(f"{fault}/{dose:g}/{number}", "fault", number, fault, dose)
    for number in days:
        yield Task(f"day/{number}", "day", number)
        if number % WHOLE_EVERY == WHOLE_EVERY - 1:
            yield Task(f"whole/{number}", "whole", number)


def judge(these: Sequence[Task], rules: Path) -> list[Line]:
    """Return a line of the ledger for each task."""
    kept: dict[Task, list[Stretch]] = {}
    for task in these:
        plan = task.plan()
        record = simulate(plan)
        whole = [Stretch(plan, record, 0, len(record.times))]
        kept[task] = list(quiet.stretches(plan, record)) if task.kind == "day" else whole
    fired: dict[int, list[Firing]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for together in _grouped([stretch for found in kept.values() for stretch in found]):
            for stretch, firings in fire(together, rules, Path(directory)).items():
                fired[id(stretch)] = firings
    return [
        _line(task, found, [one for stretch in found for one in fired[id(stretch)]]) for task, found in kept.items()
    ]


def _grouped(stretches: list[Stretch]) -> Iterator[list[Stretch]]:
    """Yield groups of stretches of similar length that fit into one Prometheus."""
    together: list[Stretch] = []
    for stretch in sorted(stretches, key=len):
        if together and sum(one.plan.ranks for one in together) + stretch.plan.ranks > MAX_RANKS:
            yield together
            together = []
        together.append(stretch)
    if together:
        yield together


def _line(task: Task, stretches: list[Stretch], firings: list[Firing]) -> Line:
    plan = task.plan()
    return {
        "id": task.id,
        "kind": task.kind,
        "fault": task.fault,
        "dose": task.dose,
        "ranks": plan.ranks,
        "step": round(plan.step, 3),
        "clock": plan.clock,
        "culprit": plan.culprit,
        "seconds": plan.seconds,
        "onset": round(plan.onset, 1),
        "heals": round(plan.heals, 1),
        "judged": sum(map(len, stretches)),
        "fired": [one.line() for one in firings],
    }


def _rules(revision: str | None, directory: Path) -> Path:
    """Return the shipped rules, or those of another revision."""
    if revision is None:
        return engine.rules(directory)
    path = directory / "rules.yml"
    for name in (BEFORE_THE_TIERS, SHIPPED.relative_to(HERE.parents[1])):
        command = [servers.program("git"), "show", f"{revision}:{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            path.write_text(done.stdout)
            return path
    sys.exit(f"month: --rules: git has no rules of {revision}")


def _run(todo: list[Task], ledger: Ledger, rules: Path, processes: int) -> None:
    parts = [todo[begin : begin + TASKS_PER_CALL] for begin in range(0, len(todo), TASKS_PER_CALL)]
    with ProcessPoolExecutor(processes) as pool:
        running = [pool.submit(judge, part, rules) for part in parts]
        for number, done in enumerate(as_completed(running), start=1):
            if (failure := done.exception()) is not None:
                print(f"a part failed: {failure!r}; waiting for running parts", flush=True)
                pool.shutdown(cancel_futures=True)  # do not run all the others, which take hours
                raise failure
            ledger.add(*done.result())
            print(f"{time.strftime('%H:%M:%S')}  {number}/{len(parts)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tasks that are not in the ledger yet, then publish."""
    parser = report.parser(__doc__, prog="make month", save=report.Directories())
    parser.add_argument("--days", type=int, nargs=2, metavar=("FIRST", "BEFORE"), default=[0, 1000])
    parser.add_argument(
        "--faults", type=int, metavar="N", help="runs of each fault and dose (default: 10; with --days none)"
    )
    parser.add_argument("--rules", metavar="REVISION", help="default: the rules of this tree")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--table", action="store_true", help="print the ledger, run nothing")
    options = parser.parse_args(arguments)
    faults = options.faults if options.faults is not None else 10 if options.days == [0, 1000] else 0
    name = f"month_{options.rules}" if options.rules else "month"
    ledger = options.save.ledger(name)
    if not options.table:
        todo = [task for task in tasks(range(*options.days), faults) if not ledger.has(task.id)]
        with tempfile.TemporaryDirectory() as directory:
            _run(todo, ledger, _rules(options.rules, Path(directory)), options.processes)
    title, bound = "A simulated month", "no false alarm"
    page = report.Report(name, title, __doc__, bound, body(ledger.lines), len(ledger.lines))
    page.publish(None if options.table or options.rules else options.save)
    return 0


if __name__ == "__main__":
    sys.exit(main())
