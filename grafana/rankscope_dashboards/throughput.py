"""The rows of the dashboard *Run* about speed: what the run gets done, how its steps vary, what its GPUs do for it."""

from __future__ import annotations

from rankscope_dashboards.dashboard import Row
from rankscope_dashboards.panels import Query, lines, shares, value
from rankscope_dashboards.phases import PHASES
from rankscope_dashboards.selectors import RANK, RANKS, RUN_ONLY, average, by_rank, rate, together

STEP_BUCKETS = f"sum by (le) ({rate('rankscope_rank_step_seconds_bucket')})"
MEAN_STEP = f"sum({rate('rankscope_rank_step_seconds_sum')}) / (sum({rate('rankscope_rank_step_seconds_count')}) > 0)"
DEVICE_SECONDS = rate("rankscope_rank_device_seconds_total")
DRY_SECONDS = rate("rankscope_rank_device_dry_seconds_total")
NOT_MEASURED = "no GPU's time was measured: CUDA events do that"


def of_measured_time(seconds: str) -> str:
    """By phase, as a share of the GPU time that was measured."""
    return (
        f"sum by (phase) (max by (rank, phase) ({seconds})) / scalar(sum(max by (rank, phase) ({DEVICE_SECONDS})) > 0)"
    )


def gpus(counter: str) -> str:
    """The mean rate of a GPU's counter over the GPUs of the run's live ranks."""
    live = f"rank:rankscope_rank_info:live{{{RUN_ONLY}}}"
    return f"avg(rate({counter}[$__rate_interval]) and on (job, instance, uuid) {live})"


HOW_FAST = Row(
    "How fast is it?",
    (
        value(
            "Steps a second",
            "Optimizer steps of the run: ranks that synchronize have the same, so this is the fastest rank's.",
            "suffix: /s",
            Query(f"max({rate('rankscope_rank_steps_total')})"),
        ),
        value(
            "Step time",
            "Mean time from one step's end to the next one's.",
            "s",
            Query(MEAN_STEP),
        ),
        value(
            "Samples a second",
            "Over the chosen ranks, by the batches of their DataLoaders; of ranks that share their batches (tensor "
            "parallelism) the first one counts. Absent where nothing tells the samples.",
            "suffix: /s",
            Query(together(rate("rankscope_rank_samples_total"))),
        ),
        value(
            "Tokens a second",
            "Over the chosen ranks, by the `input_ids` of their batches. Absent where nothing tells the tokens.",
            "suffix: /s",
            Query(together(rate("rankscope_rank_tokens_total"))),
        ),
        value(
            "GPUs busy",
            "Share of the time in which a kernel ran on the run's GPUs. A kernel that waits for other ranks counts, so "
            "it is full in a hang too: compare it with the SMs.",
            "percentunit",
            Query(gpus("rankscope_gpu_busy_seconds_total")),
        ),
        value(
            "SMs active",
            "Share of the run's GPUs' multiprocessors that had work, over time: the efficiency that busy time hides. "
            "Hopper and later.",
            "percentunit",
            Query(gpus("rankscope_gpu_sm_active_seconds_total")),
        ),
    ),
)

STEPS = Row(
    "Steps",
    (
        lines(
            "Step time, spread",
            "Time from one step's end to the next one's, over the chosen ranks. A 99 % far above the median is a rare "
            "stop: a checkpoint, garbage collection, the loader's refill.",
            "s",
            Query(f"histogram_quantile(0.5, {STEP_BUCKETS})", "median"),
            Query(f"histogram_quantile(0.9, {STEP_BUCKETS})", "90 %"),
            Query(f"histogram_quantile(0.99, {STEP_BUCKETS})", "99 %"),
            Query(MEAN_STEP, "mean"),
            width=8,
        ),
        lines(
            "Steps a second by rank",
            "Steps that each rank finishes. Ranks that synchronize have the same rate.",
            "suffix: /s",
            Query(by_rank(rate("rankscope_rank_steps_total")), RANK),
            width=8,
        ),
        lines(
            "Backward passes a step",
            "Micro-steps for each optimizer step: above one where gradients are accumulated.",
            "none",
            Query(
                f"{by_rank(rate('rankscope_rank_micro_steps_total'))}"
                f" / ({by_rank(rate('rankscope_rank_steps_total'))} > 0)",
                RANK,
            ),
            width=8,
        ),
    ),
    collapsed=True,
)

GPUS = Row(
    "The ranks' GPUs",
    (
        shares(
            "GPU time by phase",
            "The chosen ranks' GPU time in the steps that were measured, by the phase that launched the work, by CUDA "
            "events in the training threads' streams. The host runs ahead of the GPU: where the two differ, believe "
            "this one.",
            Query(of_measured_time(DEVICE_SECONDS), "{{phase}}"),
            colors=PHASES,
            width=8,
            none=NOT_MEASURED,
        ),
        shares(
            "The host's time by phase",
            "The training threads' time by phase, averaged over the chosen ranks. With a GPU it says what the host "
            "does: it issues work, and in `device_wait` waits for the GPU. One that never waits there while the GPU "
            "waits for it is too slow.",
            Query(average(f"rank:rankscope_host_phase:ratio{{{RANKS}}}", "phase"), "{{phase}}"),
            colors=PHASES,
            width=8,
        ),
        shares(
            "GPU waits for the host",
            "Share of the measured GPU time in which the GPU had done all that was issued and waited for more, by "
            "phase, over the chosen ranks. Within the model's phases the host launches too slowly, or the GPU ran dry "
            "while a value was read from it.",
            Query(of_measured_time(DRY_SECONDS), "{{phase}}"),
            colors=PHASES,
            width=8,
            none=NOT_MEASURED,
        ),
        lines(
            "Host waits for the GPU",
            "How often each rank's host waits for its GPU: synchronizations, and values that are read (`.item()`). As "
            "often as there are steps, or more, keeps the host from running ahead.",
            "suffix: /s",
            Query(by_rank(rate("rankscope_rank_device_waits_total")), RANK),
            width=8,
            none="no rank with a CUDA device",
        ),
        lines(
            "GPU busy by rank",
            "Share of the time in which a kernel was running on the rank's GPU. A kernel that waits for other ranks "
            "counts as busy.",
            "percentunit",
            Query(
                "max by (rank) (gpu:rankscope_busy:ratio"
                f" * on (job, instance, uuid) group_right () rank:rankscope_rank_info:live{{{RANKS}}})",
                RANK,
            ),
            max_val=1,
            width=8,
            none="no GPU of a live rank is seen",
        ),
        lines(
            "Efficiency",
            "The run's GPUs, averaged: kernels running, multiprocessors with work, tensor cores at work, memory at "
            "work. Busy but with idle multiprocessors is waiting or tiny kernels; memory above tensor is bound by it.",
            "percentunit",
            Query(gpus("rankscope_gpu_busy_seconds_total"), "busy"),
            Query(gpus("rankscope_gpu_sm_active_seconds_total"), "SMs"),
            Query(gpus("rankscope_gpu_tensor_active_seconds_total"), "tensor cores"),
            Query(gpus("rankscope_gpu_dram_active_seconds_total"), "memory"),
            max_val=1,
            width=8,
            none="no GPU of a live rank is seen",
        ),
    ),
    collapsed=True,
)
