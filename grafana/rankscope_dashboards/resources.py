"""The row of the dashboard *Run* about data loading, processes and checkpoints."""

from __future__ import annotations

from rankscope_dashboards.by_rank import line_by_rank
from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.links import rank_link
from rankscope_dashboards.panels import Query
from rankscope_dashboards.selectors import ALL_RANKS, RANKS, by_rank, rate
from rankscope_dashboards.tables import Column, table_of
from rankscope_dashboards.throughput import SINCE_CHECKPOINT


def gauge(metric: str) -> str:
    """Return the query of a gauge for the chosen ranks."""
    return f"{metric}{{{RANKS}}}"


def loader_workers(states: str) -> str:
    """Return the query of the workers' seconds per second in these states."""
    return rate("rankscope_rank_loader_worker_seconds_total", f',state=~"{states}"')


WRITTEN = f"topk({ALL_RANKS}, {by_rank(gauge('rankscope_rank_checkpoints_total'))} > 0)"

HOSTS = Row(
    "What do the hosts wait for: data, CPUs, checkpoints?",
    (
        line_by_rank(
            "Loader workers busy",
            "Share of the time in which a loader worker makes batches, including waits for storage. Near 100% the "
            "loader is the bottleneck; at 50% it could feed twice the speed. Only for forked workers.",
            "percentunit",
            f"{loader_workers('working')} / ignoring (state) sum without (state) ({loader_workers('working|idle')})",
            max_val=1,
            empty="no forked loader workers",
        ),
        line_by_rank(
            "Read from storage",
            "Bytes that the rank and its children read from storage, not from the page cache. The exporter needs the "
            "same user or CAP_SYS_PTRACE.",
            "Bps",
            rate("rankscope_rank_read_bytes_total"),
            empty="the exporter has no permission to read it",
        ),
        line_by_rank(
            "Waiting for CPU time",
            "Share of the time in which the rank's main thread was runnable and had no CPU. Above a few percent, the "
            "node has too few CPUs for its ranks and loader workers.",
            "percentunit",
            rate("rankscope_rank_run_queue_seconds_total"),
        ),
        line_by_rank(
            "Garbage collection",
            "Share of the time in which Python's garbage collector stopped the rank, all generations. Ranks that stop "
            "in different steps slow each other down: collect in the same step, or use gc.freeze().",
            "percentunit",
            f"sum without (generation) ({rate('rankscope_rank_gc_seconds_total')})",
        ),
        table_of(
            "Last checkpoint by rank",
            "Age, duration and size of the last checkpoint of each rank that writes them, and their number so far. The "
            f"size is empty if it is unknown. At most {ALL_RANKS} ranks, those that have written the most.",
            [
                Query(WRITTEN),
                Query(f"min by (rank) ({SINCE_CHECKPOINT}) and on (rank) {WRITTEN}"),
                Query(
                    f"{by_rank(gauge('rankscope_rank_checkpoint_last_duration_seconds'))} and on (rank) {WRITTEN}",
                ),
                Query(f"{by_rank(gauge('rankscope_rank_checkpoint_last_size_bytes'))} and on (rank) {WRITTEN}"),
            ],
            [
                Column("rank", "Rank", link=rank_link("${__value.raw}"), width=70),
                Column("A", "Written"),
                Column("B", "Age", "s"),
                Column("C", "Duration", "s"),
                Column("D", "Size", "bytes"),
            ],
            width=8,
            empty="no checkpoint yet",
        ),
    ),
    collapsed=True,
)
