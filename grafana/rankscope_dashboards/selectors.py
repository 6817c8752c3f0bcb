"""What the rows of the dashboards select: of *Node* an exporter, of *Run* a run's ranks, and many ranks as one.

Raw metrics are drawn with `max by`: two exporters may see the same record, or one a rank and one its predecessor,
and a sum would count both.
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
    """The rate of a rank's counter; `more` are further matchers."""
    return f"rate({metric}{{{RANKS}{more}}}[$__rate_interval])"


def by_rank(vector: str) -> str:
    """One series a rank."""
    return f"max by (rank) ({vector})"


def decided(by_exporter: str, by_rules: str) -> str:
    """What the exporter that judges the run says of it; of a run that none judges what the rules say."""
    return f"({by_exporter} or ({by_rules}) unless on (run, owner) run:rankscope_judged:info{{{RUN_ONLY}}})"


def average(vector: str, label: str) -> str:
    """`vector` by `label`, averaged over all chosen ranks, also those that lack a value of the label."""
    return f"sum by ({label}) (max by (rank, {label}) ({vector})) / scalar(count(count by (rank) ({vector})))"


def together(vector: str) -> str:
    """The sum over the chosen ranks, nothing if there is none."""
    return f"sum({by_rank(vector)})"


def age(times: str) -> str:
    """Seconds since an exporter's `times`, by Prometheus' clock: the exporter's own may be wrong."""
    since = f"time() - {times}"
    return f"({since} + on (job, instance, cluster) group_left () exporter:rankscope_clock_ahead:seconds or {since})"


def first_of(label: str, vectors: Mapping[str, str]) -> str:
    """The first of `vectors` that is there, its name as the value of `label`."""
    return " or on () ".join(
        f'label_replace({vector}, "{label}", "{name}", "", "")' for name, vector in vectors.items()
    )


def or_nothing_fires(firing: str, watched: str) -> str:
    """The alerts, or a line that there is none if there is what they would be about: of what is not seen none fires."""
    return f'{firing} or on () label_replace(group({watched}), "alertname", "nothing fires", "", "")'


def for_both_runs(expr: str) -> str:
    """`expr`, which asks for the chosen run, for the chosen run and for the one it is compared with."""
    return f"{expr} or {expr.replace(RUN_ONLY, COMPARED)}"
