"""The faults and decoys of the gauntlet, as figures of four ranks and their GPUs (see promtool.py)."""

from __future__ import annotations

from collections.abc import Mapping

from testing.promtool import GIB, HOST_WAITS, IN_COLLECTIVE, STEPS, Case, Fault, everywhere, phases


def alert(name: str, severity: str = "warning", **labels: str) -> dict[str, str]:
    """Return the labels that the tests compare."""
    return {"alertname": f"Rankscope{name}", "severity": severity, **labels}


def laggard(rank: int, cause: str) -> dict[str, str]:
    """Return the alert about one rank that slows down the others."""
    return alert("RankZeroLagging" if rank == 0 else "RankLagging", rank=str(rank), cause=cause)


def late(rank: int, phase: str, **more: float) -> dict[int, Mapping[str, float | None]]:
    """Return steps 1.3 times as long, because `rank` takes longer in `phase` and the others wait for it."""
    computing = {"forward": 0.215, "backward": 0.37, "optimizer": 0.077, "data_wait": 0.015, "other": 0.015}
    rest = {"h2d_copy": 0.008, "checkpoint": 0.01}
    waiting = phases(**computing, **rest, collective_wait=0.29)
    own = {**computing, **rest, "collective_wait": 0.06}
    own[phase] = own.get(phase, 0.0) + 0.23
    steps = {"rankscope_rank_steps_total": STEPS / 1.3}
    return {**everywhere({**waiting, **steps}), rank: {**phases(**own), **steps, **more}}


def spread(phase: str) -> dict[str, float]:
    """Return steps 1.3 times as long, because every rank takes longer in `phase`."""
    figures = {"forward": 0.215, "backward": 0.37, "optimizer": 0.077, "data_wait": 0.015, "other": 0.015}
    figures |= {"h2d_copy": 0.008, "checkpoint": 0.01, "collective_wait": 0.06}
    figures[phase] += 0.23
    return {**phases(**figures), "rankscope_rank_steps_total": STEPS / 1.3}


def loaders(working: float | None) -> dict[str, float | None]:
    """Return how much of the time a rank's two loader workers make batches; None if unknown."""
    idle = None if working is None else 1.0 - working
    return {LOADERS % "working": working and 2 * working, LOADERS % "idle": idle and 2 * idle}


def aligned(floor: float, skew: float, **blame: float) -> dict[str, float]:
    """Return what the exporter's alignment of steps shows for one rank, in seconds per second."""
    figures = {"rankscope_rank_transfer_floor_seconds_total": floor, "rankscope_rank_skew_seconds_total": skew}
    return figures | {f'rankscope_rank_blame_seconds_total{{phase="{p}"}}': share for p, share in blame.items()}


def dry(**seconds: float) -> dict[str, float]:
    """Return the seconds per second in which the device waits for the host, by phase."""
    return {f'rankscope_rank_device_dry_seconds_total{{phase="{phase}"}}': value for phase, value in seconds.items()}


WORKERS = 'rankscope_rank_cpu_seconds_total{who="workers"}'
CLOCK = 'rankscope_gpu_clock_hertz{domain="sm"}'
THROTTLED = 'rankscope_gpu_throttled_seconds_total{reason="sw_thermal_slowdown"}'
RUN_QUEUE = "rankscope_rank_run_queue_seconds_total"
LOADERS = 'rankscope_rank_loader_worker_seconds_total{state="%s"}'
WORKERS_QUEUE = "rankscope_rank_workers_run_queue_seconds_total"
GC = 'rankscope_rank_gc_seconds_total{generation="2"}'
BYTES = 'rankscope_rank_collective_bytes_total{op="ddp_all_reduce"}'
USUAL_STEPS = Fault(ranks=everywhere(aligned(0.08, 0.01)))
STANDS_STILL: dict[str, float | None] = {
    **phases(forward=0, backward=0, optimizer=0, data_wait=0, h2d_copy=0, checkpoint=0, other=0, collective_wait=1),
    "rankscope_rank_steps_total": 0.0,
    "rankscope_rank_last_progress_timestamp_seconds": 0.0,
}
IN_FORWARD = 'rankscope_rank_phase_since_timestamp_seconds{phase="forward"}'
ISSUED = 'rankscope_rank_group_collectives_total{group="0-3"}'
SHORT_STEPS = {
    f'rankscope_rank_step_seconds_bucket{{le="{le}"}}': STEPS for le in ("0.25", "0.5", "1.0", "2.5", "+Inf")
}
ALL_LOADERS_SLOW = Fault(
    {rank: {**figures, WORKERS: 0.05, **loaders(0.95)} for rank, figures in late(2, "data_wait").items()}
)

