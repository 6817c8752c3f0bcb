"""A job of gpu-check on the asynchronous device, without the profiler: `python asynchronous_job.py WAY STEPS`.

Where the job makes the GPU sleep, that device works for as long; its model's own work is the host's.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch
from validation.gpu_check import hook_job, hook_training, trace

from rankscope import guard

SLEEP = 5.0  # milliseconds
OPTIONS = {"device": "cpu", "backend": "nccl", "width": 64, "batch": 16, "only": "timeline", "pairs": 0, "block": 0}


def main() -> None:
    """The job's check of the two clocks, as its line."""
    way, steps = sys.argv[1], int(sys.argv[2])
    guard.reraise = True
    torch.set_num_threads(1)
    with asynchronous_device():
        dist.init_process_group(BACKEND)
        torch.cuda._sleep = lambda _cycles: launch(SLEEP)
        waited = hook_training.Training._wait  # this device is not waited for by `item`
        hook_training.Training._wait = lambda training, _: waited(training, torch.cuda.synchronize)
        hook_training.Training.synchronize = lambda training: training._wait(torch.cuda.synchronize)
        hook_job.traced = lambda run: ([], run())
        trace.stalls = trace.steps = lambda _events, _annotation: []
        job = hook_job.Job(argparse.Namespace(way=way, steps=steps, **OPTIONS))
        hook_job.say(hook_job.attempt(job.timeline, dist.get_rank()))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
