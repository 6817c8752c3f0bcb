"""The row of the dashboard *Run* about the ranks: their state, how they ended, where they run."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import NORMAL, Query
from rankscope_dashboards.selectors import RANKS, age, live
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import BAD, CAUTION, GOOD, NEUTRAL

ENDINGS = {"finished": ("finished", GOOD), "sigterm": ("SIGTERM", NEUTRAL), "interrupted": ("Ctrl-C", NEUTRAL)} | {
    reason: (reason, BAD) for reason in ("exception", "killed")
}

TRACKERS = f"group by (rank, tracker, id, url) (last_over_time(rankscope_rank_tracker_info{{{RANKS}}}[$__range]))"
RANKS_SEEN = f"group(last_over_time(rankscope_rank_info{{{RANKS}}}[$__range]))"

RANK_LABELS = "rank, node, local_rank, world_size, group, pid, uuid, backend, torch_version, rankscope_version"

PHASE_FOR = age(f"rankscope_rank_phase_since_timestamp_seconds{{{RANKS}}}")

NOW = Row(
    "What is each rank doing?",
    (
        table_of(
            "Current state of each rank",
            "The current phase and collective of each rank's host, and for how long. In a hang, the others wait for "
            "the rank that is in no collective or has issued fewer of them. A probe is off after an internal error: "
            "its values no longer change, and the rank's standard error has the reason.",
            [
                Query(f"max by (rank) (rankscope_rank_up{{{RANKS}}})"),
                Query(f"min by (rank, phase) ({PHASE_FOR})"),
                Query(f"min by (rank) ({live(age(f'rankscope_rank_last_progress_timestamp_seconds{{{RANKS}}}'))})"),
                Query(f"max by (rank) (rankscope_rank_steps_total{{{RANKS}}})"),
                Query(f"max by (rank) (rankscope_rank_probes_disabled{{{RANKS}}})"),
                Query(f"max by (rank, op) (rankscope_rank_collective_open_info{{{RANKS}}})"),
                Query(f"sum by (rank) (max by (rank, group) (rankscope_rank_group_collectives_total{{{RANKS}}}))"),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Alive", names={1: ("yes", NORMAL), 0: ("no", NEUTRAL)}),
                Column("phase", "Phase of the host"),
                Column("B", "For", "s"),
                Column("op", "In collective"),
                Column("G", "Collectives"),
                Column("C", "Last progress", "s"),
                Column("D", "Steps"),
                Column("E", "Probes off", steps=((None, NEUTRAL), (1, CAUTION))),
            ],
        ),
        table_of(
            "How ranks ended",
            "Ranks that have ended, with the reason. If several ranks crashed, look at the first one: torchrun then "
            "ends the others.",
            [
                # Grafana's dates are in milliseconds.
                Query(
                    f"1000 * max by (rank, reason) (last_over_time(rankscope_rank_exit_info{{{RANKS}}}[$__range]))"
                    " * on (rank) group_left ()"
                    f" max by (rank) (last_over_time(rankscope_rank_exit_timestamp_seconds{{{RANKS}}}[$__range]))"
                )
            ],
            [
                Column("rank", "Rank"),
                Column("reason", "Ended", names=ENDINGS),
                Column("A", "When", "dateTimeAsLocal"),
            ],
            width=8,
            empty="no rank has ended",
        ),
        table_of(
            "Rank details",
            "Node, process, GPU and versions of each rank.",
            [Query(f"max by ({RANK_LABELS}) (last_over_time(rankscope_rank_info{{{RANKS}}}[$__range]))")],
            [
                Column("rank", "Rank"),
                Column("node", "Node"),
                Column("local_rank", "Local rank"),
                Column("world_size", "World size"),
                Column("group", "Group"),
                Column("pid", "PID"),
                Column("uuid", "GPU"),
                Column("backend", "Backend"),
                Column("torch_version", "torch"),
                Column("rankscope_version", "rankscope"),
            ],
            width=16,
        ),
        table_of(
            "Experiment trackers",
            "The runs of W&B, MLflow and TensorBoard that the ranks log to. Offline runs, directories and databases "
            "have no page.",
            [Query(f'{TRACKERS} or on () label_replace({RANKS_SEEN}, "tracker", "no tracker", "", "")')],
            [
                Column("rank", "Rank"),
                Column("tracker", "Tracker"),
                Column("id", "Run or directory"),
                Column("url", "Page", is_link=True),
            ],
            height=5,
            empty="no rank of this run in this time range",
        ),
    ),
)
