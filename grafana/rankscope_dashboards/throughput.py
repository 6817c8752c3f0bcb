"""The rows of the dashboard *Run* about speed, step times and GPU utilization."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines, shares, value
from rankscope_dashboards.phases import DEVICE, HOST_RATIOS
from rankscope_dashboards.selectors import (
    EXPORTER,
    LARGEST,
    RANK,
    RANKS,
    RUN_ONLY,
    average,
    by_rank,
    largest,
    live,
    rate,
    total,
)
from rankscope_exporter.report.colors import PHASE_COLORS

STEP_BUCKETS = f"sum by (le) ({rate('rankscope_rank_step_seconds_bucket')})"
MEAN_STEP = f"sum({rate('rankscope_rank_step_seconds_sum')}) / (sum({rate('rankscope_rank_step_seconds_count')}) > 0)"
DEVICE_SECONDS = rate(DEVICE)
DRY_SECONDS = rate("rankscope_rank_device_dry_seconds_total")
GPU_BUSY = f"max by ({EXPORTER}, uuid) (rate(rankscope_gpu_busy_seconds_total[$__rate_interval]))"
BUSY_BY_RANK = by_rank(f"{GPU_BUSY} * on ({EXPORTER}, uuid) group_right () {live(f'rankscope_rank_info{{{RANKS}}}')}")
NOT_MEASURED = "no GPU time was measured with CUDA events"
NO_GPU = "no GPU of a live rank in this time range"


def share_of_measured_time(seconds: str) -> str:
    """Return the query of these seconds by phase, as a share of the measured GPU time."""
    return (
        f"sum by (phase) (max by (rank, phase) ({seconds})) / scalar(sum(max by (rank, phase) ({DEVICE_SECONDS})) > 0)"
    )


def gpus(counter: str) -> str:
    """Return the query of the mean rate of a counter over the GPUs of the run's live ranks."""
    ranks = live(f"rankscope_rank_info{{{RUN_ONLY}}}")
    return f"avg(rate({counter}[$__rate_interval]) and on ({EXPORTER}, uuid) {ranks})"


SPEED = Row(
    "How fast is it?",
    (
        value(
            "Steps per second",
            "Optimizer steps of the run, from the fastest rank. Ranks that synchronize have the same rate.",
            "suffix: /s",
            Query(f"max({rate('rankscope_rank_steps_total')})"),
        ),
        value(
            "Step time",
            "Mean time from the end of one step to the end of the next.",
            "s",
            Query(MEAN_STEP),
        ),
        value(
            "Samples per second",
            "Sum over the chosen ranks, from the batches of their DataLoaders. Of ranks that share batches (tensor "
            "parallelism) only the first one counts. Empty if the number of samples is unknown.",
            "suffix: /s",
            Query(total(rate("rankscope_rank_samples_total"))),
        ),
        value(
            "Tokens per second",
            "Sum over the chosen ranks, from the `input_ids` of their batches. Empty if the number of tokens is "
            "unknown.",
            "suffix: /s",
            Query(total(rate("rankscope_rank_tokens_total"))),
        ),
        value(
            "GPUs busy",
            "Share of the time in which a kernel ran on the run's GPUs. A kernel that waits for other ranks counts as "
            "busy, so this is 100% in a hang, too: compare it with the active SMs.",
            "percentunit",
            Query(gpus("rankscope_gpu_busy_seconds_total")),
        ),
        value(
            "SMs active",
            "Mean share of the multiprocessors of the run's GPUs that had work. It shows inefficiency that busy time "
            "hides. Hopper and later.",
            "percentunit",
            Query(gpus("rankscope_gpu_sm_active_seconds_total")),
        ),
    ),
)

STEPS = Row(
    "Steps",
    (
        lines(
            "Step time distribution",
            "Time from the end of one step to the end of the next, over the chosen ranks. A 99th percentile far above "
            "the median means rare pauses: a checkpoint, garbage collection, an empty loader queue.",
            "s",
            Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median"),
            Query(f"histogram_quantile(0.9, {STEP_BUCKETS})", "90th percentile"),
            Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99th percentile"),
            Query(MEAN_STEP, "mean"),
            width=8,
        ),
        lines(
            "Steps per second by rank",
            f"Steps that each rank completes. Ranks that synchronize have the same rate. {LARGEST}",
            "suffix: /s",
            Query(largest(by_rank(rate("rankscope_rank_steps_total"))), RANK),
            width=8,
        ),
        lines(
            "Backward passes per step",
            f"Micro-steps per optimizer step. Above one with gradient accumulation. {LARGEST}",
            "none",
            Query(
                largest(
                    f"{by_rank(rate('rankscope_rank_micro_steps_total'))}"
                    f" / ({by_rank(rate('rankscope_rank_steps_total'))} > 0)"
                ),
                RANK,
            ),
            width=8,
        ),
    ),
    collapsed=True,
)

GPUS = Row(
    "GPUs of the ranks",
    (
        shares(
            "GPU time by phase",
            "The chosen ranks' GPU time in the measured steps, by the phase that launched the work, from CUDA events "
            "in the training threads' streams. The host runs ahead of the GPU: if the two differ, trust this panel.",
            Query(share_of_measured_time(DEVICE_SECONDS), "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            empty=NOT_MEASURED,
        ),
        shares(
            "Host time by phase",
            "The training threads' time by phase, averaged over the chosen ranks. With a GPU, the host launches work "
            "and waits for the GPU in `device_wait`. A host that never waits there while its GPU waits is too slow.",
            Query(average(HOST_RATIOS, "phase"), "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
        ),
        shares(
            "GPU waits for the host",
            "Share of the measured GPU time in which the GPU had completed all launched work, by phase, over the "
            "chosen ranks. In the model's phases, the host launches too slowly, or reads a value from the GPU.",
            Query(share_of_measured_time(DRY_SECONDS), "{{phase}}"),
            colors=PHASE_COLORS,
            width=8,
            empty=NOT_MEASURED,
        ),
        lines(
            "Host waits for the GPU",
            "How often each rank's host waits for its GPU: synchronizations, and reads of values (`.item()`). If it "
            f"waits in every step, it cannot run ahead of the GPU. {LARGEST}",
            "suffix: /s",
            Query(largest(by_rank(rate("rankscope_rank_device_waits_total"))), RANK),
            width=8,
            empty="no rank with a CUDA device",
        ),
        lines(
            "GPU busy by rank",
            "Share of the time in which a kernel was running on the rank's GPU. A kernel that waits for other ranks "
            f"counts as busy. {LARGEST}",
            "percentunit",
            Query(largest(BUSY_BY_RANK), RANK),
            max_val=1,
            width=8,
            empty=NO_GPU,
        ),
        lines(
            "Efficiency",
            "Mean over the run's GPUs: kernels running, active multiprocessors, active tensor cores, active memory. "
            "Busy GPUs with idle multiprocessors wait or run tiny kernels. If memory is above tensor cores, the model "
            "is memory-bound.",
            "percentunit",
            Query(gpus("rankscope_gpu_busy_seconds_total"), "busy"),
            Query(gpus("rankscope_gpu_sm_active_seconds_total"), "SMs"),
            Query(gpus("rankscope_gpu_tensor_active_seconds_total"), "tensor cores"),
            Query(gpus("rankscope_gpu_dram_active_seconds_total"), "memory"),
            max_val=1,
            width=8,
            empty=NO_GPU,
        ),
    ),
    collapsed=True,
)
