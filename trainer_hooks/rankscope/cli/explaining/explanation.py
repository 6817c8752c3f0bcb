"""The explanation of what slows down a run: the findings of the diagnosis, as a Prometheus has them from the exporters.

An exporter diagnoses the runs of its node, an analyzer those that span nodes. Nothing is diagnosed here.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.prometheus import Prometheus
from rankscope.cli.explaining.runs import IDENTITY, Run, by_run, latest, live_ranks, run_of
from rankscope.record.phases import PLANNED

LABELS = ("kind", "cause", "rank", "group", "node", "gpu", "uuid", "port", "place", "severity")
"""The labels of a finding, in addition to those of its run. Only the severity may change while it is open."""
TEXTS = ("summary", "evidence", "advice")
RATIO, INFO = "rankscope_finding_ratio", "rankscope_finding_info"
SINCE, END = (f"rankscope_finding_{moment}_timestamp_seconds" for moment in ("since", "end"))
NO_PROGRESS_AFTER = 30
"""Seconds without progress from which on nothing is said to be right."""
STANDSTILLS = ("hang", "crash")
"""The kinds that explain all other losses of the run."""
Key = tuple[str, ...]


@dataclass(frozen=True)
class Finding:
    """An open finding."""

    labels: Mapping[str, str]
    """The values of LABELS."""
    ratio: float
    since: float
    """Unix seconds."""
    texts: Mapping[str, str]
    """The diagnosis' own `summary`, `evidence` and `advice`; empty if the exporter is too old to send them."""

    @property
    def is_critical(self) -> bool:
        """Return whether its severity is `critical`, not `warning`."""
        return self.labels["severity"] == "critical"

    @property
    def stops_run(self) -> bool:
        """Return whether it explains all other findings of the run."""
        return self.labels["kind"] in STANDSTILLS


@dataclass(frozen=True)
class Explanation:
    """The explanation of a run. Ratios are parts of its GPU time."""

    run: Run
    ranks: int
    """The number of live ranks."""
    nodes: int
    is_judged: bool
    """Whether an exporter or an analyzer diagnoses it."""
    not_judged: list[tuple[str, str]]
    """Reasons why it is not diagnosed, or not fully, each with the node that does not answer, or ``."""
    findings: list[Finding]
    """The open findings, the worst first."""
    alerts: list[dict[str, str]]
    """The labels of the firing alerts about its GPUs and exporters, the critical ones first."""
    lost: dict[str, float]
    """By cause; `none` is useful compute."""
    gpu_hours: dict[str, float]
    """Lost by cause since the run began."""
    stalled: float | None = None
    """Seconds since any rank made progress, if they are many."""
    largest_lag: tuple[str, float] | None = None
    """The rank that lags most, and its lag as a part of the step."""
    ended: float | None = None
    """The end of the last rank in unix seconds, if none is alive."""


@dataclass(frozen=True)
class RunInShort:
    """One of several runs in a line."""

    run: Run
    ranks: int
    is_judged: bool
    findings: list[Finding]
    alerts: list[dict[str, str]]
    useful: float | None
    """The ratio of its GPU time that is useful compute."""
    stalled: float | None
    """Seconds since any rank made progress, if they are many."""

    @property
    def order(self) -> tuple[object, ...]:
        """Return a key that sorts the worst run first: findings, then alerts, then runs that nothing diagnoses."""
        worst = self.findings[0] if self.findings else None
        ratio = worst.ratio if worst else 0.0
        known = worst is None, not self.alerts, self.stalled is None, self.is_judged
        return (not (worst and worst.is_critical), *known, -ratio, self.run)


def explain(prometheus: Prometheus, run: Run) -> Explanation:
    """Return the explanation of a run. Raises PrometheusError."""
    where = run.where
    nodes = prometheus.query(f"count by (node) ({live_ranks(where)})")
    is_judged = bool(prometheus.query(f"group({latest(f'rankscope_run_judged_info{{{where}}}')})"))
    findings = _findings(prometheus, where).get(run, [])
    seconds = _largest_first(prometheus, f"rankscope_run_lost_gpu_seconds_total{{{where}}}", "cause")
    lags = _largest_first(prometheus, f"rankscope_rank_lag_ratio{{{where}}}", "rank")
    ends = prometheus.query(f"max(last_over_time(rankscope_rank_exit_timestamp_seconds{{{where}}}[1h]))")
    return Explanation(
        run=run,
        ranks=round(sum(node.value for node in nodes)),
        nodes=len(nodes),
        is_judged=is_judged,
        not_judged=_not_judged(prometheus, run, is_judged),
        findings=findings,
        alerts=_select_alerts(_firing(prometheus), run, _known_ranks(prometheus, where).get(run, []), findings),
        lost=_largest_first(prometheus, f"rankscope_run_lost_ratio{{{where}}}", "cause"),
        gpu_hours={cause: lost / 3600 for cause, lost in seconds.items()},
        stalled=_stalled(prometheus, where).get(run),
        largest_lag=next(iter(lags.items()), None),
        ended=ends[0].value if ends and not nodes else None,
    )


def compare(prometheus: Prometheus, runs: Iterable[Run]) -> list[RunInShort]:
    """Return these runs, the worst first. Asks for all of them at once. Raises PrometheusError."""
    living = by_run(prometheus, f"count by ({IDENTITY}) ({live_ranks()})")
    judged = by_run(prometheus, f"group by ({IDENTITY}) ({latest('rankscope_run_judged_info')})")
    useful = by_run(prometheus, f'max by ({IDENTITY}) (rankscope_run_lost_ratio{{cause="none"}})')
    findings, firing, ranks = _findings(prometheus), _firing(prometheus), _known_ranks(prometheus)
    stalled = _stalled(prometheus)
    found = [
        RunInShort(
            run=run,
            ranks=round(living.get(run, 0.0)),
            is_judged=run in judged,
            findings=findings.get(run, []),
            alerts=_select_alerts(firing, run, ranks.get(run, []), findings.get(run, [])),
            useful=useful.get(run),
            stalled=stalled.get(run),
        )
        for run in runs
    ]
    return sorted(found, key=lambda one: one.order)


