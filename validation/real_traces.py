"""Compare the diagnosis of published traces with the findings of those who measured them.

    python -m validation.real_traces DIR --save

DIR has these folders; none of them is part of this repository:

- `hangs/NAME/`: dumps of torch's flight recorder, one for each rank, and `fault_injection.log` with the ranks that were
  stopped (NVIDIA/nvidia-resiliency-ext at d8686d9, Apache-2.0)
- `batch_times/job_N_norm.csv`: the time of each mini-batch by worker; `batch_times/coefficient_variation.csv`: how much
  the workers of 100 jobs differ in each mini-batch (alibaba/clusterdata at 7a6c496, v2020 GPU)
- `megatron_stragglers/trace-NAME.parquet`: every operation of a job by rank, stage and step
  (ByteDance-Seed/StragglerAnalysis at 8efcd7f, Apache-2.0); reading it needs pyarrow

Steps of a trace are fed to the diagnosis one after the other, as an exporter reads them from records: a rank's work in
a step, and the rest, in which it waits. Ranks are compared within their stage. Batch times are taken as those of
synchronous training, in which all wait for the slowest, and their unit as ten milliseconds. For the 100 jobs only the
variation is published: their workers are drawn with it, independently. Only every n-th mini-batch is published: each
stands for those up to the next. A worker of a job counts as slow if its mean is 1.1 times the median worker's for ten
successive samples.

The diagnosis assumes that healthy ranks drift by 2%, and alerts from a loss of 7%. Of ten workers that independently
differ by a tenth in each mini-batch, the slowest takes 15% longer than the mean, and most of the 100 jobs differ by as
much. If they were synchronous they would lose that time from their start, to no fault: uneven work alerts only if a job
has more of it than usual (`uneven_allowance` and `uneven_increase` in `diagnosis/thresholds.py`). To name a worker
would be wrong.
"""

from __future__ import annotations

import csv
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

from testing import report

from rankscope.record.layout import PHASES
from rankscope.record.snapshot import Step
from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.readings import AlignedCounters, Counters, RankReading
from rankscope_exporter.diagnosis.waits import blocking_ranks, waits
from rankscope_exporter.diagnosis.words import sentence
from rankscope_exporter.hangs import flight_recorder
from rankscope_exporter.ranks.step_alignment import Alignment, account

OPERATIONS = {
    "forward-compute": "forward",
    "backward-compute": "backward",
    "optimizer": "optimizer",
    "optimizer-clip-main-grad": "optimizer",
    "gc": "other",
}
"""The phase of each operation; a rank outside of these waits."""
WAIT = "collective_wait"


VERDICTS = {True: "right", False: "WRONG", None: ""}


class Result(NamedTuple):
    """The result of one trace."""

    trace: str
    published: str
    found: str
    is_right: bool | None
    """None if no published result exists."""


def hangs(directory: Path) -> Iterator[Result]:
    """Yield the ranks that each run that hung waits for, by the diagnosis."""
    for log in sorted(directory.glob("*/fault_injection.log")):
        match = re.search(r"Fault ranks: \[([\d, ]+)\]", log.read_text())
        stopped = sorted(map(int, match[1].split(","))) if match else []
        dumps, _ = flight_recorder.read_dumps(log.parent)
        groups = {name: group.ranks for name, group in flight_recorder.groups_of(dumps).items()}
        late = blocking_ranks(waits(flight_recorder.positions(dumps), groups))
        named = sorted(rank for ranks in late for rank in ranks)
        yield Result(f"hangs/{log.parent.name}", f"stopped: {stopped}", f"waiting for {named}", named == stopped)


class Operation(NamedTuple):
    """One line of a trace, in seconds from the start of its step."""

    rank: int
    stage: int
    step: int
    name: str
    begins: float
    seconds: float
    micro_batch: int


def operations(path: Path) -> list[Operation]:
    """Return all operations of a trace. Raises ModuleNotFoundError without pyarrow."""
    from pyarrow import parquet

    columns = ("rank", "stage", "step", "optype", "start_ts", "duration", "mb_id")
    table = parquet.read_table(path, columns=list(columns)).to_pydict()
    return [Operation(*line) for line in zip(*(table[column] for column in columns), strict=True)]


