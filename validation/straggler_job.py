"""Ranks, some of which are slow in one phase: a job for torchrun that `validation/layouts.py` starts.

    torchrun --nproc-per-node=4 -m validation.straggler_job gloo 30 ddp:forward:2

Ranks sleep instead of computing, because they share few cores; on the asynchronous device, the device sleeps.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist
from testing.job.control import Behavior
from testing.job.device import Device, installed, sleep
from testing.job.model import Samples, Work, layers, save
from testing.leaving import leave
from torch.distributed import _functional_collectives as functional
from torch.utils.data import DataLoader
from validation.straggler_layouts import TRAININGS, mesh

import rankscope
from rankscope.timeline import device_clock

WORK_MS = float(os.environ.get("WORK_MS", "5"))
WORK = Behavior(forward=WORK_MS, backward=WORK_MS, checkpoint=0)  # of every rank
FAULT_MS = float(os.environ.get("FAULT_MS", "30"))  # added to one phase of one rank
LINK = "link"  # instead of a phase: the ranks' link is slow
FIELDS = {"data_wait": "fetch", "other": "post"}  # fields of a behavior for phases with another name


def train(training: str, steps: int, behavior: Behavior, device: Device, directory: Path) -> None:
    """Train for some steps, with this rank's behavior."""
    model, step = TRAININGS[training](layers(Work(device, behavior)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: sleep(behavior.optimizer))
    for batch in islice(DataLoader(Samples(lambda: behavior), batch_size=None), steps):
        loss = step(batch["input_ids"])
        optimizer.step()
        optimizer.zero_grad()
        device.read(loss.detach())
        sleep(behavior.post)
        if behavior.checkpoint:
            save(optimizer, directory / "checkpoint.pt", lambda: sleep(behavior.checkpoint))


def behavior_of(phase: str, is_slow: bool) -> Behavior:
    """Return the behavior of a rank that is slow in this phase, or of a healthy one."""
    is_slow = is_slow and phase != LINK
    field = FIELDS.get(phase, phase)
    return replace(WORK, **{field: getattr(WORK, field) + FAULT_MS}) if is_slow else WORK


@contextmanager
def slow_link(device: Device) -> Iterator[None]:
    """Let each wait for a functional collective, such as tensor parallelism's, take longer on this rank."""

    def wait(tensor: torch.Tensor) -> torch.Tensor:
        device.take(FAULT_MS)
        return original(tensor)

    original = functional.wait_tensor
    with patch.object(functional, "wait_tensor", wait):
        yield


def main() -> None:
    """Train one case."""
    # Dozens of steps must suffice, so every step is measured.
    device_clock.SECONDS_PER_MARK = 0.0
    # FSDP2 warns that the result of tensor parallelism is a view; it is not changed in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    kind, steps, case = sys.argv[1:]
    training, phase, slow_ranks = case.split(":")
    with installed(kind) as device, tempfile.TemporaryDirectory() as directory:
        dist.init_process_group(device.backend)
        is_slow = phase != "nothing" and str(dist.get_rank()) in slow_ranks.split("+")
        with slow_link(device) if is_slow and phase == LINK else nullcontext():
            rankscope.instrument()
            train(training, int(steps), behavior_of(phase, is_slow), device, Path(directory))
        mesh.cache_clear()
        leave()


if __name__ == "__main__":
    main()
