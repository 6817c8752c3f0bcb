"""Four ranks of which one is slow in one phase; a job for torchrun that `validation/stragglers.py` starts.

    torchrun --nproc-per-node=4 -m validation.straggler_job gloo 30 ddp:forward:2 fsdp2:data_wait:0 by_hand:nothing:0

Work is emulated by sleeping, because the ranks share fewer cores than they are; on the asynchronous device it is the
device that sleeps. For each case rank 0 prints what the records of all ranks say, read as the exporter reads them.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch, read
from testing.leaving import leave
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset, default_collate

import rankscope
from rankscope.record.phases import PLANNED
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.writer import SUFFIX
from rankscope.timeline import device_clock

WORK_SECONDS = 0.005  # of every rank, in forward and in backward
FAULT_SECONDS = 0.030  # of one rank, on top
FEATURES, HIDDEN, CLASSES, BATCH_SIZE, MICRO_BATCHES = 16, 32, 4, 8, 4
IS_ASYNCHRONOUS = sys.argv[1:2] == ["asynchronous"]

Step = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # forward, backward and averaging; gives the loss


def take(seconds: float) -> None:
    """The device's time: on gloo the host is the device."""
    if IS_ASYNCHRONOUS:
        launch(seconds * 1000)
    else:
        time.sleep(seconds)


class SlowIdentity(torch.autograd.Function):
    """Passes its input on after a while, and its gradient after another."""

    @staticmethod
    def forward(context: Any, inputs: torch.Tensor, forward_seconds: float, backward_seconds: float) -> torch.Tensor:
        """Work, then pass the input on."""
        context.seconds = backward_seconds
        take(forward_seconds)
        return inputs.view_as(inputs)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Work, then pass the gradient on."""
        take(context.seconds)
        return gradient, None, None


class Work(nn.Module):
    """A layer that takes its time, for a step that comes in so many parts."""

    def __init__(self, delays: dict[str, float], parts: int = 1) -> None:
        super().__init__()
        self._seconds = [(WORK_SECONDS + delays.get(phase, 0.0)) / parts for phase in ("forward", "backward")]

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


def layers(delays: dict[str, float]) -> nn.Sequential:
    """The model, alike on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, HIDDEN), Work(delays), nn.Linear(HIDDEN, CLASSES))


@cache
def mesh(*names: str) -> DeviceMesh:
    """All ranks in one dimension, or two by two."""
    return init_device_mesh("cpu", (2, 2) if len(names) == 2 else (4,), mesh_dim_names=names)


def step_of(model: nn.Module, after_backward: Callable[[], None] = lambda: None) -> Step:
    """The plain one."""

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        loss = cross_entropy(model(inputs), targets)
        loss.backward()
        after_backward()
        return loss

    return step


def ddp(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """DistributedDataParallel."""
    model = DistributedDataParallel(layers(delays))
    return model, step_of(model)


def fsdp2(delays: dict[str, float], over: str = "ranks") -> tuple[nn.Module, Step]:
    """Sharded over all ranks."""
    model = layers(delays)
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh(*over.split()))
    return model, step_of(model)