FAULTS = (
    Case(
        "loader workers compute on every rank",
        Fault(everywhere({**spread("data_wait"), WORKERS: 1.8})),
        (alert("DataBound", cause="cpu"),),
    ),
    Case(
        "loader workers wait for storage on every rank",
        Fault(everywhere({**spread("data_wait"), WORKERS: 0.05})),
        (alert("DataBound", cause="io"),),
    ),
    Case(
        "data is late and workers are unknown",
        Fault(everywhere({**spread("data_wait"), "rankscope_rank_child_processes": 0.0, WORKERS: 0.0})),
        (alert("DataBound", cause="unknown"),),
    ),
    Case(
        "loader workers wait for CPUs",
        Fault(everywhere({**spread("data_wait"), WORKERS: 0.3, WORKERS_QUEUE: 1.2})),
        (alert("DataBound", cause="cpu"),),
    ),
    Case(
        "every loader computes all the time and one rank is the last and the clocks of workers are unknown",
        Fault({rank: {**late(2, "data_wait")[rank], WORKERS: 1.8, **loaders(None)} for rank in range(4)}),
        (alert("DataBound", cause="cpu"),),
    ),
    Case(
        "every loader waits for storage and one rank is the last",
        Fault(
            {
                **everywhere(phases(forward=0.17, backward=0.35, data_wait=0.13, collective_wait=0.24)),
                2: phases(forward=0.17, backward=0.35, data_wait=0.31, collective_wait=0.06),
            },
        ),
        (alert("DataBound", cause="io"),),
        Fault(everywhere({WORKERS: 0.05})),
    ),
    Case(
        "every loader waits for storage all the time and one rank is the last",
        ALL_LOADERS_SLOW,
        (alert("DataBound", cause="io"),),
    ),
    Case(
        "data is late on one rank after the other",
        Fault(everywhere({**spread("collective_wait"), **aligned(0.08, 0.21, data_wait=0.07), WORKERS: 0.05})),
        (alert("RotatingStraggler", cause="data_wait"),),
        USUAL_STEPS,
    ),
    Case("one slow loader", Fault(late(2, "data_wait", **{WORKERS: 0.1})), (laggard(2, "data_wait"),)),
    Case(
        "one loader is much slower than the others, which are slow",
        Fault(
            {rank: {**figures, **loaders(1.0 if rank == 2 else 0.75)} for rank, figures in late(2, "data_wait").items()}
        ),
        (laggard(2, "data_wait"),),
    ),
    Case(
        "slow copies on every rank",
        Fault(everywhere(spread("h2d_copy"))),
        (alert("CopyBound", cause="h2d_copy"),),
    ),
    Case("slow copies on one rank", Fault(late(3, "h2d_copy")), (laggard(3, "h2d_copy"),)),
    Case(
        "a batch that is too small",
        Fault(
            gpus=everywhere({"rankscope_gpu_busy_seconds_total": 0.35, "rankscope_gpu_memory_used_bytes": 24 * GIB}),
        ),
        (alert("LowUtilization", cause="batch_too_small"),),
    ),
    Case(
        "memory is full and the GPU half idle",
        Fault(gpus=everywhere({"rankscope_gpu_busy_seconds_total": 0.4, "rankscope_gpu_memory_used_bytes": 74 * GIB})),
        (alert("LowUtilization", cause="memory_bound"),),
    ),
    Case(
        "a GPU that is half idle for no visible reason",
        Fault(gpus=everywhere({"rankscope_gpu_busy_seconds_total": 0.4})),
        (alert("LowUtilization", cause="unknown"),),
    ),
    Case(
        "synchronous checkpoints",
        Fault(everywhere(spread("checkpoint"))),
        (alert("CheckpointSlow", cause="checkpoint"),),
    ),
    Case(
        "rank 0 saves and the others wait",
        Fault(late(0, "checkpoint")),
        (alert("CheckpointSlow", cause="checkpoint"),),
    ),
    Case("rank 0 works outside the model", Fault(late(0, "other")), (laggard(0, "other"),)),
    Case(
        "one GPU is throttled",
        Fault(late(1, "backward"), gpus={1: {THROTTLED: 0.9, CLOCK: 1.4e9}}),
        (laggard(1, "throttled"),),
    ),
    Case(
        "every GPU is throttled",
        Fault(gpus=everywhere({THROTTLED: 1.0, CLOCK: 1.4e9})),
        (alert("Throttled", cause="throttled"),),
    ),
    Case(
        "one rank waits for CPU time",
        Fault(late(1, "forward", **{RUN_QUEUE: 0.25})),
        (laggard(1, "cpu_contention"),),
    ),
    Case(
        "a foreign process on the GPU of one rank",
        Fault(late(2, "backward"), gpus={2: {"rankscope_gpu_processes": 2.0}}),
        (laggard(2, "foreign_process"),),
    ),
    Case(
        "a foreign process makes the GPU of rank 0 busier and fuller than the others",
        Fault(
            late(0, "backward"),
            gpus={
                0: {
                    "rankscope_gpu_processes": 2.0,
                    "rankscope_gpu_busy_seconds_total": 1.0,
                    "rankscope_gpu_memory_used_bytes": 64 * GIB,
                }
            },
        ),
        (laggard(0, "foreign_process"),),
    ),
    Case("one rank has more to compute", Fault(late(2, "backward")), (laggard(2, "backward"),)),
    Case(
        "a narrow link",
        Fault(
            everywhere({**spread("collective_wait"), **aligned(0.29, 0.01)}),
            gpus={3: {"rankscope_gpu_pcie_link_width": 4.0}},
        ),
        (alert("TransferBound", rank="3", cause="link"),),
        USUAL_STEPS,
    ),
    Case(
        "a congested network",
        Fault(everywhere({**spread("collective_wait"), **aligned(0.29, 0.01)})),
        (alert("TransferBound", cause="network"),),
        USUAL_STEPS,
    ),
    Case(
        "all wait and no steps are aligned",
        Fault(everywhere(spread("collective_wait"))),
        (alert("TransferBound", cause="unknown"),),
    ),
    Case(
        "uneven work that rotates",
        Fault(everywhere({**spread("collective_wait"), **aligned(0.08, 0.21, forward=0.02, backward=0.05)})),
        (alert("RotatingStraggler", cause="uneven_work"),),
        USUAL_STEPS,
    ),
    Case(
        "all ranks share too few CPUs",
        Fault(
            everywhere({**spread("collective_wait"), **aligned(0.08, 0.21, unknown=0.07), RUN_QUEUE: 0.15}),
        ),
        (alert("RotatingStraggler", cause="unknown"),),
        USUAL_STEPS,
    ),
    Case(
        "garbage collection on a rank at random",
        Fault(everywhere({**spread("collective_wait"), **aligned(0.08, 0.21, unknown=0.07), GC: 0.06})),
        (alert("RotatingStraggler", cause="gc"),),
        USUAL_STEPS,
    ),
    Case(
        "single steps that take very long",
        Fault(
            {
                **everywhere({**spread("collective_wait"), **aligned(0.08, 0.21, forward=0.07)}),
                0: {
                    **spread("collective_wait"),
                    **aligned(0.08, 0.21, forward=0.07),
                    **dict.fromkeys(SHORT_STEPS, STEPS / 1.3),
                    **{
                        f'rankscope_rank_step_seconds_bucket{{le="{le}"}}': STEPS * 0.74
                        for le in ("0.25", "0.5", "1.0")
                    },
                },
            }
        ),
        (alert("RotatingStraggler", cause="spikes"),),
        Fault({**everywhere(aligned(0.08, 0.01)), 0: {**aligned(0.08, 0.01), **SHORT_STEPS}}),
    ),
    Case(
        "one rank hangs and the others wait for it on idle GPUs",
        Fault(
            {
                **everywhere({**STANDS_STILL, IN_FORWARD: None, IN_COLLECTIVE: 0.0, ISSUED: 0.001}),
                1: {**STANDS_STILL, **phases(collective_wait=0, forward=1), IN_FORWARD: 0.0, ISSUED: 0.0},
            },
            everywhere({"rankscope_gpu_busy_seconds_total": 0.0, "rankscope_gpu_last_busy_timestamp_seconds": 0.0}),
        ),
        (alert("RankStuck", "critical", rank="1"),),
    ),
    Case(
        "training on the CPU",
        Fault(
            gpus={
                2: {
                    "rankscope_gpu_busy_seconds_total": 0.0,
                    "rankscope_gpu_last_busy_timestamp_seconds": 0.0,
                    "rankscope_gpu_memory_used_bytes": 0.5 * GIB,
                }
            }
        ),
        (alert("CpuFallback", "critical", rank="2", cause="cpu_fallback"),),
    ),
    Case(
        "rank 0 aggregates for the others",
        Fault(late(0, "other", **{BYTES: 3e9}), gpus={0: {"rankscope_gpu_memory_used_bytes": 76 * GIB}}),
        (laggard(0, "aggregation"),),
    ),
    Case(
        "metrics are averaged over the ranks in every batch",
        Fault(
            everywhere(
                {
                    **spread("collective_wait"),
                    'rankscope_rank_collectives_total{op="all_reduce"}': 20 * STEPS,
                    'rankscope_rank_collective_bytes_total{op="all_reduce"}': 80 * STEPS,
                    'rankscope_rank_collective_seconds_total{op="all_reduce"}': 0.22,
                    BYTES: 1e6 * STEPS,
                }
            )
        ),
        (alert("SmallCollectives", cause="synchronization"),),
    ),
    Case(
        "every step is skipped while ranks wait for each other",
        Fault(
            everywhere(
                {
                    **spread("collective_wait"),
                    **aligned(0.08, 0.21, forward=0.07),
                    "rankscope_rank_steps_total": 0.0,
                    "rankscope_rank_amp_scale": 0.001,
                    "rankscope_rank_amp_skipped_steps_total": STEPS,
                }
            ),
        ),
        (alert("LossScaleCollapse", "critical", cause="not_finite"),),
        Fault(
            everywhere(
                {
                    **aligned(0.08, 0.01),
                    "rankscope_rank_amp_scale": 65536.0,
                    "rankscope_rank_amp_skipped_steps_total": 0.0,
                }
            )
        ),
    ),
    Case(
        "the loss scale collapses",
        Fault(
            everywhere({"rankscope_rank_amp_scale": 0.001, "rankscope_rank_amp_skipped_steps_total": STEPS}),
        ),
        (alert("LossScaleCollapse", "critical", cause="not_finite"),),
        Fault(everywhere({"rankscope_rank_amp_scale": 65536.0, "rankscope_rank_amp_skipped_steps_total": 0.0})),
    ),
)

