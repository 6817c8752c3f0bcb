"""The series of many simulated ranks and their GPUs, served like exporters, to measure the cost of the rules."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

from rankscope.record.layout import STEP_BOUNDS
from rankscope.record.phases import ISSUING, NAMES
from rankscope_exporter.ranks.step_alignment import CAUSES, UNKNOWN
from testing.http_server import exposition, http_server

RANKS_PER_NODE = 8
RUN = "simulated"
# With NCCL the host issues work and then waits for the device; the device knows where the time goes.
HOST_PHASES = dict.fromkeys(NAMES, 0.0) | {
    "other": 0.03,
    "data_wait": 0.02,
    "h2d_copy": 0.01,
    "forward": 0.08,
    "backward": 0.14,
    "device_wait": 0.68,
    "optimizer": 0.03,
    "checkpoint": 0.01,
}
DEVICE_PHASES = {
    "other": 0.02,
    "data_wait": 0.02,
    "h2d_copy": 0.01,
    "forward": 0.28,
    "backward": 0.48,
    "collective_wait": 0.08,
    "device_wait": 0.01,
    "optimizer": 0.1,
}
DRY = 0.05  # ratio of the time in phases in which the host issues work
MEASURED = 0.5  # ratio of the steps: one a second
LAGGARD, LAG = 5, 0.2
STEPS = 2.0  # a second
BOUNDS = (*map(str, STEP_BOUNDS), "+Inf")


def rank_series(rank: int, ranks: int, age: float) -> Iterator[str]:
    """Yield the lines of /metrics about one rank that is `age` seconds old."""
    swing = 1 + 0.02 * (rank * 7919 % 1000) / 1000
    own = f'run="{RUN}",owner="0",rank="{rank}"'
    group = f'group="0-{ranks - 1}"'
    now = time.time()
    node = f"node-{rank // RANKS_PER_NODE}"
    process = f'local_rank="{rank % RANKS_PER_NODE}",world_size="{ranks}",node="{node}",pid="{rank}",uuid="GPU-{rank}"'
    software = 'backend="nccl",torch_version="2.13.0",rankscope_version="0"'
    yield f"rankscope_rank_info{{{own},{group},{process},{software}}} 1"
    for name, value in {
        "up": 1.0,
        "start_timestamp_seconds": now - age,
        "last_progress_timestamp_seconds": now,
        "checkpoint_last_timestamp_seconds": now,
        "steps_total": STEPS * age,
        "samples_total": STEPS * age,
        "tokens_total": STEPS * age,
        "micro_steps_total": STEPS * age,
        "child_processes": 2.0,
        "read_bytes_total": age,
        "amp_scale": 65536.0,
        "amp_skipped_steps_total": 0.0,
    }.items():
        yield f"rankscope_rank_{name}{{{own}}} {value:.6f}"
    for phase, share in HOST_PHASES.items():
        yield f'rankscope_rank_phase_seconds_total{{{own},phase="{phase}"}} {share * swing * age:.6f}'
    yield from device_series(rank, own, swing, age)
    yield f'rankscope_rank_phase_since_timestamp_seconds{{{own},phase="forward"}} {now:.6f}'
    for le in BOUNDS:
        yield f'rankscope_rank_step_seconds_bucket{{{own},le="{le}"}} {STEPS * age * (float(le) > 0.4):.6f}'
    for op in ("all_reduce", "all_gather", "ddp_all_reduce"):
        for name in ("collectives", "collective_seconds", "collective_duration_seconds", "collective_bytes"):
            yield f'rankscope_rank_{name}_total{{{own},op="{op}"}} {STEPS * age:.6f}'
    for generation in range(3):
        yield f'rankscope_rank_gc_seconds_total{{{own},generation="{generation}"}} {0.001 * age:.6f}'
    for who in ("training", "workers"):
        yield f'rankscope_rank_cpu_seconds_total{{{own},who="{who}"}} {0.5 * age:.6f}'
    for state in ("working", "idle"):
        yield f'rankscope_rank_loader_worker_seconds_total{{{own},state="{state}"}} {age:.6f}'
    for name in ("run_queue", "workers_run_queue"):
        yield f"rankscope_rank_{name}_seconds_total{{{own}}} {0.01 * age:.6f}"


def device_series(rank: int, own: str, swing: float, age: float) -> Iterator[str]:
    """Yield the lines about the steps measured on the device: their sums, and their alignment."""
    moved = {"backward": LAG} if rank == LAGGARD else {"collective_wait": LAG}
    shares = {phase: share * swing * (1 - LAG) + moved.get(phase, 0.0) for phase, share in DEVICE_PHASES.items()}
    measured = MEASURED * age
    # On a node without the laggard, all ranks wait.
    has_laggard = rank // RANKS_PER_NODE == LAGGARD // RANKS_PER_NODE
    floor = DEVICE_PHASES["collective_wait"] * (1 - LAG) + LAG * (not has_laggard)
    for phase, share in shares.items():
        yield f'rankscope_rank_device_seconds_total{{{own},phase="{phase}"}} {share * measured:.6f}'
        if phase in ISSUING:
            yield f'rankscope_rank_device_dry_seconds_total{{{own},phase="{phase}"}} {DRY * share * measured:.6f}'
    for name, value in {
        "device_steps": STEPS * measured,
        "device_waits": STEPS * age,
        "aligned_steps": STEPS * measured,
        "aligned_step_seconds": measured,
        "transfer_floor_seconds": floor * measured,
        "skew_seconds": LAG * (has_laggard and rank != LAGGARD) * measured,
    }.items():
        yield f"rankscope_rank_{name}_total{{{own}}} {value:.6f}"
    for phase in (*CAUSES, UNKNOWN):
        blame = LAG * (rank == LAGGARD and phase == "backward") * measured
        yield f'rankscope_rank_blame_seconds_total{{{own},phase="{phase}"}} {blame:.6f}'


def finding_series(age: float) -> Iterator[str]:
    """Yield the lines about the run, from the exporter that judges it."""
    place = f'rank="{LAGGARD}",node="node-0",uuid="GPU-{LAGGARD}"'
    own = f'run="{RUN}",owner="0",kind="straggler",cause="backward",severity="warning",{place}'
    yield f'rankscope_run_judged_info{{run="{RUN}",owner="0",by="analyzer"}} 1'
    yield f"rankscope_finding_ratio{{{own}}} {LAG}"
    yield f"rankscope_finding_since_timestamp_seconds{{{own}}} {time.time() - age:.6f}"
    yield f'rankscope_finding_info{{{own},summary="It is late",evidence="It waits.",advice="Look."}} 1'


def gpu_series(rank: int, age: float) -> Iterator[str]:
    """Yield the lines about the rank's GPU that the rules read."""
    own = f'gpu="{rank % RANKS_PER_NODE}",uuid="GPU-{rank}"'
    yield f'rankscope_gpu_info{{{own},node="node-{rank // RANKS_PER_NODE}",name="NVIDIA H100 80GB HBM3"}} 1'
    yield f'rankscope_gpu_state_info{{{own},state="working",run="{RUN}",rank="{rank}",owner="0"}} 1'
    yield f'rankscope_gpu_allocation_info{{{own},source="slurm",run="{RUN}",rank="{rank}",owner="0"}} 1'
    for name, value in {
        "up": 1.0,
        "busy_seconds_total": 0.9 * age,
        "last_busy_timestamp_seconds": time.time(),
        "memory_used_bytes": 6e10,
        "memory_total_bytes": 8e10,
        "processes": 1.0,
        "pcie_link_width": 16.0,
        "pcie_link_width_max": 16.0,
        "nvlink_links": 18.0,
        "nvlink_links_active": 18.0,
    }.items():
        yield f"rankscope_gpu_{name}{{{own}}} {value:.6f}"
    for reason in (
        "sw_power_cap",
        "hw_slowdown",
        "sync_boost",
        "sw_thermal_slowdown",
        "hw_thermal_slowdown",
        "hw_power_brake_slowdown",
    ):
        yield f'rankscope_gpu_throttled_seconds_total{{{own},reason="{reason}"}} {0.1 * age:.6f}'
    for domain in ("graphics", "sm", "memory", "video"):
        yield f'rankscope_gpu_clock_hertz{{{own},domain="{domain}"}} 1.9e9'
        yield f'rankscope_gpu_clock_max_hertz{{{own},domain="{domain}"}} 1.98e9'
    for xid in range(23):
        yield f'rankscope_gpu_xid_errors_total{{{own},xid="{xid}"}} 0'


@contextmanager
def serve(ranks: int) -> Iterator[str]:
    """Serve all nodes: /N is the exporter of node N. Yields the address."""
    began = time.time() - 3600.0

    def expose(scrape: BaseHTTPRequestHandler) -> None:
        node = int(scrape.path.strip("/"))
        age = time.time() - began
        own = [f"rankscope_exporter_time_seconds {time.time():.6f}", 'rankscope_exporter_build_info{version="0"} 1']
        own += [f'rankscope_exporter_ranks_alive{{node="node-{node}"}} {RANKS_PER_NODE}']
        own += [f'rankscope_exporter_run_not_judged_info{{run="{RUN}",owner="0",reason="ranks_elsewhere"}} 1']
        own += finding_series(age) if node == 0 else []
        here = range(node * RANKS_PER_NODE, min(ranks, (node + 1) * RANKS_PER_NODE))
        of_ranks = (line for rank in here for line in (*rank_series(rank, ranks, age), *gpu_series(rank, age)))
        exposition([*own, *of_ranks])(scrape)

    with http_server(expose) as port:
        yield f"127.0.0.1:{port}"
