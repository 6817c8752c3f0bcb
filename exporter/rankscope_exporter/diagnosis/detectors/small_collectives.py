"""Many small collectives in each step, for example metrics that are averaged over the ranks for every batch.

Operations of up to `small_collective_bytes` on average count, except DDP's gradients, sends and receives. The loss is
the training thread's time in them, without the wait for late ranks. If the group is measured on the device, the time by
operation is unknown. The loss is then their share of the transfer time by their number, if it moves too few bytes for
any link to need that long. While a rank is late, there is no finding: many collectives in a step may wait for it in
turn. The cause is `parallelism` if the job's layout needs collectives within a step (tensor, context or expert
parallelism, FSDP).
"""

from __future__ import annotations

from collections.abc import Iterator

from rankscope_exporter.diagnosis.detectors.loss import LossDetector, Window, default_allowance
from rankscope_exporter.diagnosis.facts import RankFacts, RunFacts
from rankscope_exporter.diagnosis.findings import Candidate
from rankscope_exporter.diagnosis.late_set import Ranks
from rankscope_exporter.diagnosis.thresholds import Thresholds

KIND = "small_collectives"
SENDS = ("send", "recv")
EXCLUDED = ("ddp_all_reduce", *SENDS)


def measure(window: Window) -> float:
    """Return the loss to small collectives; 0 if a step has few of them."""
    run, thresholds = window.run, window.thresholds
    one = run.first
    if one is None or calls_per_step(run, thresholds) < thresholds.small_collectives_per_step:
        return 0.0
    transfer = window.lost.get("transfer", 0.0)  # without the wait for late ranks
    if not one.device_scale:
        seconds = one.spent.collectives.seconds
        return min(sum(seconds.get(op, 0.0) for op in _small(one, thresholds)) / one.seconds, transfer)
    moved, calls = sum(one.spent.collectives.bytes.values()) / one.seconds, one.spent.collectives.calls
    small, sends = (sum(calls.get(op, 0.0) for op in ops) for ops in (_small(one, thresholds), SENDS))
    is_latency = moved <= thresholds.latency_bound_bytes * transfer
    return transfer * small / (small + sends) if is_latency else 0.0


def calls_per_step(run: RunFacts, thresholds: Thresholds) -> float:
    """Return the number of small collectives per step."""
    one = run.first
    if one is None or not one.spent.iterations:
        return 0.0
    return sum(one.spent.collectives.calls[op] for op in _small(one, thresholds)) / one.spent.iterations


def _small(one: RankFacts, thresholds: Thresholds) -> Iterator[str]:
    collectives = one.spent.collectives
    for op, calls in collectives.calls.items():
        is_small = collectives.bytes.get(op, 0.0) <= thresholds.small_collective_bytes * calls
        if op not in EXCLUDED and calls > 0 and is_small:
            yield op


def explain(window: Window, _ranks: Ranks) -> Candidate | None:
    """Return the loss with the number of collectives per step; None while a rank is late."""
    run = window.run
    if run.max_lag > window.thresholds.loss:
        return None
    evidence = {"collectives_per_step": calls_per_step(run, window.thresholds)}
    cause = "parallelism" if any(one.now.parallelism for one in run.ranks) else ""
    return Candidate(KIND, measure(window), cause, evidence=evidence)


DETECTORS = (LossDetector(KIND, measure, explain, default_allowance, explained_by=("straggler",)),)
