"""The rows of the dashboard *Run* about checkpoints, processes, data loading, CUDA memory and mixed precision."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import NO_DATA, Panel, Query, lines, value
from rankscope_dashboards.selectors import LARGEST, LIVE_RANKS, RANK, RANKS, age, by_rank, largest, rate
from rankscope_dashboards.tables import Column, table_of
from rankscope_exporter.report.colors import CAUTION, NEUTRAL


def line_by_rank(title: str, description: str, unit: str, vector: str, empty: str = NO_DATA) -> Panel:
    """Return a graph with a line for each rank, up to SHOWN_RANKS, a third of the dashboard wide."""
    return lines(title, f"{description} {LARGEST}", unit, Query(largest(by_rank(vector)), RANK), width=8, empty=empty)


def gauge(metric: str) -> str:
    """Return the query of a gauge for the chosen ranks."""
    return f"{metric}{{{RANKS}}}"


def cpu(who: str) -> str:
    """Return the query of the CPUs in use by a rank's process (`training`) or by its workers together (`workers`)."""
    return rate("rankscope_rank_cpu_seconds_total", f',who="{who}"')


def loader_workers(states: str) -> str:
    """Return the query of the workers' seconds per second in these states."""
    return rate("rankscope_rank_loader_worker_seconds_total", f',state=~"{states}"')


SINCE_CHECKPOINT = age(gauge("rankscope_rank_checkpoint_last_timestamp_seconds"))

CHECKPOINTS = Row(
    "Checkpoints",
    (
        value(
            "Since the last checkpoint",
            "Age of the newest checkpoint of the chosen ranks: the work that would be lost if the run failed now.",
            "s",
            Query(f"min({SINCE_CHECKPOINT} and on (run, owner) {LIVE_RANKS})"),
            width=4,
        ),
        table_of(
            "Last checkpoint by rank",
            "Age, duration and size of the last checkpoint of each rank that writes them, and their number so far. The "
            "size is empty if it is unknown.",
            [
                Query(by_rank(f"{gauge('rankscope_rank_checkpoints_total')} > 0")),
                Query(f"min by (rank) ({SINCE_CHECKPOINT})"),
                Query(by_rank(gauge("rankscope_rank_checkpoint_last_duration_seconds"))),
                Query(by_rank(gauge("rankscope_rank_checkpoint_last_size_bytes"))),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Written"),
                Column("B", "Age", "s"),
                Column("C", "Duration", "s"),
                Column("D", "Size", "bytes"),
            ],
            width=10,
            empty="no checkpoint yet",
        ),
        lines(
            "Time in checkpoints",
            "Share of each rank's time that its training thread spends in checkpoints. If only rank 0 is above zero, "
            f"the others wait for it: write checkpoints asynchronously, sharded, or less often. {LARGEST}",
            "percentunit",
            Query(largest(by_rank(rate("rankscope_rank_phase_seconds_total", ',phase="checkpoint"'))), RANK),
            width=10,
        ),
    ),
    collapsed=True,
)

PROCESSES = Row(
    "Processes and data loading",
    (
        line_by_rank(
            "CPUs used by loader workers",
            "CPUs used by the rank's child processes, mostly loader workers. If the rank waits for data and every "
            "worker uses a CPU, use more workers or cheaper transforms. If they use little CPU, storage is slow.",
            "none",
            cpu("workers"),
        ),
        line_by_rank(
            "Loader workers busy",
            "Share of the time in which a loader worker makes batches, including waits for storage. Near 100% the "
            "loader is the bottleneck; at 50% it could feed twice the speed. Only for forked workers.",
            "percentunit",
            f"{loader_workers('working')} / ignoring (state) sum without (state) ({loader_workers('working|idle')})",
            empty="no forked loader workers",
        ),
        line_by_rank(
            "Child processes",
            "Mostly loader workers. Gaps mean that workers restart each epoch: use persistent_workers=True.",
            "none",
            gauge("rankscope_rank_child_processes"),
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
            "CPUs used by the training process",
            "CPUs used by all threads of the rank's process. Near one while the GPU is idle: Python is the bottleneck.",
            "none",
            cpu("training"),
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
            f"sum by (rank) (max by (rank, generation) ({rate('rankscope_rank_gc_seconds_total')}))",
        ),
        line_by_rank(
            "Resident memory",
            "Host memory of the rank's process, without its children. A steady rise is a leak.",
            "bytes",
            gauge("rankscope_rank_resident_memory_bytes"),
        ),
        line_by_rank(
            "Blocking copies to the GPU",
            "Bytes that the training thread copied to the GPU and waited for. Use pin_memory=True and "
            "non_blocking=True.",
            "Bps",
            rate("rankscope_rank_host_to_device_copy_bytes_total"),
            empty="no blocking copies to a GPU",
        ),
    ),
    collapsed=True,
)

NO_CUDA = "no CUDA memory in use"
NO_SCALER = "no gradient scaler in use"

MEMORY = Row(
    "CUDA memory and mixed precision",
    (
        line_by_rank(
            "CUDA memory allocated",
            "Memory of the tensors that exist now, from PyTorch's caching allocator.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_allocated_bytes"),
            empty=NO_CUDA,
        ),
        line_by_rank(
            "CUDA memory reserved",
            "Memory that the caching allocator has reserved, used or not. Far above the allocated peak means "
            "fragmentation.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_reserved_bytes"),
            empty=NO_CUDA,
        ),
        line_by_rank(
            "CUDA memory, peak",
            "The largest allocated memory so far. The rest of the GPU's memory allows a larger batch.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_peak_allocated_bytes"),
            empty=NO_CUDA,
        ),
        table_of(
            "Out of memory",
            "Allocations so far that succeeded only after the allocator had freed its cache, which stops the GPU, and "
            "allocations that failed.",
            [
                Query(by_rank(gauge("rankscope_rank_cuda_allocation_retries_total"))),
                Query(by_rank(gauge("rankscope_rank_cuda_out_of_memory_total"))),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Retries", steps=((None, NEUTRAL), (1, CAUTION))),
                Column("B", "Failed", steps=((None, NEUTRAL), (1, CAUTION))),
            ],
            width=8,
            empty=NO_CUDA,
        ),
        line_by_rank(
            "Loss scale",
            "The gradient scaler's scale (AMP). It halves with each overflow. If it keeps falling, the run diverges.",
            "none",
            gauge("rankscope_rank_amp_scale"),
            empty=NO_SCALER,
        ),
        line_by_rank(
            "Skipped steps",
            "Share of the optimizer steps that the gradient scaler skipped because a gradient was not finite. A few at "
            "the start are normal.",
            "percentunit",
            f"{rate('rankscope_rank_amp_skipped_steps_total')} / ({rate('rankscope_rank_steps_total')} > 0)",
            empty=NO_SCALER,
        ),
    ),
    collapsed=True,
)
