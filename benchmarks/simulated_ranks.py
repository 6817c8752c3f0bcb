"""The series of many simulated ranks and their GPUs, served as exporters would: for what the rules cost."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

RANKS_PER_NODE = 8
RUN = "simulated"
PHASES = {
    "other": 0.02,
    "startup": 0.0,
    "data_wait": 0.02,
    "h2d_copy": 0.01,
    "forward": 0.28,
    "backward": 0.48,
    "collective_wait": 0.08,
    "optimizer": 0.1,
    "checkpoint": 0.01,
    "evaluation": 0.0,
}
LAGGARD, LAG = 5, 0.2
STEPS = 2.0  # a second
BOUNDS = (
    "0.005",
    "0.01",
    "0.025",
    "0.05",
    "0.1",
    "0.25",
    "0.5",
    "1.0",
    "2.5",
    "5.0",
    "10.0",
    "30.0",
    "60.0",
    "300.0",
    "+Inf",
)


def rank_series(rank: int, ranks: int, age: float) -> Iterator[str]:
    """The lines of /metrics about one rank that is `age` seconds old. Under NCCL no steps are aligned."""
    swing = 1 + 0.02 * (rank * 7919 % 1000) / 1000
    own = f'run="{RUN}",rank="{rank}"'
    group = f'group="0-{ranks - 1}"'
    now = time.time()
    node = f"node-{rank // RANKS_PER_NODE}"
    place = f'local_rank="{rank % RANKS_PER_NODE}",world_size="{ranks}",node="{node}",pid="{rank}",uuid="GPU-{rank}"'
    software = 'backend="nccl",torch_version="2.13.0",rankscope_version="0"'
    yield f"rankscope_rank_info{{{own},{group},{place},{software}}} 1"
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
    lags = rank == LAGGARD
    for phase, share in PHASES.items():
        moved = {"backward": LAG * lags, "collective_wait": LAG * (not lags)}.get(phase, 0.0)
        seconds = (share * swing * (1 - LAG) + moved) * age
        yield f'rankscope_rank_phase_seconds_total{{{own},phase="{phase}"}} {seconds:.6f}'
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


def gpu_series(rank: int, age: float) -> Iterator[str]:
    """The lines about its GPU that the rules read."""
    own = f'gpu="{rank % RANKS_PER_NODE}",uuid="GPU-{rank}"'
    yield f'rankscope_gpu_info{{{own},node="node-{rank // RANKS_PER_NODE}",name="NVIDIA H100 80GB HBM3"}} 1'
    yield f'rankscope_gpu_state_info{{{own},state="working"}} 1'
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


def serve(ranks: int) -> ThreadingHTTPServer:
    """One server for all nodes: /N is the exporter of node N."""
    began = time.time() - 3600.0

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            node = int(self.path.strip("/"))
            age = time.time() - began
            here = range(node * RANKS_PER_NODE, min(ranks, (node + 1) * RANKS_PER_NODE))
            lines = [line for rank in here for line in (*rank_series(rank, ranks, age), *gpu_series(rank, age))]
            self.send_response(200)
            self.send_header("Content-Type", "text/plain; version=0.0.4")
            self.end_headers()
            self.wfile.write(("\n".join(lines) + "\n").encode())

        def log_message(self, *_: object) -> None:
            """A line a scrape is of no use."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server
