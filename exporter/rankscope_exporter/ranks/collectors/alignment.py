"""The waits of this machine's ranks for each other, step by step: transfer, skew and blame."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client.core import Metric

from rankscope_exporter.diagnosis.readings import AlignedCounters
from rankscope_exporter.exposition.metric import MetricTable, whole
from rankscope_exporter.exposition.sample_cache import SampleCache, families
from rankscope_exporter.ranks.metric import rank_metrics
from rankscope_exporter.ranks.rank import Key, Scan
from rankscope_exporter.ranks.readings import aligned_counters
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

ALIGNED: MetricTable[Alignment, Alignment] = rank_metrics(whole)
METRICS = (
    ALIGNED.counter(
        "aligned_steps_total",
        "Steps that were compared with the same step of all other ranks of the group (and pipeline stage) on this "
        "machine; absent for a rank that is alone here. Measured on the GPUs if their time is measured, else on the "
        "training threads. The next four metrics are for these steps.",
        lambda alignment: alignment.steps,
    ),
    ALIGNED.counter("aligned_step_seconds_total", "Length of these steps.", lambda alignment: alignment.seconds),
    ALIGNED.counter(
        "transfer_floor_seconds_total",
        "Least wait of any rank in each step, the same for the whole group. It is transfer, not a slow rank: high with "
        "low skew, the network is slow.",
        lambda alignment: alignment.floor,
    ),
    ALIGNED.counter(
        "skew_seconds_total",
        "Wait of this rank in each step beyond the transfer floor: for a rank that arrived later.",
        lambda alignment: alignment.skew,
    ),
    ALIGNED.counter(
        "blame_seconds_total",
        "Mean wait of the other ranks in steps in which this rank waited least, by the phase that took this rank "
        "longer than the others; `unknown` if no phase explains half. If all ranks have blame, they are late in turn.",
        lambda alignment: alignment.blame,
        "phase",
    ),
)


class AlignedSteps:
    """The collector of the alignment."""

    name = "alignment"
    help = "training ranks step by step: transfer, skew and blame"
    metrics = METRICS

    def __init__(self) -> None:
        self._alignment = StepAlignment()
        self._caches: dict[Key, SampleCache[Alignment]] = {}
        self.counters: Mapping[Key, AlignedCounters] = {}
        """The last poll's result by rank, for any thread: a poll replaces it and does not change it."""

    def poll(self, scan: Scan) -> list[Metric]:
        """Align the new steps."""
        found = self._alignment.take(scan.ranks)
        self.counters = {one.key: aligned_counters(one) for one in found}
        self._caches = {one.key: self._caches.get(one.key) or SampleCache(METRICS, one.key) for one in found}
        return families(METRICS, [self._caches[one.key].write(one) for one in found])
