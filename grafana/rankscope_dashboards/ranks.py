"""The row of the dashboard *Run* about the ranks: what each is doing, how they ended, where they run."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.links import node_link, rank_link
from rankscope_dashboards.panels import NORMAL, Query
from rankscope_dashboards.selectors import ALL_RANKS, RANKS, age, live
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import BAD, CAUTION, GOOD, NEUTRAL

ENDINGS = {"finished": ("finished", GOOD), "sigterm": ("SIGTERM", NEUTRAL), "interrupted": ("Ctrl-C", NEUTRAL)} | {
    reason: (reason, BAD) for reason in ("exception", "killed")
}
TRACKERS = f"group by (rank, tracker, id, url) (last_over_time(rankscope_rank_tracker_info{{{RANKS}}}[$__range]))"
VERSIONS = "world_size, backend, torch_version, rankscope_version"
PHASE_FOR = age(f"rankscope_rank_phase_since_timestamp_seconds{{{RANKS}}}")
ISSUED = f"sum by (rank) (max by (rank, group) (rankscope_rank_group_collectives_total{{{RANKS}}}))"
STEPS = f"max by (rank) (rankscope_rank_steps_total{{{RANKS}}})"
BEHIND = f"bottomk({ALL_RANKS}, {ISSUED} or on (rank) {STEPS})"
EXITS = f"last_over_time(rankscope_rank_exit_timestamp_seconds{{{RANKS}}}[$__range])"
PLACES = f"rankscope_rank_info{{{RANKS}}}"


def shown(vector: str) -> Query:
    """Return the query of `vector` for the ranks that the table shows."""
    return Query(f"{vector} and on (rank) {BEHIND}")


RANK = Column("rank", "Rank", link=rank_link("${__value.raw}"), filterable=True, width=85)

NOW = Row(
    "What is each rank doing?",
    (
        table_of(
            "Current state of each rank",
            "The current phase and collective of each rank's host, and for how long. In a hang, the others wait for "
            "the rank that is in no collective or has issued fewer of them. A probe is off after an internal error: "
            f"its values no longer change, and the rank's standard error has the reason. At most {ALL_RANKS} ranks, "
            "those that have issued the fewest collectives.",
            [
                shown(f"max by (rank) (rankscope_rank_up{{{RANKS}}})"),
                shown(f"min by (rank, phase) ({PHASE_FOR})"),
                shown(f"min by (rank) ({live(age(f'rankscope_rank_last_progress_timestamp_seconds{{{RANKS}}}'))})"),
                shown(STEPS),
                shown(f"max by (rank) (rankscope_rank_probes_disabled{{{RANKS}}})"),
                shown(f"max by (rank, op) (rankscope_rank_collective_open_info{{{RANKS}}})"),
                shown(ISSUED),
                shown(f"max by (rank, node, instance, pid) ({PLACES})"),
            ],
            [
                RANK,
                Column("A", "Alive", names={1: ("yes", NORMAL), 0: ("no", NEUTRAL)}, width=70),
                Column("phase", "Phase of the host"),
                Column("B", "For", "s"),
                Column("op", "In collective"),
                Column("G", "Collectives"),
                Column("C", "Last progress", "s"),
                Column("D", "Steps"),
                Column("E", "Probes off", steps=((None, NEUTRAL), (1, CAUTION))),
                Column("node", "Node", filterable=True),
                Column("instance", "Exporter", link=node_link("${__value.raw}")),
                Column("pid", "PID"),
            ],
        ),
        table_of(
            "How ranks ended",
            f"Ranks that have ended, with the reason, the first {ALL_RANKS}. If several ranks crashed, look at the "
            "first one: torchrun then ends the others.",
            [
                # Grafana's dates are in milliseconds.
                Query(
                    f"1000 * max by (rank, reason) (last_over_time(rankscope_rank_exit_info{{{RANKS}}}[$__range]))"
                    f" * on (rank) group_left () bottomk({ALL_RANKS}, max by (rank) ({EXITS}))"
                )
            ],
            [RANK, Column("reason", "Ended", names=ENDINGS), Column("A", "When", "dateTimeAsLocal")],
            width=8,
            empty="no rank has ended",
        ),
        table_of(
            "Versions",
            "The ranks' software: ranks with another version have a line of their own.",
            [
                Query(f"count by ({VERSIONS}) (group by (rank, {VERSIONS}) (last_over_time({PLACES}[$__range])))"),
                Query(f"count by ({VERSIONS}) (group by (node, {VERSIONS}) (last_over_time({PLACES}[$__range])))"),
            ],
            [
                Column("A", "Ranks"),
                Column("B", "Nodes"),
                Column("world_size", "World size"),
                Column("backend", "Backend"),
                Column("torch_version", "torch"),
                Column("rankscope_version", "rankscope"),
            ],
            width=8,
            empty="no rank of this run in this time range",
        ),
        table_of(
            "Experiment trackers",
            "The runs of W&B, MLflow and TensorBoard that the ranks log to. Offline runs, directories and databases "
            "have no page.",
            [Query(f"topk({ALL_RANKS}, {TRACKERS})", rare=True)],
            [
                RANK,
                Column("tracker", "Tracker"),
                Column("id", "Run or directory"),
                Column("url", "Page", is_link=True),
            ],
            width=8,
            empty="no rank logs to a tracker",
        ),
    ),
    collapsed=True,
)