class TraceRank:
    """The work of one rank of a trace so far, as in its record."""

    def __init__(self, rank: int, stage: int | None = None) -> None:
        self.rank, self.stage = rank, stage
        self.alignment = Alignment()
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = self._micro_steps = 0.0

    def step(self, number: int, ends: float, seconds: float, spent: Mapping[str, float], micro_batches: int) -> Step:
        """Add one step."""
        own = dict(spent) | {WAIT: max(seconds - sum(spent.values()), 0.0)}
        for phase, one in own.items():
            self._seconds[phase] += one
        self._steps, self._micro_steps = self._steps + 1.0, self._micro_steps + micro_batches
        return Step(number, ends, seconds, tuple(own.get(phase, 0.0) for phase in PHASES))

    def reading(self, at: float, ranks: int) -> RankReading:
        """Return the rank's reading at a time."""
        totals = self.alignment.unplanned
        aligned = AlignedCounters(
            totals.steps, totals.seconds, totals.floor, totals.skew, dict(totals.blame),
            dict(zip(PHASES, self.alignment.phases, strict=True)),
        )  # fmt: skip
        counters = Counters(self._steps, dict(self._seconds), micro_steps=self._micro_steps, aligned=aligned)
        return RankReading(
            self.rank,
            at,
            0.0,
            "all",
            world_size=ranks,
            last_progress=at,
            stage=self.stage,
            last_checkpoint=at,
            counters=counters,
        )


Found = Mapping[tuple[str, Any], str]
"""The sentence of each finding, by its kind and its rank or stage."""


class JudgedRun:
    """A run whose steps are fed to the diagnosis one after the other."""

    def __init__(self, members: Mapping[int, TraceRank]) -> None:
        self.members, self.at = members, 0.0
        self.found: dict[tuple[str, Any], str] = {}
        self.most = 0.0
        """The largest loss of a finding."""
        self._judge = RunJudge(("trace", ""))
        self._update()

    def step(
        self, number: int, seconds: float, spent: Mapping[int, Mapping[str, float]], micro_batches: int = 1
    ) -> None:
        """Add a step, with each rank's seconds by phase."""
        self.at += seconds
        steps = {
            rank: member.step(number, self.at, seconds, spent[rank], micro_batches)
            for rank, member in self.members.items()
        }
        for stage in {one.stage for one in self.members.values()}:
            peers = [one for one in self.members.values() if one.stage == stage]
            if len(peers) > 1:
                account([one.alignment for one in peers], [steps[one.rank] for one in peers])
        self._update()

    def _update(self) -> None:
        readings = {rank: one.reading(self.at, len(self.members)) for rank, one in self.members.items()}
        for finding in self._judge.update(self.at, readings).findings:
            candidate = finding.candidate
            self.most = max(self.most, candidate.ratio)
            ranks = candidate.place.ranks if candidate.place.rank is None else candidate.place.rank
            place = ranks if ranks != () else candidate.evidence.get("stage")
            self.found.setdefault((candidate.kind, place), sentence(self._judge.run, candidate))


def judge_operations(lines: Sequence[Operation]) -> Found:
    """Return the findings in a trace of operations."""
    run = JudgedRun({one.rank: TraceRank(one.rank, one.stage) for one in lines})
    by_step: dict[int, list[Operation]] = defaultdict(list)
    for one in lines:
        by_step[one.step].append(one)
    for number, (_, done) in enumerate(sorted(by_step.items()), start=1):
        spent: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in run.members}
        for one in done:
            if phase := OPERATIONS.get(one.name):
                spent[one.rank][phase] += one.seconds
        run.step(number, max(one.begins + one.seconds for one in done), spent, 1 + max(one.micro_batch for one in done))
    return run.found


PUBLISHED = {
    "AR": ("one worker slowed 1.97 times, of stage 0", ("straggler", 0)),
    "ST": ("unequal stages, the last is the slowest", ("stage_imbalance", 3.0)),
}


def stragglers(directory: Path) -> Iterator[Result]:
    """Yield the findings in each trace of a job with stragglers."""
    for path in sorted(directory.glob("trace-*.parquet")):
        truth, expected = PUBLISHED.get(path.stem.removeprefix("trace-"), ("unknown", None))
        found = judge_operations(operations(path))
        yield Result(f"{directory.name}/{path.name}", truth, "; ".join(found.values()) or "-", [*found] == [expected])


