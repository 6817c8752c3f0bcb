"""A run's alerts as a Prometheus has them, without those that Alertmanager would inhibit beside others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rankscope.cli.explaining.answers import ActiveAlert, Rule, Sample
from rankscope.cli.explaining.prometheus import Prometheus

# What deploy/prometheus/render.py takes out of causes.yml and Alertmanager's alertmanager.yml, without YAML.
KNOWN: dict[str, Any] = json.loads(Path(__file__).with_name("known.json").read_text(encoding="utf-8"))
Matcher = tuple[str, str, str]
"""Label, operator and value, as Alertmanager has them."""


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
        """Its rule's name."""
        return self.labels["alertname"]

    @property
    def cause(self) -> str | None:
        """As its label says; else the reason of a rank's end, the phase that it is stuck in, or the XID."""
        if "xid" in self.labels:
            return f"xid {self.labels['xid']}"
        return next((self.labels[key] for key in ("cause", "reason", "phase") if self.labels.get(key)), None)

    def share(self, lost: Mapping[str, float]) -> float | None:
        """The part of the run's GPU time that it is about, with what is lost by cause; None if it is about none."""
        share_of = KNOWN["shares"].get(self.name, "")
        return self.value if share_of == "value" else lost.get(share_of)

    def matches(self, matchers: Iterable[Matcher]) -> bool:
        """Whether its labels match all of them, as Alertmanager reads them: a missing label is an empty one."""
        return all(_is_matched(self.labels.get(label, ""), operator, value) for label, operator, value in matchers)


def alerts_of(
    prometheus: Prometheus, here: str, is_now: bool, run: Mapping[str, str], targets: Mapping[str, set[str]]
) -> list[Alert]:
    """Those of the cluster `here` of this run, or whose GPU or exporter is among `targets`. Raises PrometheusError."""
    found = prometheus.query(f'ALERTS{{alertname=~"Rankscope.+",{here}}}', "alertname", "alertstate")
    ours = [alert for sample in found if _concerns(alert := _alert(sample), run, targets)]
    alerts = uninhibited(ours)
    rules = prometheus.alert_rules() if alerts else []
    return _with_words(alerts, rules) if is_now else _with_values(prometheus, alerts, rules)


def uninhibited(alerts: Sequence[Alert]) -> list[Alert]:
    """Those that Alertmanager does not inhibit beside the others. It gets those alone that fire."""

    def is_inhibited(alert: Alert) -> bool:
        return any(
            alert.matches(rule["target"]) and any(_inhibits(source, alert, rule) for source in alerts)
            for rule in KNOWN["inhibit_rules"]
        )

    return [alert for alert in alerts if not is_inhibited(alert)]


def _inhibits(source: Alert, target: Alert, rule: Mapping[str, Any]) -> bool:
    is_alike = all(source.labels.get(label) == target.labels.get(label) for label in rule["equal"])
    return source.is_firing and is_alike and source.matches(rule["source"])


def _is_matched(has: str, operator: str, value: str) -> bool:
    is_so = bool(re.fullmatch(value, has)) if "~" in operator else has == value
    return is_so != operator.startswith("!")


def _alert(sample: Sample) -> Alert:
    labels = {name: value for name, value in sample.labels.items() if name != "alertstate"}
    return Alert(labels, sample.labels["alertstate"] == "firing")


def _concerns(alert: Alert, run: Mapping[str, str], targets: Mapping[str, set[str]]) -> bool:
    """By the run and its owner; if it names none by the GPU, if it names none by the exporter."""
    if alert.labels.get("run"):
        return all(alert.labels.get(label, "") == value for label, value in run.items())
    by = next((key for key in ("uuid", "instance") if alert.labels.get(key)), "uuid")
    return alert.labels.get(by) in targets[by]


def _with_words(alerts: Iterable[Alert], rules: Iterable[Rule]) -> list[Alert]:
    active = {_identity(one.labels): one for rule in rules for one in rule.alerts}
    return [_as_active(alert, active.get(_identity(alert.labels))) for alert in alerts]


def _identity(labels: Mapping[str, str]) -> frozenset[tuple[str, str]]:
    return frozenset(labels.items())


def _as_active(alert: Alert, active: ActiveAlert | None) -> Alert:
    if active is None:
        return alert
    return replace(alert, value=active.value, annotations=active.annotations, since=active.since)


def _with_values(prometheus: Prometheus, alerts: Iterable[Alert], rules: Iterable[Rule]) -> list[Alert]:
    """Of a moment in the past nobody has kept the values and the words; the rules' expressions give the values."""
    by_name = {rule.name: rule for rule in rules}
    wanted = {alert.name for alert in alerts} & by_name.keys()
    values = {name: prometheus.query(by_name[name].query) for name in wanted}
    return [_valued(alert, values.get(alert.name, ()), by_name.get(alert.name)) for alert in alerts]


def _valued(alert: Alert, values: Iterable[Sample], rule: Rule | None) -> Alert:
    found = (sample.value for sample in values if sample.labels.items() <= alert.labels.items())
    link = {name: text for name, text in rule.annotations.items() if name == "runbook_url"} if rule else {}
    return replace(alert, value=next(found, None), annotations=link)
