"""Every rank waits for its data. One that waits alone is a straggler.

The loss is the time that the ranks wait for the next batch, where the middle of the ranks does (of three or fewer each
of them). Where every loader is too slow, the batches that are loaded ahead let some ranks wait for data and the others
for them: then the waiting for ranks whose data is late is part of it. The cause is what loader workers do meanwhile:
`cpu` if they compute, `io` if they wait for storage.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from rankscope_exporter.diagnosis import lost
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, usual, whole_run
from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "data"
ALIKE = 1.5  # workers of all ranks compute alike if they do so for less than this times as long as those of one


def measure(window: Window) -> Mapping[int | None, float]:
    """Return the run's loss."""
    run, thresholds = window.run, window.thresholds
    waits = sum(window.lost.get(cause, 0.0) for cause in lost.DATA)
    if late_phase(run) == "data_wait" and is_every_loader_slow(run, thresholds):
        return whole_run(waits + window.lost.get("straggler", 0.0))
    return whole_run(waits if _middle(run) > thresholds.loss / 2 else 0.0)


def explain(window: Window, _rank: int | None) -> Candidate | None:
    """Return the loss with what the loader workers do; None if it is a straggler's."""
    if _middle(window.run) <= window.thresholds.loss and _is_one_late(window):
        return None
    ratio = measure(window)[None]
    cause = max(lost.DATA, key=lambda cause: window.lost.get(cause, 0.0)).removeprefix("data").removeprefix("_")
    busy = lost.workers_busy(window.run.ranks)
    working = window.run.middle(lost.loader_busy)
    read = sum(one.rate(one.spent.process.read_bytes) or 0.0 for one in window.run.ranks)
    evidence = {"workers_computing": busy, "loader_working": working, "read_bytes_per_second": read or None}
    known = {name: value for name, value in evidence.items() if value is not None}
    return Candidate(KIND, ratio, cause or "unknown", evidence=known)


def _middle(run: RunFacts) -> float:
    """Return for how much of the time the middle of the ranks waits for its data."""
    return run.middle(lambda one: one.ratios.get("data_wait", 0.0)) or 0.0


def _is_one_late(window: Window) -> bool:
    """Whether one rank explains most of the waiting for others, and its loader is slower than theirs."""
    run, thresholds = window.run, window.thresholds
    limit = max(thresholds.loss, thresholds.single * window.lost.get("straggler", 0.0))
    late = next((one for one in run.ranks if one.lag == run.max_lag > limit), None)
    return late is not None and not are_loaders_slow(run, thresholds, late)


def late_phase(run: RunFacts) -> str:
    """Return the phase in which the ranks that others waited for were late most. Empty if no rank was late."""
    blame = Counter[str]()
    for one in run.ranks:
        blame.update(one.spent.aligned.blame)
    phase, seconds = max(blame.items(), key=lambda item: item[1], default=("", 0.0))
    return phase if seconds > 0.0 else ""


def is_every_loader_slow(run: RunFacts, thresholds: Thresholds) -> bool:
    """Return whether every rank's loader is too slow: by the workers' own clocks, else by their CPU time."""
    working = run.middle(lost.loader_busy)
    if working is not None:
        return working > thresholds.loader_busy
    computing = run.middle(lambda one: lost.workers_busy((one,)))
    return computing is not None and computing > thresholds.workers_busy


def are_loaders_slow(run: RunFacts, thresholds: Thresholds, straggler: RankFacts) -> bool:
    """Return whether the other loaders are nearly as slow as that of a rank whose data is late.

    They would slow the run down by more than half of its lag without it; or their workers compute as its own do.
    """
    working = run.middle(lost.loader_busy)
    if working is not None:
        return (straggler.lag or 0.0) > 2.0 * (1.0 - working)
    own, others = lost.workers_busy((straggler,)), run.middle(lambda one: lost.workers_busy((one,)))
    return own is not None and others is not None and thresholds.workers_busy < own < ALIKE * others


DETECTOR = LossDetector(KIND, measure, explain, usual)
