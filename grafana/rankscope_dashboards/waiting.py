"""The row of the dashboard *Run* about waiting: in time windows, in aligned steps, and in collectives."""

from __future__ import annotations

from rankscope_dashboards.by_rank import POINTS, line_by_rank
from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines
from rankscope_dashboards.selectors import RANKS, average, by_rank, over_the_range, rate
from rankscope_exporter.diagnosis.thresholds import Thresholds

# Each rank's time in aligned steps.
ALIGNED = f"({by_rank(rate('rankscope_rank_aligned_step_seconds_total'))} > 0)"
FLOOR = f"avg({by_rank(rate('rankscope_rank_transfer_floor_seconds_total'))} / {ALIGNED})"
SKEW = f"avg({by_rank(rate('rankscope_rank_skew_seconds_total'))} / {ALIGNED})"


GROUP_WAIT = average(rate("rankscope_rank_group_wait_seconds_total"), "group")

NOT_COMPARED = "no steps of several ranks of a group"
NOT_ALIGNED = "no aligned steps: they need several ranks of a group on one node"
NO_COLLECTIVES = "no collectives"

WAITING = Row(
    "Who waits for whom: a rank, the network, a group?",
    (
        line_by_rank(
            "Lag by rank",
            "The same lag as over time above, as lines. A rank that stays above the dashed line causes an alert: "
            "larger lags alert sooner.",
            "percentunit",
            f"rankscope_rank_lag_ratio{{{RANKS}}}",
            min_val=None,
            limit=Thresholds().loss,
            empty=NOT_COMPARED,
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
            points=POINTS,
        ),
        lines(
            "Exposed wait by group",
            "Share of the training threads' time in waits for each group, averaged over the chosen ranks. With "
            "several kinds of parallelism, it shows which one slows down the run. With CUDA and NCCL the GPUs wait, "
            "and the group is unknown. The ten groups that wait the longest.",
            "percentunit",
            Query(f"{GROUP_WAIT} and on (group) topk(10, {over_the_range(GROUP_WAIT)})", "{{group}}"),
            width=8,
            empty=NO_COLLECTIVES,
            points=POINTS,
        ),
    ),
    collapsed=True,
)
