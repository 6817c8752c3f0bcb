"""Four ranks of which one is slow in one phase; a job for torchrun that `benchmarks/stragglers.py` starts.

    torchrun --nproc-per-node=4 -m benchmarks.straggler_job 30 ddp:forward:2 fsdp2:data:0 by_hand:nothing:0

Work is emulated by sleeping, because the ranks share fewer cores than they are. For each case rank 0 prints what the
records of all ranks say, read as the exporter reads them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.trainer_hooks.jobs.leaving import leave
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

import rankscope
from rankscope.rank_reader import read_rank
from rankscope.rank_snapshot import RankSnapshot
from rankscope.rank_writer import SUFFIX

WORK_SECONDS = 0.005  # of every rank, in forward and in backward
FAULT_SECONDS = 0.030  # of one rank, on top
FEATURES, CLASSES, BATCH_SIZE = 16, 4, 8


class SlowIdentity(torch.autograd.Function):
    """Passes its input on after a while, and its gradient after another."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, forward_seconds: float, backward_seconds: float) -> torch.Tensor:
        """Sleep, then pass the input on."""
        context.seconds = backward_seconds
        time.sleep(forward_seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Sleep, then pass the gradient on."""
        time.sleep(context.seconds)
        return gradient, None, None


class Work(torch.nn.Module):
    """A layer that takes its time."""

    def __init__(self, delays: dict[str, float]) -> None:
        super().__init__()
        self._seconds = [WORK_SECONDS + delays.get(phase, 0.0) for phase in ("forward", "backward")]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The same, later."""
        result: torch.Tensor = SlowIdentity.apply(inputs, *self._seconds)
        return result


class SlowlyPickled:
    """Makes the checkpoint that it is a part of slow."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds

    def __reduce__(self) -> tuple[type, tuple[float]]:
        time.sleep(self._seconds)
        return SlowlyPickled, (self._seconds,)


def build(training: str, delays: dict[str, float]) -> torch.nn.Module:
    """The model, made ready for a way to synchronise gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(FEATURES, 32), Work(delays), torch.nn.Linear(32, CLASSES))
    if training == "ddp":
        return DistributedDataParallel(model)
    if training == "fsdp2":
        for layer in (model[0], model[2], model):
            fully_shard(layer)
    return model


def average_gradients(model: torch.nn.Module) -> None:
    """By hand, all in one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat)
    flat /= dist.get_world_size()
    for gradient, part in zip(gradients, flat.split([gradient.numel() for gradient in gradients]), strict=True):
        gradient.copy_(part.view_as(gradient))


def loader(steps: int, delay: float) -> DataLoader[Any]:
    """A loader whose batches come after `delay` seconds."""
    data = TensorDataset(torch.randn(steps * BATCH_SIZE, FEATURES), torch.randint(0, CLASSES, (steps * BATCH_SIZE,)))

    def collate(samples: list[Any]) -> Any:
        time.sleep(delay)
        return default_collate(samples)

    return DataLoader(data, batch_size=BATCH_SIZE, collate_fn=collate)


def train(training: str, steps: int, delays: dict[str, float], directory: Path) -> None:
    """A loop in which this rank loses `delays` seconds a step, by phase."""
    model = build(training, delays)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(delays.get("optimizer", 0.0)))
    for inputs, targets in loader(steps, delays.get("data_wait", 0.0)):
        cross_entropy(model(inputs), targets).backward()
        if training == "by_hand":
            average_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        time.sleep(delays.get("other", 0.0))
        if "checkpoint" in delays:
            state = {"optimizer": optimizer.state_dict(), "delay": SlowlyPickled(delays["checkpoint"])}
            torch.save(state, directory / "checkpoint.pt")


def observe(case: str, steps: int) -> dict[str, Any]:
    """What the records of all ranks say of one case, by rank."""
    training, phase, slow_rank = case.split(":")
    delays = {phase: FAULT_SECONDS} if dist.get_rank() == int(slow_rank) else {}
    rankscope.instrument()
    with tempfile.TemporaryDirectory() as directory:
        train(training, steps, delays, Path(directory))
    dist.barrier()
    with rankscope.phase("other"):
        pass  # charges the phase that is open
    dist.barrier()
    records = [read_rank(path) for path in Path(os.environ["RANKSCOPE_RUN_DIR"]).glob(f"*{SUFFIX}")]
    dist.barrier()
    rankscope.uninstrument()
    return {"case": case, "phases": {record.info["rank"]: after_startup(record) for record in records}}


def after_startup(record: RankSnapshot) -> dict[str, float]:
    """Seconds by phase."""
    return {phase: seconds for phase, seconds in record.phase_seconds.items() if phase != "startup"}


def main() -> None:
    """Every case, one after the other."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for case in sys.argv[2:]:
        observed = observe(case, int(sys.argv[1]))
        if dist.get_rank() == 0:
            print(json.dumps(observed), flush=True)
    leave()


if __name__ == "__main__":
    main()
