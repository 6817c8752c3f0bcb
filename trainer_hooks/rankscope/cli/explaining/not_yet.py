"""What is no alert yet: who holds a run up, what it loses, how long it has stood still; and when that is told."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rankscope.cli.explaining.alerts import KNOWN
from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus, quoted

STALL = "stall"
LOOKED_BACK = "30m"  # for when it began: twice as long as the longest tier
LIMIT = min(tier["limit"] for tier in KNOWN["tiers"])


@dataclass(frozen=True)
class NotYet:
    """A loss above the lowest limit of the rules, or a standstill, that has not lasted long enough for an alert."""

    cause: str
    """`stall`, the phase in which a rank is late, or what a run's time is lost to."""
    rank: str | None
    """Who holds the others up, if it is one."""
    share: float
    """The part of each step by which the rank does, or of the GPU time that is lost beyond what the run is used to."""
    lasts: float
    """Seconds, so far."""
    alerts_after_seconds: float | None
    """Seconds; None if its steps are too long to say so, or this server does not know the rules."""

    def as_object(self) -> dict[str, object]:
        """Its fields by their names in the JSON output."""
        return asdict(self)


def find(prometheus: Prometheus, where: str) -> NotYet | None:
    """Of the run that has these labels. Raises PrometheusError."""
    return _standstill(prometheus, where) or _loss(prometheus, where)


def _standstill(prometheus: Prometheus, where: str) -> NotYet | None:
    stands = prometheus.query(f"run:rankscope_stall:seconds{{{where}}} and run:rankscope_pausing:seconds{{{where}}}")
    if not stands:
        return None
    names = ("run:rankscope_patience:seconds", "run:rankscope_planned_patience:seconds")
    patience = [one.value for name in names for one in prometheus.query(f"{name}{{{where}}}")]
    return NotYet(STALL, None, 1.0, stands[0].value, max(patience, default=None))


def _loss(prometheus: Prometheus, where: str) -> NotYet | None:
    """Of one rank where it explains half of what is lost to stragglers, as in the rules."""
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
    """For how many seconds it has been above the limit; of a series that always was, for how long it is there."""
    key = "rank" if "rank" in loss.labels else "cause"
    series = f"{loss.name}{{{where},{key}={quoted(loss.labels[key])}}}"
    below = prometheus.query(f"time() - max_over_time(timestamp({series} <= {LIMIT})[{LOOKED_BACK}:15s])")
    there = prometheus.query(f"time() - min_over_time(timestamp({series})[{LOOKED_BACK}:15s])")
    return next((one.value for one in (*below, *there)), 0.0)


def _phase(prometheus: Prometheus, where: str, rank: str) -> str:
    blamed = prometheus.query(f"topk(1, rank:rankscope_blame:ratio{{{where},rank={quoted(rank)}}})")
    return blamed[0].labels.get("phase", "unknown") if blamed else "unknown"


def _alerts_after_seconds(prometheus: Prometheus, where: str, share: float) -> float | None:
    """The span of the first tier that is for so much, and has enough steps in it."""
    interval = prometheus.evaluation_interval()
    rates: Sequence[Sample] = prometheus.query(f"run:rankscope_steps:rate{{{where}}}")
    if interval is None or not rates:
        return None
    spans = [max(tier["evaluations"] * interval, tier["at_least"]) for tier in KNOWN["tiers"] if share > tier["limit"]]
    return next((span for span in spans if span * rates[0].value >= KNOWN["min_steps_to_alert"]), None)
