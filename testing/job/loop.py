"""The loop of one rank: DistributedDataParallel with loader workers, a gradient scaler, checkpoints, and all faults.

All of these are real. The time of a device is slept: by the host over gloo, or by the asynchronous device.
"""

# No `annotations` from __future__: torch checks the annotations of a communication hook.
import gc
import itertools
import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader

import rankscope
from testing.job.control import Behavior, ControlReader, Progress
from testing.job.device import Device, GlooDevice, sleep
from testing.job.model import Samples, Work, layers, loss_of, save

INITIAL_SCALE = 65536.0
WARM_UP = 20  # steps


class TrainingLoop:
    def __init__(self, directory: Path, device: Device, control: ControlReader) -> None:
        self.rank, self.ranks, self.parent = dist.get_rank(), dist.get_world_size(), os.getppid()
        (directory / f"rank-{self.rank}.pid").write_text(str(os.getpid()))
        self.device, self.control = device, control
        self.checkpoint = directory / f"checkpoint-{self.rank}.pt"
        self.progress = Progress(directory / "progress")
        self.behavior = self.control.at(0)
        self.work = Work(device, self.behavior)
        self.layers = layers(self.work)
        self.model = DistributedDataParallel(self.layers)
        if isinstance(device, GlooDevice):
            self.model.register_comm_hook(None, self._transfer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.optimizer.register_step_pre_hook(lambda *_: sleep(self.behavior.optimizer))
        self.scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
        samples, workers = Samples(self.control.latest), self.behavior.loader_workers
        self.batches = iter(DataLoader(samples, batch_size=None, num_workers=workers))
        # The interpreter's own collections would be spikes without a fault; the loop's take the time that is set.
        gc.disable()
        gc.callbacks.append(self._while_collecting)

    def run(self) -> None:
        """Train until the behavior ends it. Raises RuntimeError if torchrun has ended."""
        for step in itertools.count(1):
            if self.rank == 0:
                self.progress.begin_step()
            if os.getppid() != self.parent:
                raise RuntimeError("torchrun has ended")
            before, behavior = self.behavior, self.control.at(step)
            self.behavior = self.work.behavior = behavior
            if behavior.stops or 0 < behavior.steps < step:
                return
            if behavior != before and behavior.evaluation:
                with rankscope.phase("evaluation"):
                    sleep(behavior.evaluation)
            self._restore_scale(behavior)
            self._step(step, behavior)

    def _step(self, step: int, behavior: Behavior) -> None:
        for micro_step in range(1, behavior.micro_steps + 1):
            batch = next(self.batches)
            if behavior.copy:
                with rankscope.phase("h2d_copy"):
                    sleep(behavior.copy)
            is_last = micro_step == behavior.micro_steps
            with nullcontext() if is_last else self.model.no_sync():
                loss = self._forward_and_backward(batch, step, behavior)
        wait_while(self.control, lambda latest: latest.stays_in_startup)
        self._communicate(behavior)
        self._update()
        if step % behavior.read_every == 0:
            self.device.read(loss)
        self._after_update(step, behavior)

    def _forward_and_backward(self, batch: dict[str, torch.Tensor], step: int, behavior: Behavior) -> torch.Tensor:
        self.work.extra = behavior.warm_up if step <= WARM_UP else 0.0
        if behavior.rotating and self._is_my_turn(step):
            self.work.extra += behavior.rotating
        loss = loss_of(self.model(batch["input_ids"]))
        if behavior.overflows:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        return loss.detach()

    def _communicate(self, behavior: Behavior) -> None:
        """Run the collectives in addition to DDP's own."""
        for _ in range(behavior.small_collectives):
            metric = torch.ones(1)
            dist.all_reduce(metric)
            self.device.read(metric)
        if behavior.aggregate:
            self._aggregate(next(self.layers.parameters()).detach().clone(), behavior.aggregate)

    def _aggregate(self, weights: torch.Tensor, milliseconds: float) -> None:
        """Send the weights through rank 0, as with a parameter server: it receives, works, and sends the result."""
        if self.rank:
            dist.send(weights, dst=0)
            dist.recv(weights, src=0)
            return
        for peer in range(1, self.ranks):
            dist.recv(weights, src=peer)
        self.device.take(milliseconds)
        for peer in range(1, self.ranks):
            dist.send(weights, dst=peer)

    def _update(self) -> None:
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def _after_update(self, step: int, behavior: Behavior) -> None:
        sleep(behavior.post)
        wait_while(self.control, lambda latest: latest.hangs)
        if step % behavior.collect_every == 0 and behavior.collect and self._is_my_turn(step):
            gc.collect(0)
        if behavior.checkpoint_every and step % behavior.checkpoint_every == 0:
            save(self.optimizer, self.checkpoint, lambda: self._copy_to_host(behavior.checkpoint))

    def _restore_scale(self, behavior: Behavior) -> None:
        # Before a healed step, not after it: gradients that were scaled to 0 are finite, but NaN once unscaled, and the
        # optimizer would write them into the weights permanently.
        if not behavior.overflows and self.scaler.get_scale() < INITIAL_SCALE:
            self.scaler.update(INITIAL_SCALE)

    def _transfer(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Average over the ranks, as DDP's communication hook does, then take the time of a slow network."""
        mean = bucket.buffer().div_(self.ranks)
        arrival: torch.futures.Future[Any] = dist.all_reduce(mean, async_op=True).get_future()

        def arrived(done: torch.futures.Future[Any]) -> torch.Tensor:
            delay_transfer(self.control)
            tensor: torch.Tensor = done.value()[0]
            return tensor

        return arrival.then(arrived)

    def _copy_to_host(self, milliseconds: float) -> None:
        self.device.read(next(self.layers.parameters()).detach().sum())
        sleep(milliseconds)

    def _is_my_turn(self, step: int) -> bool:
        return random.Random(step).randrange(self.ranks) == self.rank

    def _while_collecting(self, moment: str, _info: dict[str, int]) -> None:
        if moment == "start":
            sleep(self.behavior.collect)


def wait_while(control: ControlReader, condition: Callable[[Behavior], bool]) -> None:
    """Wait while the latest behavior meets the condition."""
    if condition(control.now):
        while condition(control.latest()):
            time.sleep(0.05)


def delay_transfer(control: ControlReader) -> None:
    """Delay data that has arrived from all ranks by the behavior's network time."""
    sleep(control.now.transfer)
    wait_while(control, lambda latest: latest.hangs_in_collective)
