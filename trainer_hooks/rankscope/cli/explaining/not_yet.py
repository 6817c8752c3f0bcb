"""Losses and standstills that are not alerts yet, and when they will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rankscope.cli.explaining.alerts import KNOWN
from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus, quoted

STALL = "stall"
LOOKED_BACK = "30m"  # for its start: twice as long as the longest tier
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
    """Seconds; None if its steps are too long to know, or the server has no rules."""

    def as_object(self) -> dict[str, object]:
        """Return its fields by their names in the JSON output."""
        return asdict(self)


def find(prometheus: Prometheus, where: str) -> NotYet | None:
    """Return the loss or standstill of the run with these labels. Raises PrometheusError."""
    return _standstill(prometheus, where) or _loss(prometheus, where)


def _standstill(prometheus: Prometheus, where: str) -> NotYet | None:
    stands = prometheus.query(f"run:rankscope_stall:seconds{{{where}}} and run:rankscope_pausing:seconds{{{where}}}")
    if not stands:
        return None
    names = ("run:rankscope_patience:seconds", "run:rankscope_planned_patience:seconds")
    patience = [one.value for name in names for one in prometheus.query(f"{name}{{{where}}}")]
    return NotYet(STALL, None, 1.0, stands[0].value, max(patience, default=None))


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