SENDING = Fault(
    everywhere(
        {
            **spread("collective_wait"),
            'rankscope_rank_collectives_total{op="all_reduce"}': 4 * STEPS,
            'rankscope_rank_collective_bytes_total{op="all_reduce"}': 16e3 * STEPS,
            'rankscope_rank_collective_seconds_total{op="all_reduce"}': 0.02,
            'rankscope_rank_collectives_total{op="send"}': 6 * STEPS,
            'rankscope_rank_collective_bytes_total{op="send"}': 24e3 * STEPS,
            'rankscope_rank_collectives_total{op="recv"}': 6 * STEPS,
            'rankscope_rank_collective_bytes_total{op="recv"}': 24e3 * STEPS,
            'rankscope_rank_collective_seconds_total{op="recv"}': 0.2,
            BYTES: 0.0,
        }
    )
)
SMALL_PIPELINE = Case("a pipeline of a small model", SENDING, usual=SENDING)
DECOYS = (
    Case("an evaluation pass of all ranks", Fault(everywhere(phases(evaluation=0.97, forward=0.01, backward=0.02)))),
    Case("longer sequences for all", Fault(everywhere({"rankscope_rank_steps_total": STEPS / 1.5}))),
    Case(
        "gradient accumulation",
        Fault(everywhere({"rankscope_rank_steps_total": STEPS / 4, **phases(collective_wait=0.02)})),
    ),
    Case(
        "two percent of drift",
        Fault({1: phases(forward=0.3, collective_wait=0.06), 2: phases(forward=0.27, collective_wait=0.09)}),
    ),
    Case("a short checkpoint", Fault(everywhere(phases(checkpoint=0.02)))),
)
CASES = FAULTS + DECOYS