UNIT = 0.01
"""Seconds of a normalized batch time."""
WORKERS = 10
SLOW = {
    "job_1_norm": ("worker 6 becomes slow in the middle", {6}),
    "job_2_norm": ("workers differ steadily", None),
    "job_3_norm": ("several are slow", None),
    "job_4_norm": ("several are slow", None),
}
"""The published result by job, and the workers that it names."""
SLOW_RATIO, SLOW_FOR = 1.1, 10
"""A worker is slow if in 10 successive samples its mean time is 1.1 times the median worker's."""
ALERTS = 0.01
"""Ratio of the jobs without a slow worker that may alert."""


def batch_times(directory: Path) -> Iterator[Result]:
    """Yield the workers of each job that are found to be slow."""
    for path in sorted(directory.glob("job_*_norm.csv")):
        times: dict[int, dict[int, float]] = defaultdict(dict)
        with path.open() as file:
            for row in csv.DictReader(file):
                times[int(float(row["time"]))][int(row["worker"])] = float(row["batch_time_norm"]) * UNIT
        every = min(later - earlier for earlier, later in pairwise(sorted(times)))
        samples = [times[number] for number in sorted(times) if len(times[number]) == WORKERS]
        found = synchronous(times for times in samples for _ in range(every)).found
        late = [(ranks,) if isinstance(ranks, int) else ranks for kind, ranks in found if kind == "straggler"]
        named = {rank for ranks in late for rank in ranks}
        slow = slow_workers(samples)
        both = len(named & slow)
        text = f"{both} of {len(named)} named are slow, {both} of {len(slow)} slow are named"
        truth, expected = SLOW.get(path.stem, ("unknown", None))
        verdict = None if expected is None else named >= expected
        yield Result(f"batch_times/{path.name}", truth, f"{text}: {'; '.join(found.values())}", verdict)


def slow_workers(samples: Sequence[Mapping[int, float]]) -> set[int]:
    """Return the workers that are slow for a while."""
    found = set()
    for begin in range(len(samples) - SLOW_FOR + 1):
        means = {rank: fmean(one[rank] for one in samples[begin : begin + SLOW_FOR]) for rank in range(WORKERS)}
        middle = median(means.values())
        found |= {rank for rank, mean in means.items() if mean >= SLOW_RATIO * middle}
    return found


def synchronous(steps: Iterable[Mapping[int, float]]) -> JudgedRun:
    """Return the judged run if all workers wait for the slowest in each step."""
    run = JudgedRun({rank: TraceRank(rank) for rank in range(WORKERS)})
    for number, times in enumerate(steps, start=1):
        if times.keys() >= run.members.keys():
            run.step(number, max(times.values()), {rank: {"forward": spent} for rank, spent in times.items()})
    return run


def variations(path: Path) -> Iterator[JudgedRun]:
    """Yield the judged run of each job of which the variation is known."""
    draw = random.Random(1)
    with path.open() as file:
        for _, *row in list(csv.reader(file))[1:]:
            known = [float(one) for one in row if one]
            yield synchronous({rank: max(draw.gauss(1.0, one), 0.1) for rank in range(WORKERS)} for one in known)


def variation(path: Path) -> Iterator[Result]:
    """Yield how many of these jobs would alert."""
    if path.exists():
        every = [*variations(path)]
        named = sum(any(kind == "straggler" for kind, _ in one.found) for one in every)
        losses = [f"{one.most:.0%}" for one in every if one.found]
        text = f"of {len(every)}, {named} name a worker, and {len(losses)} alert: {', '.join(losses) or '-'}"
        truth = "no worker is slow: all differ at random"
        yield Result(f"{path.parent.name}/{path.name}", truth, text, len(losses) <= ALERTS * len(every))


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all traces that exist, print and publish. Return 1 if one is wrong."""
    parser = report.parser(__doc__)
    parser.add_argument("traces", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    batches = options.traces / "batch_times"
    results = [
        *hangs(options.traces / "hangs"),
        *stragglers(options.traces / "megatron_stragglers"),
        *batch_times(batches),
        *variation(batches / "coefficient_variation.csv"),
    ]
    rows = [(one.trace, one.published, one.found, VERDICTS[one.is_right]) for one in results]
    right, wrong = (sum(one.is_right is verdict for one in results) for verdict in (True, False))
    body = [f"{right} of {right + wrong} right.", report.table(("trace", "published", "found", ""), rows)]
    lines = [one._asdict() for one in results]
    report.Report("real_traces", "Published traces", __doc__, "all right", body, lines).publish(options.save)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
