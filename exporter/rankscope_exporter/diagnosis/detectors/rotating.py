"""Ranks that slow each other down in turn: the ranks wait, and no single rank explains most of it.

    loss = mean over the other ranks of (own wait - wait of the last rank) in each step,
           less the largest lag of one rank over some seconds, if that is more than by chance

Causes: `gc` if Python's garbage collector explains half of the waiting; `spikes` if single steps are far longer than
the rest; `uneven_work` if the late ranks are late in computing; else the phase that delays the late ranks most.

The work of many jobs is uneven: their samples differ in length. That is a loss of the run, but no fault.
Uneven work is a finding only beyond `uneven_allowance`, or beyond the run's own baseline if that is less.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import NormalDist

from rankscope.record import phases
from rankscope_exporter.diagnosis.detectors import data, straggler
from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, whole_run
from rankscope_exporter.diagnosis.facts import RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.step_times import has_spikes
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "rotating_straggler"
USUAL = "uneven_steps"
"""The kind of the same loss before that allowance: no finding, but one of the ranks may be late by chance."""
UNEVEN_WORK = "uneven_work"
COLLECTOR = "gc"
COLLECTOR_SHARE = 0.5
COLLECTS_FOR = 40.0
"""Seconds: for some time, the collectors of all ranks may run one after the other, each only once."""
MOST_LATE = 1.5


def measure(window: Window) -> Mapping[int | None, float]:
    """Return the mean wait of the other ranks for the last one."""
    is_any_compared = any(one.lag is not None for one in window.run.ranks)
    return whole_run(straggler.mean_skew(window.run) if is_any_compared else None)


def explain(window: Window, _rank: int | None) -> Candidate | None:
    """Return the loss and its cause; None if one rank, or late data on every rank, explains most of it."""
    run, thresholds = window.run, window.thresholds
    ratio = straggler.mean_skew(run)
    late = data.late_phase(run)
    if run.max_lag > thresholds.rotating * ratio:
        return None
    if late in (*phases.COMPUTING, straggler.UNKNOWN, "") and _are_most_late(run, ratio):
        return None
    if late == "data_wait" and data.measure(window).get(None, 0.0) > thresholds.loss + thresholds.allowance:
        return None
    collecting = sum(one.rate(one.spent.gc_seconds) or 0.0 for one in run.ranks)
    evidence = {"max_lag": run.max_lag, "gc": collecting}
    cause = _cause(window, late, collecting, ratio)
    needed = COLLECTS_FOR if cause == COLLECTOR else 0.0
    return Candidate(KIND, ratio, cause, evidence=evidence, needed=needed)


def _are_most_late(run: RunFacts, ratio: float) -> bool:
    """Return whether most ranks are always late: then the others wait far longer than the mean wait for the last one.

    If m of n ranks are equally late, it is (n - 1) / (n - m) times as long. If they are late in turn, all wait alike.
    """
    ranges = [max(waits) - min(waits) for members in run.peers.values() if (waits := [one.wait for one in members])]
    return max(ranges, default=0.0) > MOST_LATE * ratio


def _explain_usual(window: Window, rank: int | None) -> Candidate | None:
    candidate = explain(window, rank)
    return candidate and replace(candidate, kind=USUAL)


def _cause(window: Window, late: str, collecting: float, ratio: float) -> str:
    if collecting > COLLECTOR_SHARE * ratio:
        return COLLECTOR
    if has_spikes(window.run):
        return "spikes"
    return UNEVEN_WORK if late in phases.COMPUTING else late or straggler.UNKNOWN


def allowance(window: Window) -> float:
    """Return the wait for the last of the compared ranks that a healthy run has by chance."""
    ranks = max(map(len, window.run.peers.values()), default=0)
    return wait_by_chance(window.thresholds, ranks)


def wait_by_chance(thresholds: Thresholds, ranks: int) -> float:
    """Return the wait for the last of so many ranks that a healthy run has by chance."""
    return thresholds.step_deviation * expected_wait(ranks) if ranks > 1 else 0.0


def expected_wait(ranks: int) -> float:
    """Return the mean wait for the last of at least two ranks whose steps differ by a standard deviation of 1.

    The expected maximum is Blom's (Statistical Estimates and Transformed Beta-Variables).
    """
    return ranks / (ranks - 1) * NormalDist().inv_cdf((ranks - 0.375) / (ranks + 0.25))


DETECTOR = LossDetector(
    KIND,
    measure,
    explain,
    allowance,
    is_compared=True,
    explained_by=(straggler.KIND,),
    explained_by_cause=(("data_wait", ("data", "")),),
)
USUAL_DETECTOR = LossDetector(USUAL, measure, _explain_usual, allowance, is_compared=True)
