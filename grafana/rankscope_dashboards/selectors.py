"""Label selectors and aggregations of the dashboards' queries.

Metrics are aggregated with `max by`. A sum would count a rank twice if two exporters read the same record, or one reads
the record of its predecessor. It also removes the labels that a scraper adds.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

HERE = 'instance="$instance"'
GPU = "GPU {{gpu}}"
RUN_ONLY = 'run="$run",owner="$owner"'
RANKS = f'{RUN_ONLY},rank=~"$rank"'
RANK = "rank {{rank}}"
COMPARED = 'run="$compare"'
EXPORTER = "job, instance, cluster"
"""The labels of the series of one scrape."""
LIVE_RANKS = f"rankscope_rank_up{{{RUN_ONLY}}} == 1"
SHOWN_RANKS = 64
"""The most ranks in a graph, so that a run of 1,024 ranks can be drawn."""
LARGEST = f"At most {SHOWN_RANKS} ranks, those with the largest values."


def rate(metric: str, more: str = "") -> str:
    """Return the query of the rate of a counter of the chosen ranks; `more` are further matchers."""
    return f"rate({metric}{{{RANKS}{more}}}[$__rate_interval])"


def by_rank(vector: str) -> str:
    """Return the query with one series for each rank."""
    return f"max by (rank) ({vector})"


def live(vector: str) -> str:
    """Return the query of the series of ranks that are alive."""
    return f"({vector} and on ({EXPORTER}, run, owner, rank) {LIVE_RANKS})"


def largest(vector: str, select: str = "topk") -> str:
    """Return the query of `vector`, which has a series for each rank, for the ranks with the largest values.

    They are those with the largest mean rate, or maximum of a gauge, in the whole time range, so that each point of a
    graph has the same ranks. With `bottomk` to `select` them, they are those with the smallest.
    """
    whole = re.sub(r"\w+\{[^}]*\}(?!\[)", r"max_over_time(\g<0>[$__range] @ end())", vector)
    whole = whole.replace("[$__rate_interval]", "[$__range] @ end()")
    return f"{vector} and on (rank) {select}({SHOWN_RANKS}, {whole})"


def average(vector: str, label: str) -> str:
    """Return the query of `vector` by `label`, averaged over the chosen ranks that are alive."""
    ranks = by_rank(f"rankscope_rank_up{{{RANKS}}} == 1")
    return f"sum by ({label}) (max by (rank, {label}) ({vector})) / scalar(count({ranks}))"


def total(vector: str) -> str:
    """Return the query of the sum over the chosen ranks, empty if there are none."""
    return f"sum({by_rank(vector)})"


def age(times: str) -> str:
    """Return the query of the seconds since `times`, by the clock of the exporter that shows them.

    Prometheus' clock is used for an analyzer, which shows no clock, and for an exporter that does not answer.
    """
    clock = f"max by ({EXPORTER}) (rankscope_exporter_time_seconds)"
    return f"({clock} - on ({EXPORTER}) group_right () {times} or time() - {times})"


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
