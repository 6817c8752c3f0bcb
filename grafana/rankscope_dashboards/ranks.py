"""The row of the dashboard *Run* that shows the ranks themselves: what each does now, how it ended, who it is."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import BAD, CAUTION, GOOD, NEUTRAL, WELL, Query
from rankscope_dashboards.selectors import RANKS, age
from rankscope_dashboards.tables import Column, table_of

ENDINGS = {"finished": ("finished", GOOD), "sigterm": ("SIGTERM", NEUTRAL), "interrupted": ("Ctrl-C", NEUTRAL)} | {
    reason: (reason, BAD) for reason in ("exception", "killed")
}

TRACKERS = f"group by (rank, tracker, id, url) (last_over_time(rankscope_rank_tracker_info{{{RANKS}}}[$__range]))"
RANKS_SEEN = f"group(last_over_time(rankscope_rank_info{{{RANKS}}}[$__range]))"

WHO_IT_IS = "rank, node, local_rank, world_size, group, pid, uuid, backend, torch_version, rankscope_version"

PHASE_FOR = age(f"rankscope_rank_phase_since_timestamp_seconds{{{RANKS}}}")

NOW = Row(
    "What does each rank do now?",
    (
        table_of(
            "What each rank does now",
            "The phase and the collective that each rank's host is in, and for how long. In a hang, the rank that is "
            "in no collective, or has issued fewer of them, is the one that the others wait for. Probes are off after "
            "an error of their own: their figures stand still, and the rank's standard error says why.",
            [
                Query(f"max by (rank) (rankscope_rank_up{{{RANKS}}})"),
                Query(f"min by (rank, phase) ({PHASE_FOR})"),
                Query(f"max by (rank) (rank:rankscope_stall:seconds{{{RANKS}}})"),
                Query(f"max by (rank) (rankscope_rank_steps_total{{{RANKS}}})"),
                Query(f"max by (rank) (rankscope_rank_probes_disabled{{{RANKS}}})"),
                Query(f"max by (rank, op) (rankscope_rank_collective_open_info{{{RANKS}}})"),
                Query(f"sum by (rank) (max by (rank, group) (rankscope_rank_group_collectives_total{{{RANKS}}}))"),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Alive", names={1: ("yes", WELL), 0: ("no", NEUTRAL)}),
                Column("phase", "Host's phase"),
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
            "Ranks that have ended, and how. Of several that crashed the earliest is the one to look at: under "
            "torchrun it takes the others with it.",
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
            none="none has ended",
        ),
        table_of(
            "Who the ranks are",
            "Where each rank runs and with what.",
            [Query(f"max by ({WHO_IT_IS}) (last_over_time(rankscope_rank_info{{{RANKS}}}[$__range]))")],
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
            "The runs of W&B, MLflow and TensorBoard that the ranks log to. An offline run, a directory and a database "
            "have no page.",
            [Query(f'{TRACKERS} or on () label_replace({RANKS_SEEN}, "tracker", "none in use", "", "")')],
            [
                Column("rank", "Rank"),
                Column("tracker", "Tracker"),
                Column("id", "Run or directory"),
                Column("url", "Page", is_link=True),
            ],
            height=5,
            none="no rank of this run is seen",
        ),
    ),
)
