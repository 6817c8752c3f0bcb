"""A run's alerts as a Prometheus has them, without those that Alertmanager would keep back beside others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rankscope.prometheus import Prometheus, Sample

# Whose value is a part of the run's GPU time; of those in LOST_BY the share is that of a cause; others have none.
SHARES = re.compile(
    "Rankscope(RankLagging|RankZeroLagging|DataBound|CopyBound|TransferBound|RotatingStraggler|SmallCollectives"
    "|CheckpointSlow|Throttled)"
)
LOST_BY = {
    "RankscopeRankStuck": "stall",
    "RankscopeRankCrashed": "idle",
    "RankscopeStartupSlow": "startup",
}

# deploy/alertmanager/alertmanager.yml's inhibit_rules, by `alertname/severity` and the label that is equal.
_ALL_BUT_GPUS = "(?!RankscopeGpu(Lost|Xid|MemoryHeldIdle)/)"
_WAITING = "RankLagging|RankZeroLagging|DataBound|CopyBound|TransferBound|RotatingStraggler"
SILENCES = tuple(
    (re.compile(source), re.compile(target), label)
    for source, target, label in (
        ("RankscopeRankCrashed/", f"(?!RankscopeRankCrashed/){_ALL_BUT_GPUS}Rankscope", "run"),
        ("RankscopeRankStuck/", f"(?!RankscopeRank(Crashed|Stuck)/){_ALL_BUT_GPUS}Rankscope", "run"),
        ("RankscopeStartupSlow/", "RankscopeGpuAllocatedIdle/", "run"),
        (f"Rankscope({_WAITING}|CheckpointSlow|CpuFallback|SmallCollectives)/", "RankscopeLowUtilisation/", "run"),
        ("RankscopeSmallCollectives/", "RankscopeTransferBound/", "run"),
        ("RankscopeGpuLost/", "RankscopeGpu(AllocatedIdle|MemoryHeldIdle|Xid)/", "uuid"),
        ("RankscopeGpuXid/critical", "RankscopeGpuXid/warning", "uuid"),
        ("RankscopeExporterDown/", "RankscopeGpu(Lost|Xid)/", "instance"),
    )
)


@dataclass(frozen=True)
class Alert:
    """One that fires or is pending. `value` and `annotations` are missing where Prometheus no longer has them."""

    labels: dict[str, str]
    is_firing: bool
    value: float | None = None
    annotations: dict[str, str] = field(default_factory=dict)
    since: str = ""

    @property
    def name(self) -> str:
        """As the rules call it."""
        return self.labels["alertname"]

    @property
    def cause(self) -> str | None:
        """As its label says; else the reason of a rank's end, the phase that it is stuck in, or the XID."""
        if "xid" in self.labels:
            return f"xid {self.labels['xid']}"
        return next((self.labels[key] for key in ("cause", "reason", "phase") if self.labels.get(key)), None)

    def share(self, lost: Mapping[str, float]) -> float | None:
        """The part of the run's GPU time that it is about, with what is lost by cause; None if it is about none."""
        return self.value if SHARES.fullmatch(self.name) else lost.get(LOST_BY.get(self.name, ""))

    def silences(self, other: Alert) -> bool:
        """Whether Alertmanager keeps the other one back beside this one. It hears of those alone that fire."""
        return self.is_firing and any(
            source.match(self._key) and target.match(other._key) and label in self._same_labels(other)
            for source, target, label in SILENCES
        )

    @property
    def _key(self) -> str:
        return f"{self.name}/{self.labels.get('severity', '')}"

    def _same_labels(self, other: Alert) -> set[str]:
        return {label for label, value in self.labels.items() if value and value == other.labels.get(label)}


def alerts_of(prometheus: Prometheus, is_now: bool, places: Mapping[str, set[str]]) -> list[Alert]:
    """Those whose run, GPU or exporter is among `places`. Raises PrometheusError."""
    found = prometheus.query('ALERTS{alertname=~"Rankscope.+"}')
    ours = [alert for sample in found if _concerns(alert := _alert(sample), places)]
    heard = [alert for alert in ours if not any(other.silences(alert) for other in ours)]
    rules = prometheus.alert_rules() if heard else []
    return [_with_words(alert, rules) if is_now else _with_value(prometheus, alert, rules) for alert in heard]


def _alert(sample: Sample) -> Alert:
    labels = {name: value for name, value in sample.labels.items() if name != "alertstate"}
    return Alert(labels, sample.labels["alertstate"] == "firing")


def _concerns(alert: Alert, places: Mapping[str, set[str]]) -> bool:
    """By the run; if it names none by the GPU, if it names none by the exporter."""
    by = next((key for key in ("run", "uuid", "instance") if alert.labels.get(key)), "run")
    return alert.labels.get(by) in places[by]


def _with_words(alert: Alert, rules: Iterable[dict[str, Any]]) -> Alert:
    for told in (told for rule in rules for told in rule.get("alerts", ())):
        if told["labels"] == alert.labels:
            return replace(
                alert, value=float(told["value"]), annotations=told["annotations"], since=told.get("activeAt", "")
            )
    return alert


def _with_value(prometheus: Prometheus, alert: Alert, rules: Iterable[dict[str, Any]]) -> Alert:
    """Of a moment in the past nobody has kept the value and the words; the rule's own expression gives the value."""
    rule = next((rule for rule in rules if rule["name"] == alert.name), None)
    if rule is None:
        return alert
    found = (sample for sample in prometheus.query(rule["query"]) if sample.labels.items() <= alert.labels.items())
    link = {name: text for name, text in rule.get("annotations", {}).items() if name == "runbook_url"}
    return replace(alert, value=next((sample.value for sample in found), None), annotations=link)