def _stalled(prometheus: Prometheus, where: str = "") -> dict[Run, float]:
    """Return the seconds since any rank of a run made progress, if they are many and none is in a planned phase."""
    last = f"rankscope_rank_last_progress_timestamp_seconds{{{where}}}"
    planned = f'rankscope_rank_phase_since_timestamp_seconds{{phase=~"{"|".join(PLANNED)}",{where}}}'
    least = f"min by ({IDENTITY}) (timestamp({last}) - {last}) > {NO_PROGRESS_AFTER}"
    return by_run(prometheus, f"{least} unless on ({IDENTITY}) {planned}")


def _largest_first(prometheus: Prometheus, series: str, label: str) -> dict[str, float]:
    """Return the values of series by label, also if several judges show them.

    Only the newest scrape counts: a cause that is no longer there would make the sum of the ratios larger than 1.
    """
    found = prometheus.query(f"max by ({label}) ({series})", label)
    return {sample.labels[label]: sample.value for sample in sorted(found, key=lambda sample: -sample.value)}


def _findings(prometheus: Prometheus, where: str = "") -> dict[Run, list[Finding]]:
    """Return the open findings of the runs with these labels. Those of a run that stands still explain its other ones.

    Several judges may show one finding, each until it has ended. A finding that has become critical is shown as such.
    """
    names = "|".join((RATIO, SINCE, END, INFO))
    values: dict[tuple[Run, Key], dict[str, float]] = {}
    texts: dict[tuple[Run, Key], dict[str, str]] = {}
    for sample in prometheus.query(latest(f'{{__name__=~"{names}",{where}}}'), "run"):
        key = run_of(sample), tuple(sample.labels.get(name, "") for name in LABELS)
        value = values.setdefault(key, {})
        value[sample.name] = max(sample.value, value.get(sample.name, -inf))
        if sample.name == INFO:
            texts[key] = {name: sample.labels.get(name, "") for name in TEXTS}
    found: dict[Run, dict[Key, Finding]] = {}
    for (run, labels), value in values.items():
        if {RATIO, SINCE} <= value.keys() and value[SINCE] > value.get(END, -inf):
            named = dict(zip(LABELS, labels, strict=True))
            finding = Finding(named, value[RATIO], value[SINCE], texts.get((run, labels), {}))
            found.setdefault(run, {})[labels] = finding
    return {run: _worst_first(of_run) for run, of_run in found.items()}


def _worst_first(found: Mapping[Key, Finding]) -> list[Finding]:
    critical = {key[:-1] for key, one in found.items() if one.is_critical}
    shown = [one for key, one in found.items() if one.is_critical or key[:-1] not in critical]
    shown.sort(key=lambda one: (not one.is_critical, -one.ratio, one.since))
    return [one for one in shown if one.stops_run] or shown


def _not_judged(prometheus: Prometheus, run: Run, is_judged: bool) -> list[tuple[str, str]]:
    """Return why a run is not diagnosed; of one that is, which nodes do not answer."""
    reasons = f"rankscope_analyzer_run_not_judged_info{{{run.where}}}"
    if not is_judged:
        limits = f"rankscope_exporter_runs_not_judged{{{run.of_owner}}} > 0"
        reasons += f" or {limits} and on (job, instance) rankscope_rank_info{{{run.where}}}"
    found = prometheus.query(f"group by (reason, node) ({reasons})", "reason")
    pairs = sorted((sample.labels["reason"], sample.labels.get("node", "")) for sample in found)
    return [(reason, node) for reason, node in pairs if node or not is_judged]


def _firing(prometheus: Prometheus) -> list[Sample]:
    return prometheus.query('ALERTS{alertname=~"Rankscope.+",alertstate="firing"}', "alertname")


def _known_ranks(prometheus: Prometheus, where: str = "") -> dict[Run, list[Sample]]:
    """Return the ranks of the last hour of the runs with these labels."""
    ranks: dict[Run, list[Sample]] = {}
    for sample in prometheus.query(f"last_over_time(rankscope_rank_info{{{where}}}[1h])", "run"):
        ranks.setdefault(run_of(sample), []).append(sample)
    return ranks


def _select_alerts(
    firing: Iterable[Sample], run: Run, ranks: list[Sample], findings: Iterable[Finding]
) -> list[dict[str, str]]:
    """Return the labels of the alerts about the run's GPUs and exporters; the others are its findings."""
    is_standstill = any(one.stops_run for one in findings)
    found = [
        {name: value for name, value in sample.labels.items() if name != "alertstate"}
        for sample in firing
        if sample.labels.get("cluster", "") == run.cluster and _concerns(sample.labels, run, ranks, is_standstill)
    ]
    return sorted(found, key=lambda labels: (labels.get("severity") != "critical", sorted(labels.items())))


def _concerns(labels: Mapping[str, str], run: Run, ranks: Iterable[Sample], is_standstill: bool) -> bool:
    """Return whether an alert is about a GPU of the run, or about an exporter of its ranks."""
    if labels.get("run"):
        is_about_gpu = labels["alertname"].startswith("RankscopeGpu") and not is_standstill
        return is_about_gpu and (labels["run"], labels.get("owner", "")) == (run.name, run.owner)
    place = "uuid" if labels.get("uuid") else "instance"
    return bool(labels.get(place)) and any(rank.labels.get(place) == labels[place] for rank in ranks)
