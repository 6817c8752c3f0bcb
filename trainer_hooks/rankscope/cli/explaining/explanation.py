"""The explanation of what slows down a run, from the series that Rankscope's rules record in a Prometheus.

The verdict is the alert of the run that Alertmanager would send. Ratios and compared numbers are recorded series. So
terminal, notification and dashboards agree.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from rankscope.cli.explaining import not_yet
from rankscope.cli.explaining.alerts import Alert, alerts_of
from rankscope.cli.explaining.answers import Sample
from rankscope.cli.explaining.moments import format_time
from rankscope.cli.explaining.not_yet import NotYet
from rankscope.cli.explaining.prometheus import Prometheus, PrometheusError, quoted

RUNS_SHOWN = 20


class Run(NamedTuple):
    """A run: its name, cluster and owner identify it."""

    name: str
    cluster: str
    """The label of its series; empty without one."""
    owner: str
    """The uid of its user; empty without one."""

    def __str__(self) -> str:
        return f"{self.name} in cluster {self.cluster}" if self.cluster else self.name

    @property
    def here(self) -> str:
        """The matcher of its cluster; an empty one matches series without the label."""
        return f"cluster={quoted(self.cluster)}"

    @property
    def where(self) -> str:
        """The matchers of its series."""
        return f"run={quoted(self.name)},owner={quoted(self.owner)},{self.here}"


@dataclass(frozen=True)
class Explanation:
    """The explanation of a run. Ratios are parts of its GPU time, over the rules' window."""

    run: Run
    ranks: int
    """The number of live ranks."""
    nodes: int
    lost: dict[str, float]
    """By cause; `none` is useful compute."""
    gpu_hours: dict[str, float]
    """Lost by cause since the rules first saw the run."""
    alerts: list[Alert]
    """The alerts that Alertmanager would send, the verdict first."""
    clock: str | None = None
    """The clock by which its ranks are judged: `device`, `host`, or `mixed` if its groups differ."""
    not_yet: NotYet | None = None
    """A loss that does not alert yet, if there is no alert."""
    ended: float | None = None
    """The end of the last rank in unix seconds, if none is alive."""
    host: str | None = None
    gpu: str | None = None
    """Host and GPU of the verdict's rank."""
    compared: dict[str, float] = field(default_factory=dict)
    """Recorded series of the run, and of the verdict's rank."""

    @property
    def verdict(self) -> Alert | None:
        """The alert about what slows down the run; None without an alert."""
        return self.alerts[0] if self.alerts else None


def explain(
    prometheus: Prometheus, name: str | None, cluster: str | None = None, owner: str | None = None, *, is_now: bool
) -> Explanation:
    """Return the explanation of the run with this name, cluster and owner, or the only one. Raises PrometheusError."""
    run = _only(prometheus, (name, cluster, owner), is_now)
    where = run.where
    lost = _by_cause(prometheus.query(f"run:rankscope_lost:ratio{{{where}}}", "cause"))
    ranks = prometheus.query(f"last_over_time(rankscope_rank_info{{{where}}}[1h])")
    alerts = alerts_of(prometheus, run.here, is_now, {"run": run.name, "owner": run.owner}, _targets(ranks))
    if not lost and not alerts and not _has_rules(prometheus, run.here):
        raise PrometheusError(f"{prometheus.url} has run {run}, but {_why_nothing(prometheus, is_now)}")
    alerts.sort(key=lambda alert: _order(alert, lost))
    labels = alerts[0].labels if alerts else {}
    nodes = prometheus.query(f"count by (node) (rank:rankscope_rank_info:live{{{where}}})")
    return Explanation(
        run=run,
        ranks=round(sum(node.value for node in nodes)),
        nodes=len(nodes),
        lost=lost,
        gpu_hours=_by_cause(prometheus.query(f"run:rankscope_lost_gpu_hours:total{{{where}}}", "cause")),
        alerts=alerts,
        clock=_clock(prometheus.query(f"group by (clock) (group:rankscope_clock:info{{{where}}})", "clock")),
        ended=None if nodes else _ended(prometheus, where),
        not_yet=None if alerts else not_yet.find(prometheus, where),
        host=labels.get("node") or _host(labels.get("uuid"), ranks),
        gpu=labels.get("gpu") or _gpu(prometheus, run.here, labels.get("uuid")),
        compared=_compared(prometheus, where, labels),
    )


