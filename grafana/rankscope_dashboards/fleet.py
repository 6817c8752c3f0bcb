"""The dashboard *Fleet*: all runs, all GPUs, and what has changed. It is the home page.

Each query has as many series as there are runs, nodes or holders of GPUs, however many ranks a run has.
"""

from __future__ import annotations

from dataclasses import replace

from rankscope_dashboards.dashboard import Dashboard, Row
from rankscope_dashboards.fleet_gpus import DOWN, IDLE_GPUS, MAP, SICK_GPUS, TROUBLE
from rankscope_dashboards.fleet_runs import (
    ALIVE,
    ALL_RUNS,
    EXITS,
    FAILED,
    FAILURE,
    JUDGED,
    NODES,
    PARTLY_JUDGED,
    RUNS,
    first_of_run,
)
from rankscope_dashboards.links import TO_NODE, TO_RUN
from rankscope_dashboards.panels import NORMAL, Panel, Query, value
from rankscope_dashboards.prices import PRICE
from rankscope_dashboards.selectors import age
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import BAD, CAUTION

FIRING = 'ALERTS{alertstate="firing",alertname=~"Rankscope.+"}'


def tile(title: str, description: str, color: str, expr: str) -> Panel:
    """Return a tile of the first line with a number, which has the color from 1 upwards."""
    return replace(value(title, description, "none", Query(expr), steps=((0, NORMAL), (1, color)), width=4), height=3)


def with_finding(severity: str) -> str:
    """Return the query of the number of runs with an open finding of this severity."""
    runs = f'group by (run, owner) (rankscope_finding_ratio{{severity="{severity}"}})'
    return count_or_zero(runs, JUDGED)


def count_or_zero(vector: str, watched: str) -> str:
    """Return the query of the number of series, which is 0 only if `watched` has data."""
    return f"count({vector}) or on () 0 * count({watched})"


TILES = (
    tile("Critical", "Runs with a critical finding of the diagnosis.", BAD, with_finding("critical")),
    tile("Warning", "Runs with a warning of the diagnosis.", CAUTION, with_finding("warning")),
    tile(
        "Not judged",
        "Live runs that no exporter or analyzer judges, or not fully: nothing, or not everything, is known about them.",
        CAUTION,
        count_or_zero(
            f"({ALIVE} unless on (run, owner) {JUDGED} or {ALIVE} and on (run, owner) {PARTLY_JUDGED})", ALIVE
        ),
    ),
    tile(
        "No answer",
        "Exporters that do not answer: nodes that one has shown in the last hour and none shows now, and targets.",
        BAD,
        count_or_zero(DOWN, "up"),
    ),
    tile(
        "Sick GPUs",
        "GPUs that are lost, throttled, or have errors; the table below has them.",
        CAUTION,
        count_or_zero(SICK_GPUS, "rankscope_gpu_up"),
    ),
    tile(
        "Idle GPUs",
        "GPUs that are allocated or have a process, and run no kernel.",
        CAUTION,
        count_or_zero(IDLE_GPUS, "rankscope_gpu_state_info"),
    ),
)


def change(name: str, age_of_it: str) -> str:
    """Return the query of changes of this kind, with their age in seconds."""
    return f'label_replace({age_of_it} < 3600, "change", "{name}", "", "")'


# Rank 0 is enough: all ranks of a run start together.
RUN_STARTED = first_of_run('last_over_time(rankscope_rank_start_timestamp_seconds{rank="0"}[1h])', "min")
RUN_ENDED = f"{first_of_run(EXITS, 'max')} unless on (run, owner) {ALIVE}"
OF_FINDING = "run, owner, kind, cause, rank, node"


def of_finding(timestamp: str) -> str:
    """Return the query of the ages of findings of the last hour, with their words."""
    ages = f"min by ({OF_FINDING}) ({age(f'last_over_time({timestamp}[1h])')})"
    words = f"topk by ({OF_FINDING}) (1, group by ({OF_FINDING}, summary) (last_over_time(rankscope_finding_info[1h])))"
    found = f"({words} * on ({OF_FINDING}) group_left () {ages})"
    return f"({found} * on (node) group_left (instance) topk by (node) (1, {NODES}) or on ({OF_FINDING}) {found})"


CLOSED = of_finding("rankscope_finding_end_timestamp_seconds")
LAST_SHOWN = "time() - max by (instance, node) (max_over_time(timestamp(rankscope_exporter_ranks_alive)[1h:15s]))"
HAS_FAILED = change("run ended", f"({RUN_ENDED} and on (run, owner) {FAILED})")
CHANGES = " or ".join(
    (
        change("run started", RUN_STARTED),
        f'label_replace({HAS_FAILED}, "summary", "{FAILURE}", "", "")',
        change("run ended", f"({RUN_ENDED} unless on (run, owner) {FAILED})"),
        change("finding opened", of_finding("rankscope_finding_since_timestamp_seconds")),
        change("finding closed", f"({CLOSED} unless on ({OF_FINDING}) rankscope_finding_ratio)"),
        change("exporter down", f"({LAST_SHOWN} and on (instance) {DOWN})"),
    )
)
CHANGE_COLORS = {
    "run started": ("run started", NORMAL),
    "run ended": ("run ended", NORMAL),
    "finding opened": ("finding opened", CAUTION),
    "finding closed": ("finding closed", NORMAL),
    "exporter down": ("exporter down", BAD),
}

LAST_HOUR = Row(
    "What has changed in the last hour?",
    (
        table_of(
            "Changes of the last hour, the newest first",
            "Runs that started or ended, findings that opened or closed, and exporters that no longer answer. "
            f"At most {RUNS}.",
            [Query(f"bottomk({RUNS}, {CHANGES})")],
            [
                Column("A", "Ago", "s", width=90, decimals=1),
                Column("change", "Change", filterable=True, names=CHANGE_COLORS, width=130),
                Column("run", "Run", filterable=True, link=TO_RUN),
                Column("node", "Node", filterable=True, link=TO_NODE, width=120),
                Column("rank", "Rank", width=70),
                Column("summary", "Finding", filterable=True, wrap=True),
                Column("owner", "Owner", hidden=True),
                Column("instance", "Instance", hidden=True),
            ],
            empty="no exporter has shown a change in the last hour",
            sort="-A",
        ),
    ),
)

FLEET = Dashboard(
    uid="rankscope-fleet",
    title="Fleet",
    description="All runs, the worst first, with all nodes and GPUs, and the changes of the last hour.",
    variables=(PRICE,),
    rows=(Row("Is anything wrong?", TILES), ALL_RUNS, MAP, TROUBLE, LAST_HOUR),
    alerts=f"count by (alertname, run) ({FIRING})",
    time_range="1h",
    refresh="30s",
)
