"""The rows of the dashboard *Run* that show the ranks themselves: steps, collectives, what each does now, how it ended.

Raw metrics are drawn with `max by`: two exporters may see the same record, or one a rank and one its predecessor,
and a sum would count both.
"""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import BAD, CAUTION, GOOD, NEUTRAL, Query, lines
from rankscope_dashboards.tables import Column, table_of

RANKS = 'run="$run",rank=~"$rank"'
RANK = "rank {{rank}}"
ENDINGS = {"finished": ("finished", GOOD), "sigterm": ("SIGTERM", NEUTRAL)} | {
    reason: (reason, BAD) for reason in ("exception", "killed")
}

WHO_IT_IS = "rank, node, local_rank, world_size, group, pid, uuid, backend, torch_version, rankscope_version"
STEP_BUCKETS = f"sum by (le) (rate(rankscope_rank_step_seconds_bucket{{{RANKS}}}[$__rate_interval]))"
COLLECTIVE_CALLS = f"rate(rankscope_rank_collectives_total{{{RANKS}}}[$__rate_interval])"
COLLECTIVE_SECONDS = f"rate(rankscope_rank_collective_seconds_total{{{RANKS}}}[$__rate_interval])"
COLLECTIVE_BYTES = f"rate(rankscope_rank_collective_bytes_total{{{RANKS}}}[$__rate_interval])"


def average(rate: str, label: str) -> str:
    """`rate` by `label`, averaged over all chosen ranks, also those that lack a value of the label."""
    return f"sum by ({label}) (max by (rank, {label}) ({rate})) / scalar(count(count by (rank) ({rate})))"


STEPS = Row(
    "Steps",
    (
        lines(
            "Step time",
            "Time from one step's end to the next one's, over the chosen ranks.",
            "s",
            Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median"),
            Query(f"histogram_quantile(0.9, {STEP_BUCKETS})", "90 %"),
            Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99 %"),
            Query(
                f"sum(rate(rankscope_rank_step_seconds_sum{{{RANKS}}}[$__rate_interval]))"
                f" / sum(rate(rankscope_rank_step_seconds_count{{{RANKS}}}[$__rate_interval]))",
                "mean",
            ),
        ),
        lines(
            "Steps a second",
            "Steps that each rank finishes. Ranks that synchronise have the same rate.",
            "suffix: /s",
            Query(f"max by (rank) (rate(rankscope_rank_steps_total{{{RANKS}}}[$__rate_interval]))", RANK),
        ),
    ),
)

COLLECTIVES = Row(
    "Collectives",
    (
        lines(
            "Time in collectives",
            "Share of the training threads' time by operation, averaged over the chosen ranks: what is exposed, not "
            "what overlaps with computing.",
            "percentunit",
            Query(average(COLLECTIVE_SECONDS, "op"), "{{op}}"),
            width=8,
        ),
        lines(
            "Collectives a second",
            "Calls of each rank by operation, averaged over the chosen ranks.",
            "suffix: /s",
            Query(average(COLLECTIVE_CALLS, "op"), "{{op}}"),
            width=8,
        ),
        lines(
            "Payload",
            "Bytes that each rank hands to collectives, averaged over the chosen ranks.",
            "Bps",
            Query(average(COLLECTIVE_BYTES, "op"), "{{op}}"),
            width=8,
        ),
    ),
)

NOW = Row(
    "Ranks",
    (
        table_of(
            "What each rank does now",
            "The phase that each rank is in and for how long. In a hang, the rank that is in no collective is the one "
            "that the others wait for.",
            [
                Query(f"max by (rank) (rankscope_rank_up{{{RANKS}}})"),
                Query(f"time() - max by (rank, phase) (rankscope_rank_phase_since_timestamp_seconds{{{RANKS}}})"),
                Query(f"max by (rank) (rank:rankscope_stall:seconds{{{RANKS}}})"),
                Query(f"max by (rank) (rankscope_rank_steps_total{{{RANKS}}})"),
                Query(f"max by (rank) (rankscope_rank_probes_disabled{{{RANKS}}})"),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Alive", names={1: ("yes", GOOD), 0: ("no", NEUTRAL)}),
                Column("phase", "Phase"),
                Column("B", "For", "s"),
                Column("C", "Last progress", "s"),
                Column("D", "Steps"),
                Column("E", "Probes off", steps=((None, NEUTRAL), (1, CAUTION))),
            ],
            width=14,
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
            width=10,
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
        ),
    ),
)
