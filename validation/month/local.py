"""Judge simulated runs of one node as an exporter does, once a second: false alarms, and time to find faults.

    python -m validation.month.local --days 0 100         days of healthy runs
    python -m validation.month.local --faults 10          this number of runs of each fault and dose
    python -m validation.month.local --whole --days 0 10  poll every second of quiet stretches, too

Runs are those of `make month` with eight ranks. In stretches without a loss near the limit of an alert, it polls once
in 15 seconds instead of once a second; `--whole` shows that this changes nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from testing import report
from testing.statistics import percentile
from validation.month import plan as plans
from validation.month.plan import DAY, DOSES, HANG, RANKS_PER_NODE, Plan
from validation.month.polls import polls

from rankscope_exporter.diagnosis.judge import RunJudge

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
    """A healthy day, or a run with a fault."""

    number: int
    fault: str = ""
    dose: float = 1.0

    def plan(self) -> Plan:
        return plans.faulty(self.fault, self.dose, self.number) if self.fault else plans.healthy(self.number)


def judge(task: Task, is_whole: bool) -> dict[str, Any] | None:
    """Return the findings in a run; None for one on several nodes."""
    plan = task.plan()
    if plan.ranks != RANKS_PER_NODE:
        return None
    run_judge, shown, found = RunJudge((plan.name, "0")), set[tuple[Any, ...]](), []
    for at, readings in polls(plan, is_whole or bool(task.fault)):
        findings = {(one.kind, one.candidate.place.rank): one for one in run_judge.update(at, readings).findings}
        found += [[*key, findings[key].candidate.cause, round(at - plan.onset, 1)] for key in findings.keys() - shown]
        shown = set(findings)
    line = {"number": task.number, "fault": task.fault, "dose": task.dose, "step": plan.step, "clock": plan.clock}
    return {**line, "culprit": plan.culprit, "heals": plan.heals - plan.onset, "seconds": plan.seconds, "found": found}


def tasks(days: range, faults: int) -> Iterator[Task]:
    """Yield the runs, in an order in which the first ones are a fair sample."""
    for number in range(faults):
        yield from (Task(number, *one) for one in [*product(plans.FAULTS, DOSES), (HANG, 1.0)])
    yield from map(Task, days)


def is_right(line: dict[str, Any], found: Sequence[Any]) -> bool:
    """Return whether a finding is the fault, in its place, while it lasts or shortly after."""
    kind, rank, _, seconds = found
    is_place = kind not in ("straggler", "hang") or rank == line["culprit"]
    return kind == KINDS.get(line["fault"]) and is_place and 0.0 <= seconds <= line["heals"] + 60.0


def body(lines: Sequence[dict[str, Any]]) -> list[str]:
    """Return the false alarms of the days, and the number and time of findings by fault and dose."""
    days = [line for line in lines if not line["fault"]]
    false = [(line["number"], *one) for line in lines for one in line["found"] if not is_right(line, one)]
    rows = [_row(lines, *one) for one in [*product(plans.FAULTS, DOSES), (HANG, 1.0)]]
    alarms = "\n".join(f"- {'run' if lines else ''} {one}" for one in false) or "No false alarm."
    total = sum(line["seconds"] for line in days) / DAY
    return [
        f"{total:.0f} days of healthy runs, {len(lines) - len(days)} runs with a fault.",
        alarms,
        report.table(("fault", "dose", "runs", "found", "median s", "P90 s"), [row for row in rows if row]),
    ]


def _row(lines: Sequence[dict[str, Any]], fault: str, dose: float) -> tuple[Any, ...] | None:
    runs = [line for line in lines if line["fault"] == fault and line["dose"] == dose]
    first = [next((one[3] for one in line["found"] if is_right(line, one)), None) for line in runs]
    seconds = [one for one in first if one is not None]
    times = (percentile(seconds, 0.5), percentile(seconds, 0.9)) if seconds else ("", "")
    return (fault, f"{dose:g}", len(runs), len(seconds), *times) if runs else None


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge, print and publish. Return 1 if there is a false alarm."""
    parser = report.parser(__doc__)
    parser.add_argument("--days", type=int, nargs=2, metavar=("FIRST", "BEFORE"), default=[0, 0])
    parser.add_argument("--faults", type=int, metavar="N", default=0)
    parser.add_argument("--whole", action="store_true", help="poll every second of quiet stretches, too")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    todo = list(tasks(range(*options.days), options.faults))
    lines = []
    with ProcessPoolExecutor(options.processes) as pool:
        for line in pool.map(partial(judge, is_whole=options.whole), todo):
            if line is not None:
                lines.append(line)
                wrong = [one for one in line["found"] if not is_right(line, one)]
                print(line["number"], line["fault"], line["dose"], wrong or "", file=sys.stderr, flush=True)
    page = report.Report("month_local", "A simulated month on one node", __doc__, "no false alarm", body(lines), lines)
    page.publish(options.save)
    return int(any(not is_right(line, one) for line in lines for one in line["found"]))


if __name__ == "__main__":
    sys.exit(main())
