"""Losses and standstills that are not alerts yet, and when they will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil, inf

from rankscope.cli.explaining.alerts import KNOWN
from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus, quoted

STALL = "stall"
LOOKED_BACK = "30m"  # for its start: twice as long as the longest tier
MIN_STALL_SECONDS, PACE = 5.0, 2.0
"""A standstill is shown after so many seconds, and after so many times the longest pause of the last hour."""
LIMIT = min(tier["limit"] for tier in KNOWN["tiers"])


@dataclass(frozen=True)
class NotYet:
    """A loss above the lowest limit of the rules, or a standstill, that has not lasted long enough for an alert."""

    cause: str
    """`stall`, the phase in which a rank is late, or what a run's time is lost to."""
    rank: str | None
    """The rank that slows down the others, if it is a single one."""
    share: float
    """The rank's lag as a part of each step, or the GPU time that is lost beyond the run's baseline."""
    lasts: float
    """Seconds so far."""
    alerts_after_seconds: float | None
    """Seconds; None if its steps are too long to know, the server has no rules, or an exporter decides."""
    phase: str | None = None
    """The phase in which the rank stands still."""

    def as_object(self) -> dict[str, object]:
        """Return its fields by their names in the JSON output; the phase only of a standstill."""
        return {name: value for name, value in asdict(self).items() if name != "phase" or value is not None}


def find(prometheus: Prometheus, where: str) -> NotYet | None:
    """Return the loss or standstill of the run with these labels. Raises PrometheusError."""
    return _standstill(prometheus, where) or _loss(prometheus, where)


def _standstill(prometheus: Prometheus, where: str) -> NotYet | None:
    stands = prometheus.query(f"run:rankscope_stall:seconds{{{where}}}")
    names = ("run:rankscope_patience:seconds", "run:rankscope_planned_patience:seconds")
    patience = [one.value for name in names for one in prometheus.query(f"{name}{{{where}}}")]
    if not stands or not _is_unusual(prometheus, where, stands[0].value, is_planned=len(patience) > 1):
        return None
    rank, phase = _waited_for(prometheus, where)
    if prometheus.query(f"rankscope_run_judged_info{{{where}}}"):
        patience = []  # its exporter decides when it hangs, and sooner
    return NotYet(STALL, rank, 1.0, stands[0].value, max(patience, default=None), phase)


def _is_unusual(prometheus: Prometheus, where: str, stalled: float, *, is_planned: bool) -> bool:
    """Return whether a standstill is longer than those before it, or decided to be a long one by the rules."""
    if prometheus.query(f"run:rankscope_pausing:seconds{{{where}}}"):
        return True
    if is_planned or prometheus.query(f"run:rankscope_paused:info{{{where}}}"):
        return False
    sampled = prometheus.query(f"run:rankscope_stall:sampled{{{where}}} > {MIN_STALL_SECONDS}")
    before = f"max_over_time(run:rankscope_pause:seconds{{{where}}}[1h] offset {ceil(stalled) + 1}s)"
    pauses = [one.value for one in prometheus.query(before)] if sampled else []
    return any(one.value > PACE * max(pauses, default=inf) for one in sampled)


def _waited_for(prometheus: Prometheus, where: str) -> tuple[str | None, str | None]:
    """Return the rank that the others wait for, and its phase: the fewest collectives, or the only one in none."""
    here = prometheus.query(f"rankscope_rank_phase_since_timestamp_seconds{{{where}}}", "rank", "phase")
    phases = {one.labels["rank"]: one.labels["phase"] for one in here}
    issued = prometheus.query(f"rankscope_rank_group_collectives_total{{{where}}}", "rank", "group")
    most: dict[str, float] = {}
    for one in issued:
        most[one.labels["group"]] = max(one.value, most.get(one.labels["group"], 0.0))
    behind = {one.labels["rank"] for one in issued if one.value < most[one.labels["group"]]} & phases.keys()
    found = behind or {rank for rank, phase in phases.items() if phase != "collective_wait"}
    if len(found) != 1:
        return None, None
    (rank,) = found
    return rank, phases[rank]


def _loss(prometheus: Prometheus, where: str) -> NotYet | None:
    """Return the largest loss. It is a rank's if that explains half of the loss to stragglers, as in the rules."""
    lags, losses = (
        prometheus.query(f"topk(1, {series}{{{where}}} > {LIMIT})", label)
        for series, label in (("rank:rankscope_lag:ratio", "rank"), ("run:rankscope_loss:ratio", "cause"))
    )
    largest = max(lags + losses, key=lambda one: one.value, default=None)
    if largest is None:
        return None
    if lags and largest.labels.get("cause") in (None, "straggler") and lags[0].value > largest.value / 2:
        largest = lags[0]
    rank = largest.labels.get("rank")
    began = _began(prometheus, largest, where)
    return NotYet(
        cause=_phase(prometheus, where, rank) if rank is not None else largest.labels["cause"],
        rank=rank,
        share=largest.value,
        lasts=began,
        alerts_after_seconds=_alerts_after_seconds(prometheus, where, largest.value),
    )


def _began(prometheus: Prometheus, loss: Sample, where: str) -> float:
    """Return the seconds for which the loss has been above the limit, or the age of a series that always was."""
    key = "rank" if "rank" in loss.labels else "cause"
    series = f"{loss.name}{{{where},{key}={quoted(loss.labels[key])}}}"
    below = prometheus.query(f"time() - max_over_time(timestamp({series} <= {LIMIT})[{LOOKED_BACK}:15s])")
    exists = prometheus.query(f"time() - min_over_time(timestamp({series})[{LOOKED_BACK}:15s])")
    return next((one.value for one in (*below, *exists)), 0.0)


def _phase(prometheus: Prometheus, where: str, rank: str) -> str:
    blamed = prometheus.query(f"topk(1, rank:rankscope_blame:ratio{{{where},rank={quoted(rank)}}})")
    return blamed[0].labels.get("phase", "unknown") if blamed else "unknown"


def _alerts_after_seconds(prometheus: Prometheus, where: str, share: float) -> float | None:
    """Return the span of the first tier with a limit below the loss and enough steps in its span."""
    interval = prometheus.evaluation_interval()
    rates: Sequence[Sample] = prometheus.query(f"run:rankscope_steps:rate{{{where}}}")
    if interval is None or not rates:
        return None
    spans = [max(tier["evaluations"] * interval, tier["at_least"]) for tier in KNOWN["tiers"] if share > tier["limit"]]
    return next((span for span in spans if span * rates[0].value >= KNOWN["min_steps_to_alert"]), None)