WAITS = "rankscope_rank_device_waits_total"
USUALLY_ISSUED = Fault(everywhere({**dry(other=0.01, forward=0.02, backward=0.01, optimizer=0.01), HOST_WAITS: 0.3}))
DEVICE_FAULTS = (
    Case(
        "hosts are too slow to launch",
        Fault(everywhere({**dry(other=0.01, forward=0.1, backward=0.2, optimizer=0.05), HOST_WAITS: 0.01})),
        (alert("LaunchBound", cause="launch"),),
        USUALLY_ISSUED,
    ),
    Case(
        "hosts are too slow to launch and read a value in every step",
        Fault(everywhere({**dry(forward=0.15, backward=0.3, optimizer=0.05), HOST_WAITS: 0.1, WAITS: STEPS})),
        (alert("LaunchBound", cause="launch"),),
        USUALLY_ISSUED,
    ),
    Case(
        "a value is read from the device in every step",
        Fault(
            everywhere(
                {**spread("other"), **dry(other=0.2, forward=0.05), HOST_WAITS: 0.5, WAITS: 3 * STEPS},
            )
        ),
        (alert("DeviceReads", cause="device_read"),),
        USUALLY_ISSUED,
    ),
    Case(
        "one host launches slowly and its device runs dry",
        Fault({**late(2, "forward"), 2: {**late(2, "forward")[2], **dry(forward=0.25)}}),
        (laggard(2, "forward"),),
        USUALLY_ISSUED,
    ),
)
DEVICE_DECOYS = (
    Case(
        "a value is read every hundred steps",
        Fault(everywhere({**dry(other=0.02, forward=0.02), HOST_WAITS: 0.8, WAITS: STEPS / 100})),
        usual=USUALLY_ISSUED,
    ),
    Case(
        "a value is read in every step and the device is nearly always busy",
        Fault(everywhere({**dry(other=0.02, forward=0.04), HOST_WAITS: 0.8, WAITS: STEPS})),
        usual=USUALLY_ISSUED,
    ),
    Case(
        "the host works outside the model while the device has nothing to do",
        Fault(everywhere({**spread("other"), **dry(other=0.2), HOST_WAITS: 0.0})),
        usual=USUALLY_ISSUED,
    ),
)
ONLY_BY_THE_DEVICE = DEVICE_FAULTS + DEVICE_DECOYS
