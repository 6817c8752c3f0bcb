"""All ranks wait for their next batch. If only one rank waits for data, it is a straggler instead.

The loss is the ranks' time in `data_wait`. It counts only if the median rank waits for data (with up to three ranks:
each of them). If every loader is too slow, prefetched batches make some ranks wait for data while the others wait for
those ranks; the loss then includes the wait for the late ranks. The cause is what the loader workers do in that time:
`cpu` if they compute, `io` if they wait for storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, default_allowance
from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.late_set import Ranks
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "data"
SIMILAR = 1.5  # the straggler's workers are like the others' if they compute less than this times as much


def measure(window: Window) -> float:
    """Return the run's loss to data waits."""
    run, thresholds = window.run, window.thresholds
    waits = sum(window.lost.get(cause, 0.0) for cause in lost.DATA)
    if late_phase(run) == "data_wait" and is_every_loader_slow(run, thresholds):
        return waits + window.lost.get("straggler", 0.0)
    return waits if _median_wait(run) > thresholds.loss / 2 else 0.0


def explain(window: Window, _ranks: Ranks) -> Candidate | None:
    """Return the loss with what the loader workers do; None if a straggler explains it."""
    if _median_wait(window.run) <= window.thresholds.loss and _is_one_late(window):
        return None
    cause = max(lost.DATA, key=lambda cause: window.lost.get(cause, 0.0)).removeprefix("data").removeprefix("_")
    busy = lost.workers_busy(window.run.ranks)
    working = window.run.lower_median(lost.loader_busy)
    read = sum(one.rate(one.spent.process.read_bytes) or 0.0 for one in window.run.ranks)
    evidence = {"workers_computing": busy, "loader_working": working, "read_bytes_per_second": read or None}
    known = {name: value for name, value in evidence.items() if value is not None}
    return Candidate(KIND, measure(window), cause or "unknown", evidence=known)


def _median_wait(run: RunFacts) -> float:
    """Return the median rank's time in `data_wait`, as a ratio."""
    return run.lower_median(lambda one: one.ratios.get("data_wait", 0.0)) or 0.0


def _is_one_late(window: Window) -> bool:
    """Return whether one rank causes most of the wait for late ranks, and its loader is slower than the others'."""
    run, thresholds = window.run, window.thresholds
    limit = max(thresholds.loss, thresholds.single * window.lost.get("straggler", 0.0))
    late = next((one for one in run.ranks if one.lag == run.max_lag > limit), None)
    return late is not None and not are_loaders_slow(run, thresholds, [late], run.max_lag)


def late_phase(run: RunFacts) -> str:
    """Return the phase that delayed the late ranks most. Empty if no rank was late."""
    blame = Counter[str]()
    for one in run.ranks:
        blame.update(one.spent.aligned.blame)
    phase, seconds = max(blame.items(), key=lambda item: item[1], default=("", 0.0))
    return phase if seconds > 0.0 else ""


def is_every_loader_slow(run: RunFacts, thresholds: Thresholds) -> bool:
    """Return whether every rank's loader is too slow, by the workers' own clocks or else by their CPU time."""
    working = run.lower_median(lost.loader_busy)
    if working is not None:
        return working > thresholds.loader_busy
    computing = run.lower_median(lambda one: lost.workers_busy((one,)))
    return computing is not None and computing > thresholds.workers_busy


def are_loaders_slow(run: RunFacts, thresholds: Thresholds, late: Sequence[RankFacts], lag: float) -> bool:
    """Return whether the other ranks' loaders are nearly as slow as those of the late ranks.

    They are if they alone would cost more than half of the lag, or if their workers compute about as much.
    """
    working = run.lower_median(lost.loader_busy)
    if working is not None:
        return lag > 2.0 * (1.0 - working)
    own, others = lost.workers_busy((*late,)), run.lower_median(lambda one: lost.workers_busy((one,)))
    return own is not None and others is not None and thresholds.workers_busy < own < SIMILAR * others


DETECTORS = (LossDetector(KIND, measure, explain, default_allowance),)
