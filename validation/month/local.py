"""Judge simulated runs as an exporter does that sees all of their ranks: false alarms, and what is found of each fault.

    make month-local                                         runs that are not in the ledger yet
    python -m validation.month.local --runs 0 100            only these healthy runs
    python -m validation.month.local --faults 0 10           only these numbers of each fault and dose
    python -m validation.month.local --whole --runs 0 10     the same runs with every poll: the control
    python -m validation.month.local --nodes 2 --runs 0 100  the same runs on two nodes, with an analyzer

The readings of each rank go into the diagnosis that the exporter runs. Each second is polled around changes, each 5 s
while something is found, and each minute while nothing changes, of steps from 10 s on where one ends. The control shows
that the omitted polls change no finding. Each run is drawn from its number, and the ledger has a line of JSON for each.

A finding is right if it is of the fault's kind, names no other rank, and opens while the fault lasts. Its place is
right if all right findings together name all ranks of the fault, and its cause if each has the fault's. All others are
false. Healthy runs have uneven work, pauses, changes of the job and restarts; their findings are false once the run's
pace is known.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any, NamedTuple

from testing import report
from testing.report import Ledger, Line
from testing.statistics import percentile, poisson_bound
from validation.month import scene as scenes
from validation.month.feed import verdicts
from validation.month.plan import DAY
from validation.month.scene import Scene

from rankscope_exporter.diagnosis.detectors import pipeline
from rankscope_exporter.diagnosis.findings import Finding

RUNS, FAULTS = (0, 4000), (0, 10)
ENDED = 60.0
"""Seconds after the end of a fault in which its finding may still open."""
HEAD = ("run", "dose", "runs", "days", "found", "place right", "cause right", "median s", "findings a run", "false")


class Task(NamedTuple):
    """A healthy run, or a run with a fault; its name in the ledger is `id`."""

    number: int
    fault: str = ""
    dose: float = 1.0
    is_whole: bool = False
    """True if no poll is left out."""
    nodes: int = 1

    @property
    def id(self) -> str:
        name = f"{self.fault}/{self.dose:g}" if self.fault else "healthy"
        return f"{_control_name(self.is_whole, self.nodes)}{name}/{self.number}"

    def scene(self) -> tuple[str, Scene]:
        """Return the kind of the run, and the run."""
        if self.fault:
            return self.fault, scenes.faulty(self.fault, self.dose, self.number)
        return scenes.healthy(self.number)


def _control_name(is_whole: bool, nodes: int) -> str:
    return f"{'whole/' if is_whole else ''}{f'{nodes} nodes/' if nodes > 1 else ''}"


def judge(task: Task) -> Line:
    """Return the findings in a run."""
    began, (run, scene), polls = time.process_time(), task.scene(), 0
    shown: dict[tuple[Any, ...], list[float]] = {}
    for verdict in verdicts(scene, is_whole=task.is_whole, nodes=task.nodes):
        polls += 1
        for one in verdict.findings:
            key = one.kind, named_ranks(one, scene), one.candidate.cause, one.opened
            shown.setdefault(key, [verdict.at, verdict.at])[1] = verdict.at
    return {
        "id": task.id,
        "whole": task.is_whole,
        "nodes": task.nodes,
        "run": run,
        "dose": task.dose if task.fault else None,
        **{name: getattr(scene.plan, name) for name in ("ranks", "step", "clock")},
        "days": scene.plan.seconds / DAY,
        "polls": polls,
        "cpu": round(time.process_time() - began, 2),
        "truth": asdict(scene.truth),
        "found": [[kind, list(ranks), cause, *times] for (kind, ranks, cause, _), times in shown.items()],
    }


def named_ranks(finding: Finding, scene: Scene) -> tuple[int, ...]:
    """Return the ranks that a finding names: none if it concerns the whole run."""
    candidate = finding.candidate
    if finding.kind == pipeline.IMBALANCE:
        return tuple(scene.peers[int(candidate.evidence["stage"])])
    ranks = getattr(candidate.place, "ranks", ())  # an earlier version of the diagnosis names one rank in each finding
    return ranks or (() if candidate.place.rank is None else (candidate.place.rank,))


def tasks(runs: range, faults: range, *, is_whole: bool, nodes: int = 1) -> Iterator[Task]:
    """Yield the runs, in an order in which the first ones are a fair sample."""
    for number in faults:
        yield from (Task(number, *fault, is_whole, nodes) for fault in scenes.faults())
    yield from (Task(number, is_whole=is_whole, nodes=nodes) for number in runs)


def is_right(line: Line, found: Sequence[Any]) -> bool:
    """Return whether a finding is the fault, names no other rank, and opens while it lasts."""
    truth, (kind, ranks, _, at, _) = line["truth"], found
    is_place = set(ranks) <= set(truth["ranks"] or ranks)
    return kind in truth["kinds"] and is_place and truth["begins"] <= at <= truth["ends"] + ENDED


def is_false(line: Line, found: Sequence[Any]) -> bool:
    """Return whether a finding is wrong. Those of a healthy run are not, before the run is known."""
    is_known = line["truth"]["kinds"] or found[3] >= line["truth"]["begins"]
    return bool(is_known) and not is_right(line, found)


def body(lines: Sequence[Line]) -> list[str]:
    """Return the false alarms, the speed, the control, and one table of all runs by kind and dose."""
    runs = [line for line in lines if not line["whole"] and _nodes(line) == 1]
    healthy = [line for line in runs if line["dose"] is None]
    days, minutes = sum(line["days"] for line in healthy), sum(line["cpu"] for line in healthy) / 60
    kinds = Counter(one[0] for line in healthy for one in line["found"] if is_false(line, one))
    alarms, bound = kinds.total(), poisson_bound(kinds.total())
    rate, most = (f"{1000 * count / days:.1f}" if days else "unknown" for count in (alarms, bound))
    known = [*((name, None) for name in scenes.HEALTHY), *scenes.faults()]
    return [
        f"{days:.1f} days of healthy runs: {alarms} false alarms, {rate} in 1,000 days; at most {most}, with 95% "
        f"confidence. By kind: {', '.join(f'{kind} {count}' for kind, count in kinds.most_common()) or 'none'}.",
        f"Healthy runs: {days / minutes if minutes else 0.0:.1f} run-days in a minute of CPU time.",
        _found(runs),
        _control(lines),
        *(_split(lines, nodes) for nodes in sorted({_nodes(line) for line in lines} - {1})),
        report.table(HEAD, [row for one in known if (row := _row(runs, *one))]),
    ]


def _row(lines: Sequence[Line], name: str, dose: float | None) -> tuple[Any, ...] | None:
    runs = [line for line in lines if line["run"] == name and line["dose"] == dose]
    if not runs:
        return None
    days = f"{sum(line['days'] for line in runs):.1f}"
    false = sum(is_false(line, one) for line in runs for one in line["found"])
    if dose is None:
        return name, "", len(runs), days, *[""] * 5, false
    found, places, causes = _right(runs)
    seconds = [right[0][3] - truth["begins"] for truth, right in found]
    median = f"{percentile(seconds, 0.5):.0f}" if found else ""
    each = f"{sum(len(right) for _, right in found) / len(found):.1f}" if found else ""
    parts = (f"{sum(one)}/{len(one)}" if one else "" for one in (places, causes))
    return name, f"{dose:g}", len(runs), days, f"{len(found)}/{len(runs)}", *parts, median, each, false


def _right(runs: Sequence[Line]) -> tuple[list[tuple[Any, list[Any]]], list[bool], list[bool]]:
    """Return the truth and the right findings of each run that has some, and whether place and cause are right."""
    found = [
        (line["truth"], right) for line in runs if (right := [one for one in line["found"] if is_right(line, one)])
    ]
    places = [set(truth["ranks"]) == {rank for one in right for rank in one[1]} for truth, right in found]
    causes = [{one[2] for one in right} <= set(truth["causes"]) for truth, right in found if truth["causes"]]
    return found, places, causes


def _found(lines: Sequence[Line]) -> str:
    runs = [line for line in lines if line["dose"] and (line["run"], line["dose"]) not in scenes.WITHIN]
    found, places, causes = _right(runs)
    return (
        f"Faults whose loss is beyond its allowance by a tenth: {len(found)} of {len(runs)} found, place right in "
        f"{sum(places)} of {len(places)}, cause in {sum(causes)} of {len(causes)}."
    )


def _nodes(line: Line) -> int:
    return int(line.get("nodes", 1))


def _pairs(lines: Sequence[Line], *, is_whole: bool, nodes: int) -> tuple[list[tuple[Line, Line]], int, float]:
    """Return the runs of a control with the same runs of the month; how many have the same findings, and how far apart.

    The last is the most seconds between two that are the same.
    """
    month, prefix = {line["id"]: line for line in lines}, _control_name(is_whole, nodes)
    controls = [line for line in lines if line["whole"] == is_whole and _nodes(line) == nodes]
    names = [line["id"].removeprefix(prefix) for line in controls]
    pairs = [(line, month[name]) for line, name in zip(controls, names, strict=True) if name in month]
    same = [pair for pair in pairs if len({repr([one[:3] for one in line["found"]]) for line in pair}) == 1]
    apart = [abs(a[3] - b[3]) for pair in same for a, b in zip(*(line["found"] for line in pair), strict=True)]
    return pairs, len(same), max(apart, default=0.0)


def _split(lines: Sequence[Line], nodes: int) -> str:
    pairs, same, apart = _pairs(lines, is_whole=False, nodes=nodes)
    count = sum(len(alone["found"]) for _, alone in pairs)
    days = sum(line["days"] for line, _ in pairs)
    return (
        f"On {nodes} nodes, with an analyzer: {len(pairs)} runs of {days:.1f} days, with {count} findings on one node. "
        f"{same} have the same findings, at most {apart:.0f} s apart."
    )


def _control(lines: Sequence[Line]) -> str:
    pairs, same, apart = _pairs(lines, is_whole=True, nodes=1)
    if not pairs:
        return "No control of omitted polls yet."
    count = sum(len(whole["found"]) for whole, _ in pairs)
    polls = [sum(pair[number]["polls"] for pair in pairs) for number in (0, 1)]
    return (
        f"Control of omitted polls: {len(pairs)} runs with {count} findings were polled each second. {same} have "
        f"the same findings, at most {apart:.0f} s apart, with {polls[1]:,} instead of {polls[0]:,} "
        "polls."
    )


def _run(todo: Sequence[Task], ledger: Ledger, processes: int) -> None:
    with ProcessPoolExecutor(processes) as pool:
        for line in pool.map(judge, todo):
            ledger.add(line)
            false = [one for one in line["found"] if is_false(line, one)]
            print(time.strftime("%H:%M:%S"), line["id"], line["run"], f"{line['cpu']} s", false[:3] or "", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge runs that are not in the ledger yet, then publish. Return 1 if there is a false alarm."""
    parser = report.parser(__doc__, prog="make month-local")
    parser.add_argument("--runs", type=int, nargs=2, metavar=("FIRST", "BEFORE"))
    parser.add_argument("--faults", type=int, nargs=2, metavar=("FIRST", "BEFORE"))
    parser.add_argument("--whole", action="store_true", help="leave out no poll, for the control")
    parser.add_argument("--nodes", type=int, default=1, help="judge the same runs on so many nodes")
    parser.add_argument("--processes", type=int, default=2)
    options = parser.parse_args(arguments)
    ledger = (options.save or report.Directories()).ledger("month_local_runs")
    is_all = not (options.runs or options.faults)
    runs = range(*(options.runs or (RUNS if is_all else (0, 0))))
    faults = range(*(options.faults or (FAULTS if is_all else (0, 0))))
    planned = tasks(runs, faults, is_whole=options.whole, nodes=options.nodes)
    todo = [task for task in planned if not ledger.has(task.id)]
    _run(todo, ledger, options.processes)
    title, lines = "A simulated month on one node", ledger.lines
    page = report.Report("month_local", title, __doc__, "no false alarm", body(lines), len(lines))
    page.publish(options.save)
    return int(any(is_false(line, one) for line in lines if line["dose"] is None for one in line["found"]))


if __name__ == "__main__":
    sys.exit(main())
