"""Label selectors and aggregations of the dashboards' queries.

Raw metrics are aggregated with `max by`. A sum would count a rank twice if two exporters read the same record, or one
reads the record of its predecessor.
"""

from __future__ import annotations

from collections.abc import Mapping

HERE = 'instance="$instance"'
GPU = "GPU {{gpu}}"
RUN_ONLY = 'run="$run",owner="$owner"'
RANKS = f'{RUN_ONLY},rank=~"$rank"'
RANK = "rank {{rank}}"
COMPARED = 'run="$compare"'


def rate(metric: str, more: str = "") -> str:
    """Return the query of the rate of a counter of the chosen ranks; `more` are further matchers."""
    return f"rate({metric}{{{RANKS}{more}}}[$__rate_interval])"


def by_rank(vector: str) -> str:
    """Return the query with one series for each rank."""
    return f"max by (rank) ({vector})"


def prefer_exporter(by_exporter: str, by_rules: str) -> str:
    """Return the query of the exporter's result, or of the recording rules' if no exporter diagnoses the run."""
    return f"({by_exporter} or ({by_rules}) unless on (run, owner) run:rankscope_judged:info{{{RUN_ONLY}}})"


def average(vector: str, label: str) -> str:
    """Return the query of `vector` by `label`, averaged over all chosen ranks, also those without a value."""
    return f"sum by ({label}) (max by (rank, {label}) ({vector})) / scalar(count(count by (rank) ({vector})))"


def total(vector: str) -> str:
    """Return the query of the sum over the chosen ranks, empty if there are none."""
    return f"sum({by_rank(vector)})"


def age(times: str) -> str:
    """Return the query of the seconds since an exporter's `times`, corrected to Prometheus' clock."""
    since = f"time() - {times}"
    return f"({since} + on (job, instance, cluster) group_left () exporter:rankscope_clock_ahead:seconds or {since})"


def first_of(label: str, vectors: Mapping[str, str]) -> str:
    """Return the query of the first of `vectors` that has data, with its name as the value of `label`."""
    return " or on () ".join(
        f'label_replace({vector}, "{label}", "{name}", "", "")' for name, vector in vectors.items()
    )


def or_no_alerts(firing: str, watched: str) -> str:
    """Return the query of the firing alerts, or of a line `no alerts` if `watched` has data."""
    return f'{firing} or on () label_replace(group({watched}), "alertname", "no alerts", "", "")'


def for_both_runs(expr: str) -> str:
    """Return the query `expr` of the chosen run, extended to the run that it is compared with."""
    return f"{expr} or {expr.replace(RUN_ONLY, COMPARED)}"
