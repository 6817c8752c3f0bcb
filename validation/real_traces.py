"""Check what the diagnosis says of traces that others have measured and published, beside what they found.

    python -m validation.real_traces DIR --save

DIR has them in folders of these names; none of them is part of this repository:

- `hangs/NAME/`: dumps of torch's flight recorder, one for each rank, and `fault_injection.log` with the ranks that were
  stopped (NVIDIA/nvidia-resiliency-ext at d8686d9, Apache-2.0)
- `megatron_stragglers/trace-NAME.parquet`: every operation of a job by rank, stage and step
  (ByteDance-Seed/StragglerAnalysis at 8efcd7f, Apache-2.0); reading it needs pyarrow

Steps of a trace are given to the diagnosis one after the other, as an exporter reads them from records: what a rank
does in a step, the rest of which it waits. Ranks are compared within their stage.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from testing import report

from rankscope.record.layout import PHASES
from rankscope.record.snapshot import Step
from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.diagnosis.readings import AlignedCounters, Counters, RankReading
from rankscope_exporter.diagnosis.waits import held_up_by, waits
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
"""The phase of each; while a rank is in none of these it waits."""
WAIT = "collective_wait"


class Result(NamedTuple):
    """Of one trace."""

    trace: str
    published: str
    found: str
    is_right: bool


def hangs(directory: Path) -> Iterator[Result]:
    """Yield who is said to hold up each run that hung."""
    for log in sorted(directory.glob("*/fault_injection.log")):
        match = re.search(r"Fault ranks: \[([\d, ]+)\]", log.read_text())
        stopped = sorted(map(int, match[1].split(","))) if match else []
        dumps = flight_recorder.read_directory(log.parent)
        groups = {name: group.ranks for name, group in flight_recorder.groups_of(dumps).items()}
        late = held_up_by(waits(flight_recorder.positions(dumps), groups))
        named = sorted(rank for ranks in late for rank in ranks)
        yield Result(f"hangs/{log.parent.name}", f"stopped: {stopped}", f"held up by {named}", named == stopped)


class Operation(NamedTuple):
    """One line of a trace; seconds from the begin of its step."""

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


class Trainee:
    """What one rank of a trace has done so far, as its record would have it."""

    def __init__(self, rank: int, stage: int) -> None:
        self.rank, self.stage = rank, stage
        self.alignment = Alignment()
        self._seconds: dict[str, float] = defaultdict(float)
        self._steps = self._micro_steps = 0.0

    def step(self, number: int, ends: float, seconds: float, spent: Mapping[str, float], micro_batches: int) -> Step:
        """Take one step."""
        own = dict(spent) | {WAIT: max(seconds - sum(spent.values()), 0.0)}
        for phase, one in own.items():
            self._seconds[phase] += one
        self._steps, self._micro_steps = self._steps + 1.0, self._micro_steps + micro_batches
        return Step(number, ends, seconds, tuple(own.get(phase, 0.0) for phase in PHASES))

    def reading(self, at: float, ranks: int) -> RankReading:
        """Return it at a time."""
        totals = self.alignment.unplanned
        aligned = AlignedCounters(
            totals.steps, totals.seconds, totals.floor, totals.skew, dict(totals.blame),
            dict(zip(PHASES, self.alignment.phases, strict=True)),
        )  # fmt: skip
        counters = Counters(self._steps, dict(self._seconds), micro_steps=self._micro_steps, aligned=aligned)
        return RankReading(
            self.rank, at, 0.0, "all", world_size=ranks, last_progress=at, stage=self.stage, counters=counters
        )


def judged(lines: Sequence[Operation]) -> Mapping[tuple[str, Any], str]:
    """Return the sentence of each finding, by its kind and its rank or stage."""
    trainees = {one.rank: Trainee(one.rank, one.stage) for one in lines}
    judge, at = RunJudge(("trace", "")), 0.0
    judge.update(at, {rank: one.reading(at, len(trainees)) for rank, one in trainees.items()})
    by_step: dict[int, list[Operation]] = defaultdict(list)
    for one in lines:
        by_step[one.step].append(one)
    found: dict[tuple[str, Any], str] = {}
    for number, (_, done) in enumerate(sorted(by_step.items()), start=1):
        at += _take(number, at, done, trainees)
        verdict = judge.update(at, {rank: one.reading(at, len(trainees)) for rank, one in trainees.items()})
        for finding in verdict.findings:
            candidate = finding.candidate
            place = candidate.place.rank if candidate.place.rank is not None else candidate.evidence.get("stage")
            found.setdefault((candidate.kind, place), sentence(judge.run, candidate))
    return found


def _take(number: int, began: float, done: Sequence[Operation], trainees: Mapping[int, Trainee]) -> float:
    """Give one step to all ranks, and return its length."""
    length = max(one.begins + one.seconds for one in done)
    micro_batches = 1 + max(one.micro_batch for one in done)
    spent: dict[int, dict[str, float]] = {rank: defaultdict(float) for rank in trainees}
    for one in done:
        if phase := OPERATIONS.get(one.name):
            spent[one.rank][phase] += one.seconds
    steps = {
        rank: trainee.step(number, began + length, length, spent[rank], micro_batches)
        for rank, trainee in trainees.items()
    }
    for stage in {one.stage for one in trainees.values()}:
        peers = [one for one in trainees.values() if one.stage == stage]
        if len(peers) > 1:
            account([one.alignment for one in peers], [steps[one.rank] for one in peers])
    return length


PUBLISHED = {
    "AR": ("one worker slowed 1.97 times, of stage 0", ("straggler", 0)),
    "ST": ("unequal stages, the last is the slowest", ("stage_imbalance", 3.0)),
}


def stragglers(directory: Path) -> Iterator[Result]:
    """Yield what is found in each trace of a job with stragglers."""
    for path in sorted(directory.glob("trace-*.parquet")):
        truth, expected = PUBLISHED.get(path.stem.removeprefix("trace-"), ("not known", None))
        found = judged(operations(path))
        yield Result(f"{directory.name}/{path.name}", truth, "; ".join(found.values()) or "-", [*found] == [expected])


def main(arguments: Sequence[str] | None = None) -> int:
    """Judge all traces that are there, print and publish; 1 if one is wrong."""
    parser = report.parser(__doc__)
    parser.add_argument("traces", type=Path, metavar="DIR")
    options = parser.parse_args(arguments)
    results = [*hangs(options.traces / "hangs"), *stragglers(options.traces / "megatron_stragglers")]
    rows = [(one.trace, one.published, one.found, "right" if one.is_right else "WRONG") for one in results]
    right = sum(one.is_right for one in results)
    body = [f"{right} of {len(results)} right.", report.table(("trace", "published", "found", ""), rows)]
    lines = [one._asdict() for one in results]
    report.Report("real_traces", "Traces of others", __doc__, "all right", body, lines).publish(options.save)
    return int(right < len(results))


if __name__ == "__main__":
    sys.exit(main())
