"""The rows of the dashboard *Run* about stragglers, in time windows and in aligned steps, and about collectives."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines
from rankscope_dashboards.phases import DEVICE_WAITS, WAITS
from rankscope_dashboards.selectors import LARGEST, RANK, RANKS, RUN_ONLY, SHOWN_RANKS, average, by_rank, largest, rate
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.diagnosis.thresholds import Thresholds
from rankscope_exporter.report.colors import PHASE_COLORS

# Each rank's time in aligned steps.
ALIGNED = f"({by_rank(rate('rankscope_rank_aligned_step_seconds_total'))} > 0)"
FLOOR = f"avg({by_rank(rate('rankscope_rank_transfer_floor_seconds_total'))} / {ALIGNED})"
SKEW = f"avg({by_rank(rate('rankscope_rank_skew_seconds_total'))} / {ALIGNED})"
BLAME = rate("rankscope_rank_blame_seconds_total")
BLAME_RATIO = f"max by (rank, phase) ({BLAME}) / on (rank) group_left () {ALIGNED}"

BUS_BYTES = f"max by (rank, op) ({rate('rankscope_rank_collective_bus_bytes_total')})"
DURATION = rate("rankscope_rank_collective_duration_seconds_total")

NOT_COMPARED = "no steps of several ranks of a group"
NOT_ALIGNED = "no aligned steps: they need several ranks of a group on one node"
NO_COLLECTIVES = "no collectives"
NO_DURATION = "no known durations: with CUDA and NCCL, training threads do not wait for the end of collectives"

LAG = Row(
    "Which rank slows down the others?",
    (
        lines(
            "Lag by rank",
            "How much less a rank waits than the others of its group, as a share of the step. In synchronous training "
            "all ranks have the same step time; the others wait for the rank that waits least. A rank that stays "
            f"above the dashed line causes an alert: larger lags alert sooner. {LARGEST}",
            "percentunit",
            Query(largest(by_rank(f"rankscope_rank_lag_ratio{{{RANKS}}}")), RANK),
            min_val=None,
            limit=Thresholds().loss,
            width=8,
            empty=NOT_COMPARED,
        ),
        lines(
            "Wait by rank",
            "Share of its time that each rank waits in collectives. The lowest line is the straggler's; its wait is "
            f"the transfer itself. At most {SHOWN_RANKS} ranks, those that wait least.",
            "percentunit",
            Query(largest(WAITS, select="bottomk"), RANK),
            width=8,
            empty="no steps",
        ),
        table_of(
            "Evidence",
            "The numbers that the diagnosis has for each open finding, in base units. For a straggler, `excess` is how "
            "much longer it is in the phase of the cause than the others, as a ratio of the step.",
            [
                Query(
                    f"max by (kind, cause, rank, place, name) (rankscope_finding_evidence{{{RUN_ONLY}}})",
                    needs_fault=True,
                )
            ],
            [
                Column("kind", "Finding"),
                Column("cause", "Cause"),
                Column("rank", "Rank"),
                Column("place", "Place"),
                Column("name", "Evidence"),
                Column("A", "Value"),
            ],
            width=8,
            empty="no open finding",
        ),
        lines(
            "Aligned steps: straggler or network?",
            "Waiting as a share of the step, from aligned steps of the ranks of one node. `transfer`: the wait of the "
            "rank that waits least in each step. `for a rank`: the wait beyond that. If only `transfer` is high, the "
            "network is slow. If `for a rank` is high and no rank lags above, the straggler rotates. Measured on the "
            "GPU if possible.",
            "percentunit",
            Query(FLOOR, "transfer"),
            Query(SKEW, "for a rank"),
            width=8,
            empty=NOT_ALIGNED,
        ),
        lines(
            "Aligned steps: last rank",
            "How long the others waited for each rank in the steps in which it was last, as a share of the step. One "
            f"high line is a straggler; many similar lines are a rotating straggler. {LARGEST}",
            "percentunit",
            Query(largest(f"sum by (rank) ({BLAME_RATIO})"), RANK),
            width=8,
            empty=NOT_ALIGNED,
        ),
        lines(
            "Aligned steps: phase of the last rank",
            "The same over all chosen ranks, by the phase that was longer on the last rank than on the others; "
            "`unknown` if no phase explains half of it.",
            "percentunit",
            Query(f"sum by (phase) ({BLAME_RATIO})", "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            empty=NOT_ALIGNED,
        ),
    ),
)

COLLECTIVES = Row(
    "Collectives",
    (
        lines(
            "Exposed wait",
            "Share of the training threads' time in collectives by operation, averaged over the chosen ranks: only "
            "the exposed part, not the part that overlaps with computing. With CUDA and NCCL the GPUs wait, not the "
            "training threads: `GPUs, all`, a share of the measured GPU time.",
            "percentunit",
            Query(average(rate("rankscope_rank_collective_seconds_total"), "op"), "{{op}}"),
            Query(f"avg({DEVICE_WAITS})", "GPUs, all"),
            width=8,
            empty=NO_COLLECTIVES,
        ),
        lines(
            "Exposed wait by group",
            "Share of the training threads' time in waits for each group, averaged over the chosen ranks. With "
            "several kinds of parallelism, it shows which one slows down the run. With CUDA and NCCL the GPUs wait, "
            "and the group is unknown.",
            "percentunit",
            Query(average(rate("rankscope_rank_group_wait_seconds_total"), "group"), "{{group}}"),
            width=8,
            empty=NO_COLLECTIVES,
        ),
        lines(
            "Duration of collectives",
            "Share of the time in which a collective is in progress, exposed or overlapped, by operation, averaged "
            "over the chosen ranks. Only collectives with a known duration: those that the training thread waited "
            "for, and one in a hundred of DDP's passes.",
            "percentunit",
            Query(average(DURATION, "op"), "{{op}}"),
            width=8,
            empty=NO_DURATION,
        ),
        lines(
            "Bus bandwidth",
            "Traffic on each rank's link during collectives of known duration, calculated as in nccl-tests: "
            "comparable with the link's speed for any number of ranks. Mean over the chosen ranks; a gap where no "
            "duration is known.",
            "Bps",
            Query(f"avg by (op) ({BUS_BYTES} / (max by (rank, op) ({DURATION}) > 0))", "{{op}}"),
            width=8,
            empty=NO_DURATION,
        ),
        lines(
            "Payload",
            "Bytes that each rank passes to collectives, averaged over the chosen ranks.",
            "Bps",
            Query(average(rate("rankscope_rank_collective_bytes_total"), "op"), "{{op}}"),
            width=8,
            empty=NO_COLLECTIVES,
        ),
        lines(
            "Collectives per second",
            "Calls of each rank by operation, averaged over the chosen ranks. Many small collectives cost more than a "
            "few large ones.",
            "suffix: /s",
            Query(average(rate("rankscope_rank_collectives_total"), "op"), "{{op}}"),
            width=8,
            empty=NO_COLLECTIVES,
        ),
    ),
    collapsed=True,
)
