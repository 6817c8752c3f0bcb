"""The dashboard *Cost*: GPU-hours and money by run, user and cause over a week, from the accounts of GPU time.

Lost time is the increase of counters, which a restart of an exporter does not distort. All time is what the nodes'
accounts have gained, as `rankscope report --by` adds it up.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rankscope_dashboards.dashboard import Dashboard, Row
from rankscope_dashboards.links import TO_RUN
from rankscope_dashboards.panels import NORMAL, Panel, Query, lines, value
from rankscope_dashboards.prices import PRICE, priced
from rankscope_dashboards.tables import Column, or_words, table_of
from rankscope_exporter.report.colors import CAUSE_COLORS

SHOWN = 100
"""The most lines of a table."""
STEPS = 100
"""The steps of the time range in which accounts are compared."""
OUTAGE = "1h"
"""An account that is seen again after a longer time counts as a new one, as in `rankscope report --by`."""
NOTHING = "no GPU time counted"
NO_PRICE = "no price"
# Rank 0 is enough for the name of a user.
NAMED = 'last_over_time(rankscope_rank_info{rank="0",user!=""}[$__range])'
USERS = f"topk by (owner) (1, group by (owner, user) ({NAMED}))"

LOST = "sum by (run, owner, cause) (increase(rankscope_run_lost_gpu_seconds_total[$__range])) / 3600"
LOST_OF_RUN = "sum by (run, owner) (increase(rankscope_run_lost_gpu_seconds_total[$__range])) / 3600"


def accounts(window: str, ago: str = "") -> str:
    """Return the query of the GPU seconds in each node's account of a run, as last seen in this window."""
    # Without the analyzer's accounts, which are of the same ranks.
    account = f'last_over_time(rankscope_run_gpu_seconds{{node!=""}}[{window}]{ago})'
    return f"max by (run, owner, node) (sum without (cause) ({account}))"


def gained(before: str) -> str:
    """Return the query of what accounts have gained since `before`; a much smaller one is of the next run."""
    now = accounts("$__rate_interval")
    return f"({now} - ({before} < 2 * {now}) or {now})"


def gpu_hours() -> str:
    """Return the query of the GPU-hours of each run in the time range."""
    step = "$__rate_interval"
    before = accounts(OUTAGE, f" offset {step}")
    steps = f"sum_over_time({gained(before)}[$__range:{step}])"
    # Prometheus aligns the steps, so the last one ends before the time range does.
    since = gained(f"last_over_time({accounts(step)}[{step}:{step}])")
    return f"sum by (run, owner) ({steps} + {since} or {steps} or {since}) / 3600"


ALL = gpu_hours()
SHARE = f"({LOST_OF_RUN}) / on (run, owner) ({ALL})"
MAIN_CAUSE = f"topk by (run, owner) (1, {LOST} > 0)"


def largest(vector: str) -> str:
    """Return the query of the largest values."""
    return f"topk({SHOWN}, {vector})"


def by_user(vector: str) -> str:
    """Return the query of the sum for each owner, with the user's name if it is known."""
    of_owner = f"sum by (owner) ({vector})"
    return f"topk({SHOWN}, {of_owner} * on (owner) group_left (user) {USERS} or on (owner) {of_owner})"


def tile(title: str, description: str, unit: str, expr: str, empty: str = "-") -> Panel:
    """Return a tile of the first line."""
    return replace(value(title, description, unit, Query(expr), width=4, empty=empty), height=4, points=STEPS)


TILES = (
    tile("GPU-hours", "GPU-hours of all runs in the time range.", "none", f"sum({ALL})"),
    tile("Cost", "Their cost, at the price of a GPU-hour that is set above.", "none", priced(f"sum({ALL})"), NO_PRICE),
    tile("Hours lost", "GPU-hours that diagnosed runs have not spent on computing.", "none", f"sum({LOST})"),
    tile(
        "Cost of lost",
        "Their cost, at the price of a GPU-hour that is set above.",
        "none",
        priced(f"sum({LOST})"),
        NO_PRICE,
    ),
    tile(
        "Lost",
        "Lost GPU-hours as a share of the GPU-hours of the diagnosed runs.",
        "percentunit",
        f"sum({LOST_OF_RUN}) / sum({ALL} and on (run, owner) {LOST_OF_RUN})",
    ),
    tile(
        "Not judged",
        "GPU-hours of runs that no exporter or analyzer has judged: what they have lost is unknown.",
        "none",
        f"sum({ALL} unless on (run, owner) {LOST_OF_RUN}) or on () 0 * sum({ALL})",
    ),
)