def hsdp(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """Sharded over two ranks, replicated over two."""
    return fsdp2(delays, "replicas shards")


def by_hand(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """Gradients are averaged by the script, all in one."""
    model = layers(delays)
    return model, step_of(model, lambda: average_gradients(model))


def by_hand_in_a_stream(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """The same in a stream of its own, as Megatron and DeepSpeed do; there are streams on the device only."""
    model, own = layers(delays), torch.cuda.Stream()

    def average() -> None:
        own.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(own):
            average_gradients(model)
        torch.cuda.current_stream().wait_stream(own)

    return model, step_of(model, average)


def tensor_and_data(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """Each layer in two parts, and two replicas of that."""
    both = mesh("data", "tensor")
    model = parallelize_module(layers(delays), both["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=both["data"])
    return model, step_of(model)


def pipeline_and_data(delays: dict[str, float]) -> tuple[nn.Module, Step]:
    """Two stages that train with one forward, one backward, and two replicas of that."""
    both = mesh("data", "stages")
    is_first, whole = both.get_local_rank("stages") == 0, layers(delays)
    work, size = Work(delays, MICRO_BATCHES), BATCH_SIZE // MICRO_BATCHES
    part = nn.Sequential(whole[0], work) if is_first else nn.Sequential(work, whole[2])
    # What goes in and comes out is said, as the stages would else tell each other, in values that must be right.
    inputs = torch.zeros(size, FEATURES if is_first else HIDDEN, requires_grad=not is_first)
    outputs = torch.zeros(size, HIDDEN if is_first else CLASSES, requires_grad=True)
    stages, device = both["stages"].get_group(), torch.device("cpu")
    stage = PipelineStage(part, int(not is_first), 2, device, input_args=inputs, output_args=outputs, group=stages)
    schedule = Schedule1F1B(stage, MICRO_BATCHES, loss_fn=cross_entropy)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses: list[torch.Tensor] = [torch.zeros(())]
        if is_first:
            schedule.step(inputs)
        else:
            schedule.step(target=targets, losses=losses)
        average_gradients(part, both["data"].get_group())
        return losses[-1]

    return part, step


TRAININGS = {
    build.__name__: build
    for build in (ddp, fsdp2, hsdp, by_hand, by_hand_in_a_stream, tensor_and_data, pipeline_and_data)
}


def average_gradients(model: nn.Module, group: Any = None) -> None:
    """By hand, all in one."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    flat /= dist.get_world_size(group)
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
    model, step = TRAININGS[training](delays)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    optimizer.register_step_pre_hook(lambda *_: time.sleep(delays.get("optimizer", 0.0)))
    for inputs, targets in loader(steps, delays.get("data_wait", 0.0)):
        loss = step(inputs, targets)
        optimizer.step()
        optimizer.zero_grad()
        if IS_ASYNCHRONOUS:
            read(loss.detach())
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
    return {
        "case": case,
        "phases": {record.info["rank"]: judged_seconds(record) for record in records},
        "host_phases": {record.info["rank"]: after_startup(record) for record in records},
        "device_steps": {record.info["rank"]: record["device_steps"] for record in records},
    }


def after_startup(record: RankSnapshot) -> dict[str, float]:
    """Seconds by phase, of the host."""
    return {phase: seconds for phase, seconds in record.phase_seconds.items() if phase != "startup"}


def judged_seconds(record: RankSnapshot) -> dict[str, float]:
    """Seconds by phase, by the clock that judges; as `rank:rankscope_phase:ratio` is made.

    By the device's, where there is one: the planned phases are the host's as they are, and the rest is divided by the
    device's shares.
    """
    host = after_startup(record)
    device = {phase: seconds for phase, seconds in record.device_seconds.items() if phase not in PLANNED}
    if not any(device.values()):
        return host
    planned = {phase: seconds for phase, seconds in host.items() if phase in PLANNED}
    scale = (sum(host.values()) - sum(planned.values())) / sum(device.values())
    return {**planned, **{phase: seconds * scale for phase, seconds in device.items()}}


def main() -> None:
    """Every case, one after the other."""
    torch.set_num_threads(1)
    # Some dozen steps have to be enough, so every one is measured; which of a long training are is no question here.
    device_clock.SECONDS_PER_MARK = 0.0
    # FSDP2 warns that tensor parallelism's result is a view; nobody changes it in place here.
    warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
    with ExitStack() as device:
        if IS_ASYNCHRONOUS:
            device.enter_context(asynchronous_device())
        dist.init_process_group(BACKEND if IS_ASYNCHRONOUS else "gloo")
        for case in sys.argv[3:]:
            observed = observe(case, int(sys.argv[2]))
            if dist.get_rank() == 0:
                print(json.dumps(observed), flush=True)
        mesh.cache_clear()
        leave()


if __name__ == "__main__":
    main()
