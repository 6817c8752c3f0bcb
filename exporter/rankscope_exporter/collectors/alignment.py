"""What the ranks of this machine waited for each other, step by step: transfer, skew, and who was to blame."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client.core import Metric

from rankscope_exporter.lines import Lines, Values, families
from rankscope_exporter.metric import ReadMetric
from rankscope_exporter.rank_metric import RANK_LABELS
from rankscope_exporter.run_directory import Key, Scan
from rankscope_exporter.step_alignment import Alignment, StepAlignment


def _counter(name: str, text: str, values: Callable[[Alignment], Values], *labels: str) -> ReadMetric[Alignment]:
    return ReadMetric("counter", f"rankscope_rank_{name}_total", text, (*RANK_LABELS, *labels), values=values)


METRICS = (
    _counter(
        "aligned_steps",
        "Steps that could be compared with the same step of every other rank of the group on this machine; absent for "
        "a rank that is alone here, and under NCCL, where the GPU waits and not the training thread. The rest is of "
        "these steps.",
        lambda alignment: alignment.steps,
    ),
    _counter("aligned_step_seconds", "Length of these steps.", lambda alignment: alignment.seconds),
    _counter(
        "transfer_floor_seconds",
        "What in each step even the rank waited that waited least, the same for all of the group: transfer, not a "
        "rank. High with low skew is the network.",
        lambda alignment: alignment.floor,
    ),
    _counter(
        "skew_seconds",
        "What this rank waited in each step beyond that: for a rank that came later.",
        lambda alignment: alignment.skew,
    ),
    _counter(
        "blame_seconds",
        "What the others waited, on average, in the steps in which this rank waited least, by the phase that was "
        "longer in it than in the others; `unknown` where none explains half. Spread over the ranks it is a straggler "
        "that rotates.",
        lambda alignment: alignment.blame,
        "phase",
    ),
)


class AlignedSteps:
    """What the alignment has found so far."""

    name = "alignment"
    help = "training ranks step by step: transfer, skew and blame"

    def __init__(self) -> None:
        self._alignment = StepAlignment()
        self._lines: dict[Key, Lines[Alignment]] = {}

    def look(self, scan: Scan) -> list[Metric]:
        """Align what is new."""
        found = self._alignment.take(scan.ranks)
        self._lines = {one.key: self._lines.get(one.key) or Lines(METRICS, one.key) for one in found}
        return families(METRICS, [self._lines[one.key].write(one) for one in found])
