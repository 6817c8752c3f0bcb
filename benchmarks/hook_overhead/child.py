"""One training process, which runs blocks of steps for the driver and reports their duration."""

from __future__ import annotations

import os
import sys
import threading
import time
from multiprocessing.connection import Client
from pathlib import Path

import torch
import torch.distributed as dist

ADDRESS = "HOOK_OVERHEAD_ADDRESS"


def join(ranks: int) -> None:
    """Join a group of `ranks` ranks as rank 0. The others are torch's fake, which exchanges nothing."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 - makes the backend known

    store = dist.HashStore()  # type: ignore[attr-defined]  # torch's own stubs do not export it
    dist.init_process_group("gloo" if ranks == 1 else "fake", store=store, rank=0, world_size=ranks)


def main(training_name: str, contender_name: str) -> None:
    """Serve the driver until it sends 0."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.hook_overhead.contenders import CONTENDERS
    from benchmarks.hook_overhead.trainings import TRAININGS

    torch.set_num_threads(1)
    contender = CONTENDERS[contender_name]()
    began, cpu = time.perf_counter(), time.thread_time()
    contender.begin()
    start = time.perf_counter() - began, time.thread_time() - cpu
    make = TRAININGS[training_name]
    if make.ranks:
        join(make.ranks)
    training = make()
    with Client(os.environ[ADDRESS], "AF_UNIX") as driver:
        driver.send({"pid": os.getpid(), "start": start})
        while steps := driver.recv():
            collectives, slept = contender.collectives(), training.slept
            began, cpu = time.perf_counter(), time.thread_time()
            contender.loop(training, steps)
            wall, cpu = time.perf_counter() - began, time.thread_time() - cpu
            seconds = (wall - (training.slept - slept)) / steps, cpu / steps
            collectives = (contender.collectives() - collectives) / steps
            threads = threading.active_count() - 1
            driver.send({"seconds": seconds, "collectives": collectives, "threads": threads})
        contender.end()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