CAUSE_COLUMN = {cause: (cause, color) for cause, color in CAUSE_COLORS.items()} | {NOTHING: (NOTHING, NORMAL)}


def table(*arguments: Any, **options: Any) -> Panel:
    """Return a table whose queries compare accounts in STEPS steps."""
    return replace(table_of(*arguments, **options), points=STEPS)


BY_RUN = Row(
    "Which runs cost most?",
    (
        table(
            "By run",
            "GPU-hours in the time range. What a run has lost is unknown, and empty, if nothing has diagnosed it. "
            f"At most {SHOWN} runs, those that have lost most.",
            [
                Query(or_words(largest(ALL), "cause", NOTHING)),
                Query(largest(LOST_OF_RUN)),
                Query(largest(SHARE)),
                Query(largest(priced(ALL))),
                Query(largest(priced(LOST_OF_RUN))),
                Query(largest(MAIN_CAUSE)),
                Query(largest(f"sum by (run, owner) ({LOST_OF_RUN}) * on (owner) group_left (user) {USERS}")),
            ],
            [
                Column("run", "Run", filterable=True, link=TO_RUN),
                Column("user", "User"),
                Column("A", "GPU-hours", width=84),
                Column("D", "Cost", width=84),
                Column("B", "GPU-hours lost", width=84),
                Column("E", "Cost of lost", width=84),
                Column("C", "Lost", "percentunit", bar=True),
                Column("cause", "Most to", filterable=True, names=CAUSE_COLUMN),
                Column("owner", "Owner", hidden=True),
            ],
            height=10,
            empty="no exporter has counted GPU time in this time range",
            sort="B",
        ),
    ),
)

BY_CAUSE = f"sum by (cause) ({LOST}) > 0"

BY_CAUSE_AND_USER = Row(
    "To what, and whose?",
    (
        table(
            "By cause",
            "GPU-hours that diagnosed runs have lost in the time range, by cause. docs/lost-time.md explains them.",
            [
                Query(or_words(BY_CAUSE, "cause", NOTHING)),
                Query(f"({BY_CAUSE}) / on () group_left () sum({LOST})"),
                Query(priced(BY_CAUSE)),
            ],
            [
                Column("cause", "Cause", filterable=True, names=CAUSE_COLUMN),
                Column("A", "GPU-hours lost", width=84),
                Column("B", "Share", "percentunit", bar=True),
                Column("C", "Cost", width=84),
            ],
            width=12,
            height=10,
            empty="no exporter or analyzer has counted lost GPU time in this time range",
            sort="A",
        ),
        table(
            "By user",
            "GPU-hours in the time range by the owner of the runs. The name is empty if no exporter knows it.",
            [
                Query(by_user(ALL)),
                Query(by_user(LOST_OF_RUN)),
                Query(by_user(priced(ALL))),
                Query(by_user(priced(LOST_OF_RUN))),
            ],
            [
                Column("user", "User"),
                Column("owner", "UID", width=56),
                Column("A", "GPU-hours", width=64),
                Column("C", "Cost", width=64),
                Column("B", "GPU-hours lost", width=64),
                Column("D", "Cost of lost", width=64),
            ],
            width=12,
            height=10,
            empty="no exporter has counted GPU time in this time range",
            sort="B",
        ),
        lines(
            "GPUs lost, by cause",
            "How many GPUs are lost to each cause on average: 2 means that as much GPU time is lost as two GPUs have.",
            "none",
            Query("sum by (cause) (rate(rankscope_run_lost_gpu_seconds_total[$__rate_interval])) > 0", "{{cause}}"),
            colors=CAUSE_COLORS,
            width=24,
            empty="no exporter or analyzer has counted lost GPU time in this time range",
        ),
    ),
)

COST = Dashboard(
    uid="rankscope-cost",
    title="Cost",
    description="GPU-hours and money by run, user and cause over a week.",
    variables=(PRICE,),
    rows=(Row("What did it cost?", TILES), BY_RUN, BY_CAUSE_AND_USER),
    time_range="7d",
    refresh="",
)