def _only(prometheus: Prometheus, wanted: tuple[str | None, ...], is_now: bool) -> Run:
    """Return the only run with the given name, cluster and owner, or the only live one. Raises PrometheusError."""
    runs = _runs(prometheus)
    if not runs:
        raise PrometheusError(f"{prometheus.url} {_none(prometheus, is_now)}")
    found = [run for run in runs if all(asked in (None, its) for asked, its in zip(wanted, run, strict=True))]
    if not found:
        words = zip((" ", " in cluster ", " of owner "), wanted, strict=True)
        asked = "".join(f"{word}{value}" for word, value in words if value is not None)
        raise PrometheusError(f"{prometheus.url} has no run{asked}; it has: {_listed(map(str, runs))}")
    if len(found) == 1:
        return found[0]
    living = _by_run(prometheus, "count by (run, cluster, owner) (rank:rankscope_rank_info:live)")
    alive = [run for run in found if run in living]
    if len(alive) != 1:
        raise PrometheusError(f"{prometheus.url} has {len(found)} runs; {_choice(prometheus, found, living)}")
    return alive[0]


def _runs(prometheus: Prometheus) -> list[Run]:
    known = 'rankscope_rank_info or run:rankscope_allocated:ratio or ALERTS{alertname=~"Rankscope.+",run!=""}'
    return sorted(_by_run(prometheus, f"group by (run, cluster, owner) ({known})"))


def _choice(prometheus: Prometheus, runs: Sequence[Run], living: Mapping[Run, float]) -> str:
    """Return the runs to choose from with state, start and last step, the living and the youngest first."""
    began = _by_run(
        prometheus, "max by (run, cluster, owner) (last_over_time(rankscope_rank_start_timestamp_seconds[1h]))"
    )
    steps = _by_run(prometheus, "max by (run, cluster, owner) (last_over_time(rankscope_rank_steps_total[1h]))")

    differ = {
        "--run": {run.name for run in runs},
        "--cluster": {run.cluster for run in runs},
        "--owner": {run.owner for run in runs},
    }

    def described(run: Run) -> str:
        words = [f"{living[run]:.0f} ranks" if run in living else "no live rank"]
        if len(differ["--owner"]) > 1:
            words.insert(0, f"owner {run.owner}")
        if run in began:
            words.append(f"started {format_time(began[run], '%Y-%m-%d %H:%M')}")
        if run in steps:
            words.append(f"step {steps[run]:.0f}")
        return f"{run} ({', '.join(words)})"

    ordered = sorted(runs, key=lambda run: (run not in living, -began.get(run, 0.0), run))
    flags = " and ".join(flag for flag, values in differ.items() if len(values) > 1)
    return f"choose one with {flags}: {_listed(map(described, ordered))}"


def _listed(runs: Iterable[str]) -> str:
    first = list(islice(runs, RUNS_SHOWN + 1))
    return ", ".join(first[:RUNS_SHOWN]) + (", ..." if len(first) > RUNS_SHOWN else "")


def _by_run(prometheus: Prometheus, expression: str) -> dict[Run, float]:
    """Return the values of an expression by run, cluster and owner."""
    samples = prometheus.query(expression, "run")
    return {
        Run(of["run"], of.get("cluster", ""), of.get("owner", "")): value
        for of, value in ((sample.labels, sample.value) for sample in samples)
    }


