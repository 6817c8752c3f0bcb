"""Panels by rank that stay readable with 1,024 ranks: graphs of the worst ranks, and the timeline of the lag."""

from __future__ import annotations

from collections.abc import Sequence

from rankscope_dashboards.links import Link, node_link, rank_link
from rankscope_dashboards.panels import NO_DATA, REST, REST_LEAST, Panel, Query, lines, timeline
from rankscope_dashboards.selectors import (
    ALL_RANKS,
    LARGEST,
    NAMED_RANKS,
    RANK,
    RANKS,
    RUN_ONLY,
    by_rank,
    largest,
    others,
    over_the_range,
)
from rankscope_exporter.diagnosis.thresholds import Thresholds

POINTS = 60
"""Of a graph by rank: a run of 1,024 ranks has thousands of series, of which each point is computed."""
SHOW_RANK: Sequence[Link] = (rank_link("${__field.labels.rank}"),)


def line_by_rank(
    title: str,
    description: str,
    unit: str,
    vector: str,
    *,
    least: bool = False,
    min_val: float | None = 0,
    max_val: float | None = None,
    limit: float | None = None,
    width: int = 8,
    empty: str = NO_DATA,
) -> Panel:
    """Return a graph of the ranks with the largest values of `vector`, or the `least` ones, and of the others' band."""
    series = by_rank(vector)
    select, which = ("bottomk", LARGEST.replace("largest", "smallest")) if least else ("topk", LARGEST)
    return lines(
        title,
        f"{description} {which}",
        unit,
        Query(largest(series, select), RANK),
        Query(others("max", series, select), REST, rare=True),
        Query(others("min", series, select), REST_LEAST, rare=True),
        min_val=min_val,
        max_val=max_val,
        limit=limit,
        width=width,
        empty=empty,
        links=SHOW_RANK,
        band=True,
        points=POINTS,
    )


LAG = by_rank(f"rankscope_rank_lag_ratio{{{RANKS}}}")
WHOLE = over_the_range(LAG)
COUNT = f"(count({WHOLE}) or on () vector(0))"
MANY = f"{COUNT} > {ALL_RANKS}"
NAMED = f"scalar({NAMED_RANKS} + {ALL_RANKS - NAMED_RANKS} * ({COUNT} <= bool {ALL_RANKS}))"
ROOMY = 24
"""The most rows whose names do not overlap."""
SHOWN_NODES = 14
PLACES = f"max by (rank, node, instance) (rankscope_rank_info{{{RUN_ONLY}}})"
LAG_BY_NODE = f"max by (node, instance) ({PLACES} * on (rank) group_left () {LAG})"
WORST_NODES = f"topk({SHOWN_NODES}, {over_the_range(LAG_BY_NODE)})"
SHOWN = largest(LAG, count=NAMED)
# Each row has a name if there is room, otherwise the worst ranks and every tenth.
EVERY_TENTH = WHOLE.replace(RANKS, f'{RANKS},rank=~".*0"')
LABELED = f"(topk(scalar({NAMED_RANKS} + {ROOMY - NAMED_RANKS} * ({COUNT} <= bool {ROOMY})), {WHOLE}) or {EVERY_TENTH})"
_NAMES = (
    f'label_replace({SHOWN} and on (rank) {LABELED}, "row", "rank $1", "rank", "(.*)")'
    f' or label_replace({SHOWN} unless on (rank) {LABELED}, "row", " ", "", "")'
)
# Prometheus sorts the series of a graph by their labels as texts.
IN_ORDER = _NAMES
for _digits, _zeros in ((".", "000"), ("..", "00"), ("...", "0"), ("....", "")):
    IN_ORDER = f'label_replace({IN_ORDER}, "at", "{_zeros}$1", "rank", "({_digits})")'

LOSS = Thresholds().loss
FAINT = "#80808018"
LAG_STEPS = ((None, FAINT), (LOSS / 2, "#f7deb0"), (LOSS, "#f0b95b"), (2 * LOSS, "#c98204"), (4 * LOSS, "#8c4a1a"))

LAG_TIMELINE = timeline(
    "Lag by rank over time",
    "How much less a rank waits than the others of its group, as a share of the step: in synchronous training all "
    f"ranks have the same step time, and the others wait for the rank that waits least. Up to {ALL_RANKS} ranks, each "
    f"has a row. Of more, the {NAMED_RANKS} with the largest lag have one, then each node has its worst rank (at most "
    f"{SHOWN_NODES} nodes), and the last rows are the largest lag and the median of the other ranks. Rows "
    "are empty while no step is measured, as in a hang.",
    Query(IN_ORDER, "{{row}}"),
    Query(f"{LAG_BY_NODE} and on (node) {WORST_NODES} and on () ({MANY})", "{{node}}", rare=True),
    Query(f"{others('max', LAG)} and on () ({MANY})", "other ranks, largest", rare=True),
    Query(f"{others('median', LAG)} and on () ({MANY})", "other ranks, median", rare=True),
    unit="percentunit",
    steps=LAG_STEPS,
    links=(*SHOW_RANK, node_link("${__field.labels.instance}")),
    height=12,
    empty="no steps of several ranks of a group",
    points=POINTS,
)
