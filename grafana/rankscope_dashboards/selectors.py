"""Label selectors and aggregations of the dashboards' queries.

Metrics are aggregated with `max by`. A sum would count a rank twice if two exporters read the same record, or one reads
the record of its predecessor. It also removes the labels that a scraper adds.
"""

from __future__ import annotations

import re

HERE = 'instance="$instance"'
GPU = "GPU {{gpu}}"
RUN_ONLY = 'run="$run",owner="$owner"'
RANKS = f'{RUN_ONLY},rank=~"$rank"'
RANK = "rank {{rank}}"
COMPARED = 'run="$compare"'
EXPORTER = "job, instance, cluster"
"""The labels of the series of one scrape."""
LIVE_RANKS = f"rankscope_rank_up{{{RUN_ONLY}}} == 1"
NAMED_RANKS = 8
"""The ranks of a graph that have a line and a name, so that a run of 1,024 ranks can be read."""
ALL_RANKS = 64
"""The largest run all of whose ranks are in a timeline or a table."""
LARGEST = f"The {NAMED_RANKS} ranks with the largest values in the time range; the gray band is all others."


def rate(metric: str, more: str = "") -> str:
    """Return the query of the rate of a counter of the chosen ranks; `more` are further matchers."""
    return f"rate({metric}{{{RANKS}{more}}}[$__rate_interval])"


def by_rank(vector: str) -> str:
    """Return the query with one series for each rank."""
    return f"max by (rank) ({vector})"


def live(vector: str) -> str:
    """Return the query of the series of ranks that are alive."""
    return f"({vector} and on ({EXPORTER}, run, owner, rank) {LIVE_RANKS})"


def over_the_range(vector: str) -> str:
    """Return the query of the mean rates, or the maxima of gauges, of `vector` in the whole time range."""
    whole = re.sub(r"\w+\{[^}]*\}(?!\[)", r"max_over_time(\g<0>[$__range] @ end())", vector)
    return whole.replace("[$__rate_interval]", "[$__range] @ end()")


def largest(vector: str, select: str = "topk", count: int | str = NAMED_RANKS) -> str:
    """Return the query of `vector`, which has a series for each rank, for the ranks with the largest values.

    Each point of a graph has the same ranks. With `bottomk` to `select` them, they are those with the smallest values.
    """
    return f"{vector} and on (rank) {select}({count}, {over_the_range(vector)})"


def others(aggregate: str, vector: str, select: str = "topk") -> str:
    """Return the query of the ranks that `largest` leaves out, as one series: their `max`, `min` or `median`."""
    call = {"median": "quantile(0.5, "}.get(aggregate, f"{aggregate}(")
    return f"{call}{vector} unless on (rank) {select}({NAMED_RANKS}, {over_the_range(vector)}))"


def average(vector: str, label: str) -> str:
    """Return the query of `vector` by `label`, averaged over the chosen ranks that are alive.

    A rank that two exporters show counts twice, and so do its seconds.
    """
    return f"sum by ({label}) ({vector}) / scalar(count(rankscope_rank_up{{{RANKS}}} == 1))"


def total(vector: str) -> str:
    """Return the query of the sum over the chosen ranks, empty if there are none."""
    return f"sum({by_rank(vector)})"


def age(times: str) -> str:
    """Return the query of the seconds since `times`, by the clock of the exporter that shows them.

    Prometheus' clock is used for an analyzer, which shows no clock, and for an exporter that does not answer.
    """
    clock = f"max by ({EXPORTER}) (rankscope_exporter_time_seconds)"
    return f"({clock} - on ({EXPORTER}) group_right () {times} or time() - {times})"


def for_both_runs(expr: str) -> str:
    """Return the query `expr` of the chosen run, extended to the run that it is compared with."""
    return f"{expr} or {expr.replace(RUN_ONLY, COMPARED)}"