def _none(prometheus: Prometheus, is_now: bool) -> str:
    """Return that the server has no run, and why."""
    exporters = len(prometheus.query("group by (instance, cluster) (rankscope_exporter_build_info)"))
    if is_now and exporters:
        return f"has no run: it scrapes Rankscope exporters ({exporters}), but none shows a rank"
    if is_now:
        return "has no run and scrapes no Rankscope exporter: see its page /targets"
    if exporters:
        return f"had no run then: it scraped Rankscope exporters ({exporters}), but none showed a rank"
    return "had no run then and scraped no Rankscope exporter"


def _has_rules(prometheus: Prometheus, here: str) -> bool:
    """Return whether the rules record anything: they do for every rank and every GPU."""
    return bool(prometheus.query(f'count({{__name__=~"(run|rank|gpu):rankscope_.+",{here}}})'))


def _why_nothing(prometheus: Prometheus, is_now: bool) -> str:
    """Return why the rules have no series: they are not loaded, or not evaluated yet."""
    interval = prometheus.evaluation_interval() if is_now else None
    if interval is None:
        return "Rankscope's rules are not loaded there (rule_files)"
    return f"Rankscope's rules have recorded nothing about it yet: they are evaluated each {interval:g} s"


def _by_cause(samples: Iterable[Sample]) -> dict[str, float]:
    return {s.labels["cause"]: s.value for s in sorted(samples, key=lambda s: -s.value)}


def _clock(clocks: Sequence[Sample]) -> str | None:
    names = [sample.labels["clock"] for sample in clocks]
    return "mixed" if len(names) > 1 else next(iter(names), None)


def _targets(ranks: Iterable[Sample]) -> dict[str, set[str]]:
    labels = [rank.labels for rank in ranks]
    return {key: {each[key] for each in labels if each.get(key)} for key in ("uuid", "instance")}


def _order(alert: Alert, lost: Mapping[str, float]) -> tuple[bool, bool, float, str]:
    return (
        not alert.is_firing,
        alert.labels.get("severity") != "critical",
        -(alert.share(lost) or 0.0),
        json.dumps(alert.labels, sort_keys=True),
    )


def _ended(prometheus: Prometheus, where: str) -> float | None:
    ends = prometheus.query(f"max(last_over_time(rankscope_rank_exit_timestamp_seconds{{{where}}}[1h]))")
    return ends[0].value if ends else None


def _host(uuid: str | None, ranks: Iterable[Sample]) -> str | None:
    return next((rank.labels.get("node") for rank in ranks if uuid and rank.labels.get("uuid") == uuid), None)


def _gpu(prometheus: Prometheus, here: str, uuid: str | None) -> str | None:
    found = prometheus.query(f"last_over_time(rankscope_gpu_info{{uuid={quoted(uuid)},{here}}}[1h])") if uuid else []
    return next((gpu.labels.get("gpu") for gpu in found), None)


def _compared(prometheus: Prometheus, where: str, verdict: Mapping[str, str]) -> dict[str, float]:
    """Return the series of the run, and of the verdict's rank and group; without one, of the rank with most blame."""
    wanted = [f'{{__name__=~"run:rankscope_.+:(ratio|rate|seconds)",__name__!~".+_(lost|moving|phase):.+",{where}}}']
    if "rank" in verdict:
        wanted.append(f'{{__name__=~"rank:rankscope_.+:(ratio|seconds)",{where},rank={quoted(verdict["rank"])}}}')
        wanted.append(f"group:rankscope_wait:reference{{{where},group={quoted(verdict.get('group', ''))}}}")
    else:
        wanted.append(f"topk(1, rank:rankscope_blame:ratio{{{where}}})")
    return {_series(sample, verdict): sample.value for series in wanted for sample in prometheus.query(series)}


def _series(sample: Sample, verdict: Mapping[str, str]) -> str:
    """Return the series' name with its phase, and with its rank if the verdict has none."""
    shown = [name for name in ("rank", "phase") if name in sample.labels and (name == "phase" or name not in verdict)]
    return sample.name + (f"{{{','.join(f'{name}={quoted(sample.labels[name])}' for name in shown)}}}" if shown else "")
