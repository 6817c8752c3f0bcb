"""The panels of the dashboard *Run* that compare settings and speed with another run.

It compares ratios of counters over the time range, so that the runs may cover different parts of it. Start-up is
excluded, as it would be a large part of a short run.
"""

from __future__ import annotations

from rankscope_dashboards.panels import Query, bars
from rankscope_dashboards.phases import mean_time_by_phase
from rankscope_dashboards.selectors import RUN_ONLY, for_both_runs
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import PHASE_COLORS

SETTINGS = (
    "run, parallelism, precision, batch_size, accumulation_steps, loader_workers, pin_memory, comm_hook, bucket_bytes,"
    " compiled"
)


def increase(metric: str, more: str = "", by: str = "run, rank") -> str:
    """Return the query of a counter's increase over the time range, each rank of the run once."""
    return f"max by ({by}) (increase({metric}{{{RUN_ONLY}{more}}}[$__range]))"


PHASE_SECONDS = increase("rankscope_rank_phase_seconds_total", ',phase!="startup"', "run, rank, phase")
ALL_SECONDS = f"(sum by (run) ({PHASE_SECONDS}) > 0)"
PHASE_RATIOS = mean_time_by_phase(RUN_ONLY, window="$__range", by="run", excluded="startup")
STEPS = increase("rankscope_rank_step_seconds_count")
# The mean time of a rank, by which the work of all ranks together is divided.
RUN_SECONDS = f"({ALL_SECONDS} / count by (run) (sum by (run, rank) ({PHASE_SECONDS})))"


def per_second(metric: str) -> str:
    """Return the query of a counter's rate over all ranks of the run together, start-up excluded."""
    return f"sum by (run) ({increase(metric)}) / {RUN_SECONDS}"


SETTINGS_OF_RUNS = table_of(
    "Settings",
    "Settings of the run that affect its speed; empty if unknown. A run has several lines if its ranks differ "
    "or if a setting changed in the time range.",
    [
        Query(
            for_both_runs(
                f"count by ({SETTINGS}) (group by (rank, {SETTINGS})"
                f" (last_over_time(rankscope_rank_settings_info{{{RUN_ONLY}}}[$__range])))"
            )
        )
    ],
    [
        Column("run", "Run"),
        Column("A", "Ranks"),
        Column("parallelism", "Parallelism"),
        Column("precision", "Precision"),
        Column("batch_size", "Batch size"),
        Column("accumulation_steps", "Micro-steps per step"),
        Column("loader_workers", "Loader workers"),
        Column("pin_memory", "Pinned"),
        Column("comm_hook", "Comm hook"),
        Column("bucket_bytes", "Bucket", "bytes"),
        Column("compiled", "Compiled"),
    ],
    height=5,
    empty="not known yet",
)

SPEED_OF_RUNS = table_of(
    "Speed",
    "Means over the time range, without start-up. Samples and tokens are of all ranks together.",
    [
        Query(
            for_both_runs(
                f"sum by (run) ({increase('rankscope_rank_step_seconds_sum')}) / (sum by (run) ({STEPS}) > 0)"
            )
        ),
        Query(for_both_runs(per_second("rankscope_rank_samples_total"))),
        Query(for_both_runs(per_second("rankscope_rank_tokens_total"))),
        Query(for_both_runs(f"max by (run) ({STEPS})")),
    ],
    [
        Column("run", "Run"),
        Column("A", "Step time", "s"),
        Column("B", "Samples", "si:/s"),
        Column("C", "Tokens", "si:/s"),
        Column("D", "Steps"),
    ],
    width=12,
)

PHASES_OF_RUNS = bars(
    "Time by phase and run",
    "How the ranks spent the time range, by each run's clock, without start-up. A change may move time from "
    "one phase to another.",
    Query(for_both_runs(PHASE_RATIOS)),
    bar="run",
    part="phase",
    colors=PHASE_COLORS,
)
