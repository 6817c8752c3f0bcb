"""The dashboard *Node*: one exporter and its GPUs: what is wrong, who uses them, and how they work."""

from __future__ import annotations

from rankscope_dashboards.allocation import ALLOCATION, GPUS, RANKS, TIMELINE
from rankscope_dashboards.dashboard import Dashboard, Row, label_values
from rankscope_dashboards.findings import findings_table
from rankscope_dashboards.hardware import ERRORS, HOTTEST, NETWORK, OVER_TIME, THROTTLED
from rankscope_dashboards.links import NODE_UID
from rankscope_dashboards.node_verdict import FIRING, FOUND_HERE, NODE_VERDICT, OTHER_ALERTS
from rankscope_dashboards.panels import NORMAL, Query, lines
from rankscope_dashboards.selectors import HERE
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import BAD

VARIABLES = (
    label_values(
        "instance",
        "rankscope_exporter_build_info",
        label="Instance",
        description="The exporter; each node has one.",
    ),
)

OVERVIEW = Row(
    "Is anything wrong?",
    (
        NODE_VERDICT,
        HOTTEST,
        THROTTLED,
        ERRORS,
        findings_table(FOUND_HERE, OTHER_ALERTS, has_runs=True),
        GPUS,
        TIMELINE,
    ),
)

EXPORTER = Row(
    "Exporter",
    (
        table_of(
            "Collectors",
            "For each collector, whether it succeeded in the last scrape, and how long it took.",
            [
                Query(f"max by (collector) (rankscope_exporter_collector_success{{{HERE}}})"),
                Query(f"max by (collector) (rankscope_exporter_collector_duration_seconds{{{HERE}}})"),
            ],
            [
                Column("collector", "Collector"),
                Column("A", "Success", names={1: ("yes", NORMAL), 0: ("no", BAD)}),
                Column("B", "Duration", "s"),
            ],
            width=12,
            empty="the exporter does not answer",
        ),
        lines(
            "Skipped files",
            "Files in the run directories that are not exported as ranks, by reason: no readable record (`truncated`, "
            "`foreign`, `version`, `symlink`, `unreadable`), another user's record of the same run and rank is "
            "exported (`duplicate`), or there are more than the exporter's limits (`too_many_files`, "
            "`too_many_ranks`, `too_many_names`). If a run lacks a rank, look here.",
            "none",
            Query(f"rankscope_exporter_rank_files_skipped{{{HERE}}}", "{{reason}}"),
        ),
    ),
    collapsed=True,
)

NODE = Dashboard(
    uid=NODE_UID,
    title="Node",
    description="GPUs of one node: what is wrong, allocation, utilization, memory, power, errors; and the exporter.",
    variables=VARIABLES,
    rows=(OVERVIEW, ALLOCATION, OVER_TIME, RANKS, NETWORK, EXPORTER),
    alerts=FIRING,
)
