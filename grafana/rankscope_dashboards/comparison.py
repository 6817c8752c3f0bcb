"""The row of the dashboard *Run* about its settings: what was chosen, and what came of it, beside another run.

A comparison is of ratios of counters over the time range, so that it does not matter for how much of the range each run
lived. Start-up is left out: a short run would have much of it.
"""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, bars
from rankscope_dashboards.phases import PHASES
from rankscope_dashboards.selectors import RUN_ONLY, for_both_runs
from rankscope_dashboards.tables import Column, table_of

CHOSEN = (
    "run, parallelism, precision, batch_size, accumulation_steps, loader_workers, pin_memory, comm_hook, bucket_bytes,"
    " compiled"
)


def gained(metric: str, more: str = "", by: str = "run, rank") -> str:
    """What a counter of the run's ranks gained over the time range, each rank once."""
    return f"max by ({by}) (increase({metric}{{{RUN_ONLY}{more}}}[$__range]))"


PHASE_SECONDS = gained("rankscope_rank_phase_seconds_total", ',phase!="startup"', "run, rank, phase")
ALL_SECONDS = f"(sum by (run) ({PHASE_SECONDS}) > 0)"
# By the clock that judged, as a sum of shares at each evaluation.
PHASE_RATIOS = f'sum_over_time(rank:rankscope_phase:ratio{{{RUN_ONLY},phase!="startup"}}[$__range])'
STEPS = gained("rankscope_rank_step_seconds_count")
# A rank's mean of its seconds, so that the ranks' work together is divided by the time once.
RUN_SECONDS = f"({ALL_SECONDS} / count by (run) (sum by (run, rank) ({PHASE_SECONDS})))"


def a_second(metric: str) -> str:
    """How much of it the ranks of the run get done together in a second after start-up."""
    return f"sum by (run) ({gained(metric)}) / {RUN_SECONDS}"


COMPARISON = Row(
    "Settings, and what they bring: choose another run above to compare with",
    (
        table_of(
            "Settings",
            "What was chosen for the run and may explain its speed; empty where it is not known. More than one line "
            "for a run: its ranks differ, or a setting changed in the time range.",
            [
                Query(
                    for_both_runs(
                        f"count by ({CHOSEN}) (group by (rank, {CHOSEN})"
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
                Column("accumulation_steps", "Micro-steps a step"),
                Column("loader_workers", "Loader workers"),
                Column("pin_memory", "Pinned"),
                Column("comm_hook", "Comm hook"),
                Column("bucket_bytes", "Bucket", "bytes"),
                Column("compiled", "Compiled"),
            ],
            height=5,
            none="not known yet",
        ),
        table_of(
            "Speed",
            "Means over the time range, start-up left out. Samples and tokens are of all ranks together.",
            [
                Query(
                    for_both_runs(
                        f"sum by (run) ({gained('rankscope_rank_step_seconds_sum')}) / (sum by (run) ({STEPS}) > 0)"
                    )
                ),
                Query(for_both_runs(a_second("rankscope_rank_samples_total"))),
                Query(for_both_runs(a_second("rankscope_rank_tokens_total"))),
                Query(for_both_runs(f"max by (run) ({STEPS})")),
            ],
            [
                Column("run", "Run"),
                Column("A", "Step time", "s"),
                Column("B", "Samples", "suffix: /s"),
                Column("C", "Tokens", "suffix: /s"),
                Column("D", "Steps"),
            ],
            width=12,
        ),
        bars(
            "Time by phase, run by run",
            "Where the ranks' time went over the time range by the clock that judged each run, start-up left out. What "
            "a change saves in one phase, another may take.",
            Query(
                for_both_runs(
                    f"sum by (run, phase) ({PHASE_RATIOS}) / on (run) group_left () (sum by (run) ({PHASE_RATIOS}) > 0)"
                )
            ),
            bar="run",
            part="phase",
            colors=PHASES,
        ),
    ),
)
