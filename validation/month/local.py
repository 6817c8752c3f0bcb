"""Judge simulated runs of one node as an exporter does, once a second: false alarms, and time to find faults.

    make month-local                                   days that are not in the ledger yet, of a thousand
    python -m validation.month.local --days 0 100      only these, and no faults
    python -m validation.month.local --faults 10       this number of runs of each fault and dose
    python -m validation.month.local --whole --days 0 10    the same days, polled completely: the control

Runs are those of `make month` with eight ranks, so that about a quarter of the numbers is left out. Stretches in which
no loss is near its limit are not polled: the diagnosis gets their losses, its baselines and its history at once. The
control shows that this changes no finding. The ledger has a line of JSON for each run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from typing import Any, NamedTuple

from testing import report
from testing.report import Ledger, Line
from testing.statistics import percentile, poisson_bound
from validation.month import plan as plans
from validation.month.fill import verdicts
from validation.month.plan import DAY, DOSES, HANG, RANKS_PER_NODE, Plan

DAYS = 1335  # numbers, of which a thousand have eight ranks
KINDS = {
    "slow rank": "straggler",
    "rank 0 works": "straggler",
    "slow loaders": "data",
    "slow copies": "copies",
    "slow network": "network",
    "rotating straggler": "rotating_straggler",
    "throttled GPUs": "throttling",
    HANG: "hang",
}
"""The right finding by fault."""


class Task(NamedTuple):
    """A healthy day, or a run with a fault; its name in the ledger is `id`."""

    number: int
    fault: str = ""
    dose: float = 1.0
    is_whole: bool = False
    """True if no stretch is left out."""

    @property
    def id(self) -> str:
        name = f"{self.fault}/{self.dose:g}" if self.fault else "day"
        return f"{'whole/' if self.is_whole else ''}{name}/{self.number}"

    def plan(self) -> Plan:
        return plans.faulty(self.fault, self.dose, self.number) if self.fault else plans.healthy(self.number)


def judge(task: Task) -> Line:
    """Return the findings in a run."""
    plan, shown, found = task.plan(), set[tuple[Any, ...]](), []
    for verdict in verdicts(plan, task.is_whole):
        findings = {(one.kind, one.candidate.place.rank): one for one in verdict.findings}
        at = round(verdict.at - plan.onset, 1)
        found += [[*key, findings[key].candidate.cause, at] for key in sorted(findings.keys() - shown, key=str)]
        shown = set(findings)
    line = {"id": task.id, "whole": task.is_whole, "number": task.number, "fault": task.fault, "dose": task.dose}
    line |= {"step": round(plan.step, 3), "clock": plan.clock, "culprit": plan.culprit, "seconds": plan.seconds}
    return {**line, "heals": plan.heals - plan.onset, "found": found}


def tasks(days: range, faults: int, is_whole: bool) -> Iterator[Task]:
    """Yield the runs on one node, in an order in which the first ones are a fair sample."""
    kinds = [*product(plans.FAULTS, DOSES), (HANG, 1.0)]
    every = [Task(number, *kind, is_whole) for number in range(faults) for kind in kinds]
    every += [Task(number, is_whole=is_whole) for number in days]
    return (task for task in every if task.plan().ranks == RANKS_PER_NODE)


def is_right(line: Line, found: Sequence[Any]) -> bool:
    """Return whether a finding is the fault, in its place, while it lasts or shortly after."""
    kind, rank, _, seconds = found
    is_place = kind not in ("straggler", "hang") or rank == line["culprit"]
    return kind == KINDS.get(line["fault"]) and is_place and 0.0 <= seconds <= line["heals"] + 60.0


def body(lines: Sequence[Line]) -> list[str]:
    """Return the false alarms of the days, the control, and the number and time of findings by fault and dose."""
    runs = [line for line in lines if not line["whole"]]
    days = sum(line["seconds"] for line in runs if not line["fault"]) / DAY
    false = [(line["id"], *one) for line in runs for one in line["found"] if not is_right(line, one)]
    of_days = sum(name.startswith("day/") for name, *_ in false)
    bound = f"{1000 * poisson_bound(of_days) / days:.1f}" if days else "unknown"
    rows = [_row(runs, *one) for one in [*product(plans.FAULTS, DOSES), (HANG, 1.0)]]
    return [
        f"{days:.0f} days of healthy runs: {of_days} false alarms; at most {bound} in 1,000 days, with 95% confidence.",
        *(
            f"- `{name}`: {kind}, rank {rank}, cause {cause or 'none'}, at {at} s"
            for name, kind, rank, cause, at in false
        ),
        _control(lines),
        report.table(("fault", "dose", "runs", "found", "median s", "P90 s"), [row for row in rows if row]),
    ]


def _control(lines: Sequence[Line]) -> str:
    found = {line["id"]: line["found"] for line in lines}
    pairs = [(line, found.get(line["id"].removeprefix("whole/"))) for line in lines if line["whole"]]
    counts = []
    for name, is_fault in (("days", False), ("runs with a fault", True)):
        same = [
            line["found"] == other for line, other in pairs if bool(line["fault"]) is is_fault and other is not None
        ]
        if same:
            counts.append(
                f"{len(same)} {name} were polled completely: {sum(same)} show the same findings at the same second"
            )
    return f"Control of omitted stretches: {'; '.join(counts)}." if counts else "No control of omitted stretches yet."


def _row(lines: Sequence[Line], fault: str, dose: float) -> tuple[Any, ...] | None:
    runs = [line for line in lines if line["fault"] == fault and line["dose"] == dose]
    first = [next((one[3] for one in line["found"] if is_right(line, one)), None) for line in runs]
    seconds = [one for one in first if one is not None]
    times = (percentile(seconds, 0.5), percentile(seconds, 0.9)) if seconds else ("", "")
    return (fault, f"{dose:g}", len(runs), len(seconds), *times) if runs else None


def _run(todo: Sequence[Task], ledger: Ledger, processes: int) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(judge, todo):
            ledger.add(line)
            wrong = [one for one in line["found"] if not is_right(line, one)]
            print(time.strftime("%H:%M:%S"), line["id"], wrong or "", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge runs that are not in the ledger yet, then publish. Return 1 if there is a false alarm."""
    parser = report.parser(__doc__, prog="make month-local", save=report.Directories())
    parser.add_argument("--days", type=int, nargs=2, metavar=("FIRST", "BEFORE"))
    parser.add_argument(
        "--faults", type=int, metavar="N", help="runs of each fault and dose (default: 10; with --days none)"
    )
    parser.add_argument("--whole", action="store_true", help="leave out no stretch, for the control")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    ledger = options.save.ledger("month_local")
    faults = options.faults if options.faults is not None else 0 if options.days else 10
    days = range(*options.days) if options.days else range(0 if options.faults else DAYS)
    _run([task for task in tasks(days, faults, options.whole) if not ledger.has(task.id)], ledger, options.processes)
    title, lines = "A simulated month on one node", ledger.lines
    page = report.Report("month_local", title, __doc__, "no false alarm", body(lines), len(lines))
    page.publish(options.save)
    return int(any(not is_right(line, one) for line in lines for one in line["found"]))


if __name__ == "__main__":
    sys.exit(main())
