"""The rows of the dashboard *Run* about what goes on beside the steps: checkpoints, the processes, memory, AMP."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import CAUTION, NEUTRAL, NOT_SEEN, Panel, Query, lines, value
from rankscope_dashboards.selectors import RANK, RANKS, age, by_rank, rate
from rankscope_dashboards.tables import Column, table_of


def line_by_rank(title: str, description: str, unit: str, vector: str, none: str = NOT_SEEN) -> Panel:
    """A line for each rank, three panels side by side."""
    return lines(title, description, unit, Query(by_rank(vector), RANK), width=8, none=none)


def gauge(metric: str) -> str:
    """The query of a gauge of the ranks that the page shows."""
    return f"{metric}{{{RANKS}}}"


def cpu(who: str) -> str:
    """Processors that a rank's process, or its workers together, keep busy."""
    return rate("rankscope_rank_cpu_seconds_total", f',who="{who}"')


def loader_workers(states: str) -> str:
    """Workers' seconds a second."""
    return rate("rankscope_rank_loader_worker_seconds_total", f',state=~"{states}"')


SINCE_CHECKPOINT = age(gauge("rankscope_rank_checkpoint_last_timestamp_seconds"))

CHECKPOINTS = Row(
    "Checkpoints",
    (
        value(
            "Since the last checkpoint",
            "What would be lost if the run died now: the age of the newest checkpoint of any chosen rank.",
            "s",
            Query(f"min({SINCE_CHECKPOINT} and on (run, owner) run:rankscope_stall:seconds)"),
            width=4,
        ),
        table_of(
            "Last checkpoint by rank",
            "What each rank that writes checkpoints wrote last, and how many so far. The size is absent where nothing "
            "tells it.",
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
                Column("C", "Took", "s"),
                Column("D", "Size", "bytes"),
            ],
            width=10,
            none="no checkpoint yet",
        ),
        lines(
            "Time in checkpoints",
            "Share of each rank's time that checkpoints keep its training thread. Rank 0 alone above zero makes the "
            "others wait: write them asynchronously, sharded, or less often.",
            "percentunit",
            Query(by_rank(rate("rankscope_rank_phase_seconds_total", ',phase="checkpoint"')), RANK),
            width=10,
        ),
    ),
    collapsed=True,
)

PROCESSES = Row(
    "Processes and data loading",
    (
        line_by_rank(
            "Loader workers' processors",
            "Processors that the rank's child processes keep busy, loader workers mostly. As many as there are workers "
            "while the rank waits for data: more workers or cheaper transforms would help. Few: storage is slow.",
            "none",
            cpu("workers"),
        ),
        line_by_rank(
            "Loader workers at work",
            "Share of the time in which a loader worker makes batches, waiting for storage included. Near one the "
            "loader is the limit; at a half it could feed twice the speed. Absent unless the workers are forked.",
            "percentunit",
            f"{loader_workers('working')} / ignoring (state) sum without (state) ({loader_workers('working|idle')})",
            none="no forked loader workers",
        ),
        line_by_rank(
            "Child processes",
            "Loader workers mostly. Workers that begin anew each epoch show as gaps: persistent_workers keeps them.",
            "none",
            gauge("rankscope_rank_child_processes"),
        ),
        line_by_rank(
            "Read from storage",
            "What the rank and its children read from storage, not from the page cache. Absent where the exporter may "
            "not know: it needs the same user or CAP_SYS_PTRACE.",
            "Bps",
            rate("rankscope_rank_read_bytes_total"),
            none="the exporter may not know",
        ),
        line_by_rank(
            "Training process's processors",
            "Processors that the rank's process keeps busy with all its threads. Near one while the GPU idles: Python "
            "is the limit.",
            "none",
            cpu("training"),
        ),
        line_by_rank(
            "Waiting for a processor",
            "Share of the time in which the rank's main thread could have run and had no processor. Above a few "
            "percent the node has too few for its loader workers and ranks.",
            "percentunit",
            rate("rankscope_rank_run_queue_seconds_total"),
        ),
        lines(
            "Garbage collection",
            "Share of the time in which Python's garbage collector stopped the rank, all generations. Ranks that stop "
            "at different steps hold each other up in turn: collect at the same step, or freeze.",
            "percentunit",
            Query(f"sum by (rank) (max by (rank, generation) ({rate('rankscope_rank_gc_seconds_total')}))", RANK),
            width=8,
        ),
        line_by_rank(
            "Resident memory",
            "Host memory of the rank's process without its children. A steady rise is a leak.",
            "bytes",
            gauge("rankscope_rank_resident_memory_bytes"),
        ),
        line_by_rank(
            "Copies to the GPU that blocked",
            "Bytes that the training thread copied to the GPU and waited for: pin_memory and non_blocking would hide "
            "them.",
            "Bps",
            rate("rankscope_rank_host_to_device_copy_bytes_total"),
            none="no copy to a GPU blocked",
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
            "CUDA memory of living tensors",
            "What the caching allocator has given out.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_allocated_bytes"),
            none=NO_CUDA,
        ),
        line_by_rank(
            "CUDA memory reserved",
            "What the caching allocator holds, used or not. Far above the peak of the living tensors is fragmentation.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_reserved_bytes"),
            none=NO_CUDA,
        ),
        line_by_rank(
            "CUDA memory at its peak",
            "The most that living tensors ever took: how much larger a batch could be.",
            "bytes",
            gauge("rankscope_rank_cuda_memory_peak_allocated_bytes"),
            none=NO_CUDA,
        ),
        table_of(
            "Full memory",
            "Allocations that succeeded only after the allocator had given its cache back, each a stop of the GPU, and "
            "those that failed, so far.",
            [
                Query(by_rank(gauge("rankscope_rank_cuda_allocation_retries_total"))),
                Query(by_rank(gauge("rankscope_rank_cuda_out_of_memory_total"))),
            ],
            [
                Column("rank", "Rank"),
                Column("A", "Retries", steps=((None, NEUTRAL), (1, CAUTION))),
                Column("B", "Out of memory", steps=((None, NEUTRAL), (1, CAUTION))),
            ],
            width=8,
            none=NO_CUDA,
        ),
        line_by_rank(
            "Loss scale",
            "The gradient scaler's scale (AMP). It halves at each overflow; falling without end is a diverging run.",
            "none",
            gauge("rankscope_rank_amp_scale"),
            none=NO_SCALER,
        ),
        line_by_rank(
            "Skipped steps",
            "Share of the optimizer steps that the gradient scaler skipped, as a gradient was not finite: a few at the "
            "start are normal.",
            "percentunit",
            f"{rate('rankscope_rank_amp_skipped_steps_total')} / ({rate('rankscope_rank_steps_total')} > 0)",
            none=NO_SCALER,
        ),
    ),
    collapsed=True,
)
