"""The panels of the dashboard *Run* about speed and about the GPUs' work."""

from __future__ import annotations

from rankscope_dashboards.by_rank import POINTS, line_by_rank
from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.fleet_runs import lost_hours
from rankscope_dashboards.panels import Query, lines, shares, value
from rankscope_dashboards.phases import DEVICE, HOST_BY_PHASE
from rankscope_dashboards.selectors import EXPORTER, LIVE_RANKS, RANKS, RUN_ONLY, age, live, rate, total
from rankscope_exporter.report.colors import PHASE_COLORS

STEP_BUCKETS = f"sum by (le) ({rate('rankscope_rank_step_seconds_bucket')})"
MEAN_STEP = f"sum({rate('rankscope_rank_step_seconds_sum')}) / (sum({rate('rankscope_rank_step_seconds_count')}) > 0)"
DRY_SECONDS = rate("rankscope_rank_device_dry_seconds_total")
NOT_MEASURED = "no GPU time was measured with CUDA events"
NO_GPU = "no GPU of a live rank in this time range"
SINCE_CHECKPOINT = age(f"rankscope_rank_checkpoint_last_timestamp_seconds{{{RANKS}}}")


def gpus(counter: str) -> str:
    """Return the query of the mean rate of a counter over the GPUs of the run's live ranks, as a ratio."""
    ranks = live(f"rankscope_rank_info{{{RUN_ONLY}}}")
    return f"clamp_max(avg(rate({counter}[$__rate_interval]) and on ({EXPORTER}, uuid) {ranks}), 1)"


def measured_time(seconds: str) -> str:
    """Return the query of these seconds by phase, as a ratio of the measured GPU time."""
    return f"sum by (phase) ({seconds}) / on () group_left () (sum({rate(DEVICE)}) > 0)"


TILES = (
    value(
        "Ranks alive",
        "Ranks of this run whose process is alive, on all nodes.",
        "none",
        Query(f"sum(max by (rank) (rankscope_rank_up{{{RUN_ONLY}}}))"),
    ),
    value(
        "Step time",
        "Mean time from the end of one step to the end of the next.",
        "s",
        Query(MEAN_STEP),
        empty="no step",
    ),
    value(
        "Samples",
        "Per second: the sum over the chosen ranks, from the batches of their DataLoaders. Of ranks that share batches "
        "(tensor parallelism) only the first one counts. Empty if the number of samples is unknown.",
        "si:/s",
        Query(total(rate("rankscope_rank_samples_total"))),
    ),
    value(
        "Tokens",
        "Per second: the sum over the chosen ranks, from the `input_ids` of their batches. Empty if the number is "
        "unknown.",
        "si:/s",
        Query(total(rate("rankscope_rank_tokens_total"))),
    ),
    value(
        "Hours lost",
        "GPU-hours that the run has not spent on computing since it began, whatever the cause. *Cost* divides them.",
        "none",
        Query(lost_hours(RUN_ONLY)),
        empty="unknown",
    ),
    value(
        "Last save",
        "Age of the newest checkpoint of the chosen ranks: the work that would be lost if the run failed now.",
        "s",
        Query(f"clamp_min(min({SINCE_CHECKPOINT} and on (run, owner) {LIVE_RANKS}), 0)"),
        decimals=1,
    ),
)

STEP_TIMES = lines(
    "Step time distribution",
    "Time from the end of one step to the end of the next, over the chosen ranks. A 99th percentile far above the "
    "median means rare pauses: a checkpoint, garbage collection, an empty loader queue.",
    "s",
    Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median"),
    Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99th percentile"),
    Query(MEAN_STEP, "mean"),
    width=8,
    points=POINTS,
)

GPUS = Row(
    "Do the GPUs compute?",
    (
        lines(
            "Efficiency of the GPUs",
            "Mean over the run's GPUs: kernels running, active multiprocessors, active tensor cores, active memory. A "
            "kernel that waits for other ranks counts as busy: busy GPUs with idle multiprocessors wait or run tiny "
            "kernels. If memory is above tensor cores, the model is memory-bound.",
            "percentunit",
            Query(gpus("rankscope_gpu_busy_seconds_total"), "busy"),
            Query(gpus("rankscope_gpu_sm_active_seconds_total"), "SMs"),
            Query(gpus("rankscope_gpu_tensor_active_seconds_total"), "tensor cores"),
            Query(gpus("rankscope_gpu_dram_active_seconds_total"), "memory"),
            max_val=1,
            width=8,
            empty=NO_GPU,
            points=POINTS,
        ),
        shares(
            "GPUs wait for their hosts",
            "Share of the measured GPU time in which the GPU had completed all launched work, by phase, over the "
            "chosen ranks. In the model's phases, the host launches too slowly, or reads a value from the GPU.",
            Query(measured_time(DRY_SECONDS), "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            empty=NOT_MEASURED,
            points=POINTS,
        ),
        shares(
            "Host time by phase",
            "The training threads' time by phase, averaged over the chosen ranks. With a GPU, the host launches work "
            "and waits for the GPU in `device_wait`. A host that never waits there while its GPU waits is too slow.",
            Query(HOST_BY_PHASE, "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            points=POINTS,
        ),
        line_by_rank(
            "CUDA memory, peak",
            "The largest allocated memory so far. The rest of the GPU's memory allows a larger batch.",
            "bytes",
            f"rankscope_rank_cuda_memory_peak_allocated_bytes{{{RANKS}}}",
            empty="no CUDA memory in use",
        ),
    ),
    collapsed=True,
)
