"""Measure the analyzer: bytes of an answer, and CPU time and memory by the number of ranks.

    python -m benchmarks.analyzer --ranks 64 256 1024
    python -m benchmarks.analyzer --targets 10000 --save

Simulated nodes of eight ranks each, which train in steps of 0.2 s on the host's clock. Encoding is an exporter's cost;
reading answers, joining nodes and judging is the analyzer's. `--targets` measures a real analyzer of so many targets
instead (many_targets.py).
"""

from __future__ import annotations

import resource
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks import many_targets
from testing import report
from testing.readings import SLOW, Change, hang
from testing.split_training import SteppingTraining, answer_of

from rankscope_exporter.analyzer.request import unpack
from rankscope_exporter.analyzer.service import Analyzer
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.node_facts.recorder import Part
from rankscope_exporter.node_facts.wire import Answer

RANKS_PER_NODE, PULL = 8, 3
HEALTHY, SLOWED, HUNG = 30, 15, 9
"""Seconds of each part."""


class Cost(NamedTuple):
    """The cost at a number of ranks. Times are CPU seconds per second of training."""

    ranks: int
    answer_bytes: float
    """Bytes of an answer with three seconds of eight ranks, compressed."""
    encoding: float
    """Of one node."""
    reading: float
    judging: float
    hung: float
    """Of all the analyzer's work while the run hangs."""
    megabytes: float
    """Memory of the process, with the simulation."""
    found_after: float | None
    """Seconds from the onset to the finding."""


def _nodes(readings: Sequence[RankReading]) -> Iterator[Sequence[RankReading]]:
    for first in range(0, len(readings), RANKS_PER_NODE):
        yield readings[first : first + RANKS_PER_NODE]


class Measurement:
    """A run, the exporters of its nodes, and the analyzer, with the CPU seconds of each."""

    def __init__(self, ranks: int) -> None:
        self.training = SteppingTraining(ranks)
        self._analyzer = Analyzer(clock=lambda: self.training.now)
        self._moments: dict[int, list[Part]] = defaultdict(list)
        self.encoding = self.reading = self.judging = 0.0
        self.bytes = self.answers = 0
        self.found: float | None = None
        """When the slow rank was found."""

    def train(self, seconds: int, *changes: Change) -> None:
        """Train, and pull every third second."""
        for at, readings in self.training.train(seconds, *changes):
            began = time.process_time()
            for number, of_node in enumerate(_nodes([readings[rank] for rank in sorted(readings)])):
                self._moments[number].append(self.training.encoded(at, of_node))
            self.encoding += time.process_time() - began
            if len(self._moments[0]) == PULL:
                self._pull(at)

    def _pull(self, at: float) -> None:
        bodies = {number: answer_of(number, at, made) for number, made in self._moments.items()}
        self._moments.clear()
        self.bytes, self.answers = self.bytes + sum(map(len, bodies.values())), self.answers + len(bodies)
        began = time.process_time()
        for number, body in bodies.items():
            self._analyzer.take(f"node-{number}", Answer.model_validate_json(unpack(body)), at, at)
        read = time.process_time()
        diagnosis = self._analyzer.update(at)
        self.reading, self.judging = self.reading + read - began, self.judging + time.process_time() - read
        if self.found is None and diagnosis and any(one.findings for one in diagnosis.look.judged.verdicts):
            self.found = at


def measure(ranks: int) -> Cost:
    """Return the cost at this number of ranks."""
    one = Measurement(ranks)
    one.train(HEALTHY)
    one.train(SLOWED, SLOW)
    training, reading, judging = HEALTHY + SLOWED, one.reading, one.judging
    one.train(HUNG, hang("backward", 1))
    hung = one.reading + one.judging - reading - judging
    return Cost(
        ranks,
        one.bytes / one.answers,
        one.encoding / (training + HUNG) / (ranks / RANKS_PER_NODE),
        reading / training,
        judging / training,
        hung / HUNG,
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        one.found and one.found - HEALTHY,
    )


def main() -> None:
    """Print a line for each number of ranks."""
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--targets", type=int, metavar="NUMBER", help="measure with so many targets instead")
    options = parser.parse_args()
    if options.targets:
        with tempfile.TemporaryDirectory() as directory:
            many_targets.page(many_targets.measure(options.targets, Path(directory))).publish(options.save)
        return
    print("ranks | bytes an answer | encoding, reading, judging, in a hang: ms a second | MB | found after")
    for ranks in options.ranks:
        cost = measure(ranks)
        times = ", ".join(f"{1000 * one:.1f}" for one in cost[2:6])
        print(
            f"{cost.ranks} | {cost.answer_bytes:.0f} | {times} | {cost.megabytes:.0f} | {cost.found_after} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
