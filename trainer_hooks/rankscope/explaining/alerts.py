"""A run's alerts as a Prometheus has them, without those that Alertmanager would keep back beside others."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rankscope.explaining.prometheus import Prometheus, Sample

# Whose value is a part of the run's GPU time; of those in LOST_BY the share is that of a cause; others have none.
SHARES = re.compile(
    "Rankscope(RankLagging|RankZeroLagging|DataBound|CopyBound|TransferBound|RotatingStraggler|SmallCollectives"
    "|CheckpointSlow|Throttled|LaunchBound|DeviceReads)"
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
        (
            f"Rankscope({_WAITING}|CheckpointSlow|CpuFallback|SmallCollectives|LaunchBound|DeviceReads)/",
            "RankscopeLowUtilisation/",
            "run",
        ),
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

    @property
    def key(self) -> str:
        """As SILENCES has it."""
        return f"{self.name}/{self.labels.get('severity', '')}"


def alerts_of(prometheus: Prometheus, is_now: bool, places: Mapping[str, set[str]]) -> list[Alert]:
    """Those whose run, GPU or exporter is among `places`. Raises PrometheusError."""
    found = prometheus.query('ALERTS{alertname=~"Rankscope.+"}')
    ours = [alert for sample in found if _concerns(alert := _alert(sample), places)]
    told = heard(ours)
    rules = prometheus.alert_rules() if told else []
    return _with_words(told, rules) if is_now else _with_values(prometheus, told, rules)


def heard(alerts: Sequence[Alert]) -> list[Alert]:
    """Those that Alertmanager does not keep back beside the others. It hears of those alone that fire."""
    silenced = {
        (target, label, alert.labels[label])
        for alert in alerts
        for source, target, label in SILENCES
        if alert.is_firing and alert.labels.get(label) and source.match(alert.key)
    }

    def is_silenced(alert: Alert) -> bool:
        return any(t.match(alert.key) and alert.labels.get(label) == value for t, label, value in silenced)

    return [alert for alert in alerts if not is_silenced(alert)]


def _alert(sample: Sample) -> Alert:
    labels = {name: value for name, value in sample.labels.items() if name != "alertstate"}
    return Alert(labels, sample.labels["alertstate"] == "firing")


def _concerns(alert: Alert, places: Mapping[str, set[str]]) -> bool:
    """By the run; if it names none by the GPU, if it names none by the exporter."""
    by = next((key for key in ("run", "uuid", "instance") if alert.labels.get(key)), "run")
    return alert.labels.get(by) in places[by]


def _with_words(alerts: Iterable[Alert], rules: Iterable[dict[str, Any]]) -> list[Alert]:
    active = {_identity(told["labels"]): told for rule in rules for told in rule.get("alerts", ())}
    return [_told(alert, active.get(_identity(alert.labels))) for alert in alerts]


def _identity(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def _told(alert: Alert, told: dict[str, Any] | None) -> Alert:
    if told is None:
        return alert
    return replace(alert, value=float(told["value"]), annotations=told["annotations"], since=told.get("activeAt", ""))


def _with_values(prometheus: Prometheus, alerts: Iterable[Alert], rules: Iterable[dict[str, Any]]) -> list[Alert]:
    """Of a moment in the past nobody has kept the values and the words; the rules' expressions give the values."""
    by_name = {rule["name"]: rule for rule in rules}
    wanted = {alert.name for alert in alerts} & by_name.keys()
    values = {name: prometheus.query(by_name[name]["query"]) for name in wanted}
    return [_valued(alert, values.get(alert.name, ()), by_name.get(alert.name, {})) for alert in alerts]


def _valued(alert: Alert, values: Iterable[Sample], rule: Mapping[str, Any]) -> Alert:
    found = (sample.value for sample in values if sample.labels.items() <= alert.labels.items())
    link = {name: text for name, text in rule.get("annotations", {}).items() if name == "runbook_url"}
    return replace(alert, value=next(found, None), annotations=link)
