"""How often the production rules cry wolf, and how soon they tell: simulated weeks judged by the real rules.

    make month                                         what is not in the ledger yet, of a thousand days of runs
    python -m validation.month --days 0 100            only these, and no faults
    python -m validation.month --faults 10             so many runs of each fault and dose
    python -m validation.month --rules c6cba88         by the rules of that revision, for comparison
    python -m validation.month --table                 what the ledger says so far; runs nothing

Days without a fault count false alarms; runs with one how long it takes to tell. The ledger has a line of JSON for
each; the report (.md) is written beside it. Each is drawn from its number, so that everybody gets the same.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from deploy.prometheus.shipped import HERE
from testing import servers
from validation.month import engine, quiet, report
from validation.month import plan as plans
from validation.month.engine import Firing, fire
from validation.month.plan import DOSES, HANG, Plan
from validation.month.record import simulate
from validation.month.samples import Stretch

LEDGER = HERE.parents[1] / "docs/measurements/month.jsonl"
TOGETHER = 8  # tasks that a process takes at a time
RANKS_TOGETHER = 128  # in one Prometheus
WHOLE = 50  # of so many days one is judged whole, too
SHIPPED = HERE / "rules/15s.yml"
BEFORE_THE_TIERS = "deploy/prometheus/rules/production/rankscope.yml"

Line = dict[str, Any]


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
    """All that is to be done, in an order in which a part of it is a fair sample."""
    for number in range(faults):
        for fault, dose in [*product(plans.FAULTS, DOSES), (HANG, 1.0)]:
            yield Task(f"{fault}/{dose:g}/{number}", "fault", number, fault, dose)
    for number in days:
        yield Task(f"day/{number}", "day", number)
        if number % WHOLE == WHOLE - 1:
            yield Task(f"whole/{number}", "whole", number)


def judge(these: Sequence[Task], rules: Path) -> list[Line]:
    """A line of the ledger for each."""
    kept: dict[Task, list[Stretch]] = {}
    for task in these:
        plan = task.plan()
        record = simulate(plan)
        whole = [Stretch(plan, record, 0, len(record.times))]
        kept[task] = list(quiet.stretches(plan, record)) if task.kind == "day" else whole
    fired: dict[int, list[Firing]] = {}
    with tempfile.TemporaryDirectory() as directory:
        for together in _together([stretch for found in kept.values() for stretch in found]):
            for stretch, firings in fire(together, rules, Path(directory)).items():
                fired[id(stretch)] = firings
    return [
        _line(task, found, [one for stretch in found for one in fired[id(stretch)]]) for task, found in kept.items()
    ]


def _together(stretches: list[Stretch]) -> Iterator[list[Stretch]]:
    """As many as fit into one Prometheus, about equally long."""
    together: list[Stretch] = []
    for stretch in sorted(stretches, key=len):
        if together and sum(one.plan.ranks for one in together) + stretch.plan.ranks > RANKS_TOGETHER:
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
    """The shipped ones, or those of another revision as they were then."""
    if revision is None:
        return engine.rules(directory)
    path = directory / "rules.yml"
    for name in (BEFORE_THE_TIERS, SHIPPED.relative_to(HERE.parents[1])):
        command = [servers.program("git"), "show", f"{revision}:{name}"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            path.write_text(done.stdout)
            return path
    sys.exit(f"month: --rules: git knows no rules of {revision}")


def _run(todo: list[Task], ledger: Path, rules: Path, processes: int) -> None:
    parts = [todo[begin : begin + TOGETHER] for begin in range(0, len(todo), TOGETHER)]
    with ProcessPoolExecutor(processes) as pool:
        running = [pool.submit(judge, part, rules) for part in parts]
        for number, done in enumerate(as_completed(running), start=1):
            if (failure := done.exception()) is not None:
                print(f"a part has failed: {failure!r}; waiting for the one beside it", flush=True)
                pool.shutdown(cancel_futures=True)  # not after all the others, which take hours
                raise failure
            with ledger.open("a") as file:
                file.writelines(json.dumps(line) + "\n" for line in done.result())
            print(f"{time.strftime('%H:%M:%S')}  {number}/{len(parts)}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what is not in the ledger yet, then write the report."""
    parser = argparse.ArgumentParser(
        prog="make month", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=int, nargs=2, metavar=("FIRST", "BEFORE"), default=[0, 1000])
    parser.add_argument(
        "--faults", type=int, metavar="N", help="runs of each fault and dose (default: 10; with --days none)"
    )
    parser.add_argument("--rules", metavar="REVISION", help="by default those of this tree")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    parser.add_argument("--table", action="store_true", help="show the ledger, run nothing")
    options = parser.parse_args(arguments)
    faults = options.faults if options.faults is not None else 10 if options.days == [0, 1000] else 0
    ledger: Path = options.ledger
    if options.rules:
        ledger = ledger.with_stem(f"{ledger.stem}_{options.rules}")
    if not options.table:
        done = {line["id"] for line in report.read(ledger)}
        todo = [task for task in tasks(range(*options.days), faults) if task.id not in done]
        with tempfile.TemporaryDirectory() as directory:
            _run(todo, ledger, _rules(options.rules, Path(directory)), options.processes)
    text = report.page(report.read(ledger))
    if not options.table and not options.rules:
        ledger.with_suffix(".md").write_text(text)
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
