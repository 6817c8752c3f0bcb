"""The rows of the dashboard *Run* about waiting: who holds the others up, in windows and step by step; collectives."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines
from rankscope_dashboards.phases import PHASES
from rankscope_dashboards.selectors import RANK, RANKS, average, by_rank, decided, rate
from rankscope_dashboards.thresholds import LOSS_LIMIT

# Each rank's part of the steps that could be aligned.
ALIGNED = f"({by_rank(rate('rankscope_rank_aligned_step_seconds_total'))} > 0)"
FLOOR = f"avg({by_rank(rate('rankscope_rank_transfer_floor_seconds_total'))} / {ALIGNED})"
SKEW = f"avg({by_rank(rate('rankscope_rank_skew_seconds_total'))} / {ALIGNED})"
BLAME = rate("rankscope_rank_blame_seconds_total")
OF_RANK_AND_PHASE = f"max by (rank, phase) ({BLAME}) / on (rank) group_left () {ALIGNED}"

BUS_BYTES = f"max by (rank, op) ({rate('rankscope_rank_collective_bus_bytes_total')})"
DURATION = rate("rankscope_rank_collective_duration_seconds_total")

NONE_COMPARED = "no rank made steps beside another one of its group"
NONE_ALIGNED = "no steps of ranks on one node beside each other"
NONE_ISSUED = "no collectives"
NOT_WAITED_FOR = "no duration is known: no training thread waited for an end, under CUDA and NCCL the GPUs do"
BY_DEVICE = rate("rankscope_rank_device_seconds_total")
WAITED_BY_DEVICE = rate("rankscope_rank_device_seconds_total", ',phase="collective_wait"')

LAG = Row(
    "Who holds the others up?",
    (
        lines(
            "Lag by rank",
            "How much less a rank waits than the others of its group, as a share of the step. In synchronous training "
            "every rank has the same step time; who waits least is whom the others wait for. Whoever stays above the "
            "dashed line is notified about: the further above it, the sooner.",
            "percentunit",
            Query(
                decided(
                    f"max by (run, owner, rank) (rankscope_rank_lag_ratio{{{RANKS}}})",
                    f"rank:rankscope_lag:ratio{{{RANKS}}}",
                ),
                RANK,
            ),
            min_val=None,
            limit=LOSS_LIMIT,
            width=8,
            none=NONE_COMPARED,
        ),
        lines(
            "Waiting by rank",
            "Share of its time that each rank waits in collectives. The lowest line is the culprit's; what even that "
            "one waits is the transfer itself.",
            "percentunit",
            Query(f"rank:rankscope_wait:ratio{{{RANKS}}}", RANK),
            width=8,
            none="no rank made steps",
        ),
        lines(
            "Excess by phase",
            "How much more of its time a rank that lags spends in a phase than the others of its group; the largest "
            "are shown. The largest excess of a rank that lags is the cause.",
            "percentunit",
            Query(f"topk(8, rank:rankscope_phase_excess:ratio{{{RANKS}}})", f"{RANK} {{{{phase}}}}", needs_fault=True),
            width=8,
            none="no rank lagged in this time range",
        ),
        lines(
            "Step by step: a rank or the network?",
            "Share of the step that is waited, by what the aligned single steps say: `transfer` is what even the least "
            "waiter of each step waits, `for a rank` what the ranks wait beyond that. High transfer alone is the "
            "network. Waiting for a rank while nobody lags above is a straggler that rotates. By the GPUs' clock where "
            "they are measured, of these steps. Among the ranks of one node only.",
            "percentunit",
            Query(FLOOR, "transfer"),
            Query(SKEW, "for a rank"),
            width=8,
            none=NONE_ALIGNED,
        ),
        lines(
            "Step by step: who was last",
            "What the others waited for each rank in the steps in which it came last, as a share of the step. One high "
            "line is a straggler; many alike are one that rotates.",
            "percentunit",
            Query(f"sum by (rank) ({OF_RANK_AND_PHASE})", RANK),
            width=8,
            none=NONE_ALIGNED,
        ),
        lines(
            "Step by step: in which phase",
            "The same over all chosen ranks, by the phase that was longer in the last rank than in the others; "
            "`unknown` where none explains half of it.",
            "percentunit",
            Query(f"sum by (phase) ({OF_RANK_AND_PHASE})", "{{phase}}"),
            colors=PHASES,
            width=8,
            none=NONE_ALIGNED,
        ),
    ),
)

COLLECTIVES = Row(
    "Collectives",
    (
        lines(
            "Exposed wait",
            "Share of the training threads' time in collectives by operation, averaged over the chosen ranks: what is "
            "exposed, not what overlaps with computing. Under CUDA and NCCL they only issue them, and the GPUs wait: "
            "`GPUs, all`, a share of their measured time.",
            "percentunit",
            Query(average(rate("rankscope_rank_collective_seconds_total"), "op"), "{{op}}"),
            Query(
                f"avg({by_rank(WAITED_BY_DEVICE)} / (sum by (rank) (max by (rank, phase) ({BY_DEVICE})) > 0))",
                "GPUs, all",
            ),
            width=8,
            none=NONE_ISSUED,
        ),
        lines(
            "Exposed wait by group",
            "Share of the training threads' time that they wait for the ranks of each group, averaged over the chosen "
            "ranks: with several kinds of parallelism, which one holds the run back. Under CUDA and NCCL the GPUs "
            "wait, and for which group is not known.",
            "percentunit",
            Query(average(rate("rankscope_rank_group_wait_seconds_total"), "group"), "{{group}}"),
            width=8,
            none=NONE_ISSUED,
        ),
        lines(
            "From issue to completion",
            "Seconds a second in which a collective is under way, exposed or overlapped, by operation, averaged over "
            "the chosen ranks. Only those whose duration is known: what the training thread waited for, and one in a "
            "hundred of DDP's passes.",
            "percentunit",
            Query(average(DURATION, "op"), "{{op}}"),
            width=8,
            none=NOT_WAITED_FOR,
        ),
        lines(
            "Bus bandwidth",
            "What each rank's link carried while a collective of known duration was under way, as NCCL-tests count it: "
            "comparable with the link's own speed, whatever the number of ranks. The mean over the chosen ranks; a gap "
            "where no duration is known.",
            "Bps",
            Query(f"avg by (op) ({BUS_BYTES} / (max by (rank, op) ({DURATION}) > 0))", "{{op}}"),
            width=8,
            none=NOT_WAITED_FOR,
        ),
        lines(
            "Payload",
            "Bytes that each rank hands to collectives, averaged over the chosen ranks.",
            "Bps",
            Query(average(rate("rankscope_rank_collective_bytes_total"), "op"), "{{op}}"),
            width=8,
            none=NONE_ISSUED,
        ),
        lines(
            "Collectives a second",
            "Calls of each rank by operation, averaged over the chosen ranks. Many small ones cost more than few large "
            "ones.",
            "suffix: /s",
            Query(average(rate("rankscope_rank_collectives_total"), "op"), "{{op}}"),
            width=8,
            none=NONE_ISSUED,
        ),
    ),
    collapsed=True,
)
