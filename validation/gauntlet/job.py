"""The training job of the gauntlet: DistributedDataParallel, as a script under torchrun.

    torchrun --standalone --nproc-per-node 4 -m validation.gauntlet.job DIRECTORY gloo

Real: processes, loader workers, gradients, collectives, the gradient scaler, checkpoints. The time that a device would
take is slept: over gloo by the host, else by the asynchronous device (testing/asynchronous_device), for which the host
waits where it reads the loss. DIRECTORY has the control file (control.py), which says what goes wrong; the job puts its
ranks' process ids there, and its progress.
"""

# No `annotations` from __future__: torch compares those of a communication hook with its types.
import gc
import io
import itertools
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch, read
from testing.leaving import leave
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset
from validation.gauntlet.control import Behaviour, Control, Progress
from validation.gauntlet.devices import ASYNCHRONOUS, GLOO

import rankscope
from rankscope.timeline import device_clock

WIDTH, BATCH = 64, 32
INITIAL_SCALE = 65536.0
WARM_UP = 20  # steps
# Ten times as often as the hook would: the rules' windows are a fiftieth at the fast speed, and in production there are
# some hundred measured steps in each. A step with fifty collectives, f22's, has two hundred marks.
SECONDS_PER_MARK = device_clock.SECONDS_PER_MARK / 10


def sleep(milliseconds: float) -> None:
    """Nothing at all for 0: a sleep of 0 still yields the processor."""
    if milliseconds:
        time.sleep(milliseconds / 1000)


def compute(milliseconds: float) -> None:
    """Processor time of this thread, however long that takes."""
    end = time.thread_time() + milliseconds / 1000
    while time.thread_time() < end:
        sum(range(1000))


class Samples(IterableDataset[torch.Tensor]):
    """Batches without end; a worker makes each, as slowly as it is told."""

    def __init__(self, control: Control) -> None:
        self._control = control

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            told = self._control.latest()
            sleep(told.fetch)
            compute(told.fetch_cpu)
            yield torch.randn(BATCH, WIDTH)


class Gloo:
    """The host's thread is the device."""

    def take(self, milliseconds: float, issue: float = 0) -> None:
        """Some work, which nobody has to issue."""
        assert not issue
        sleep(milliseconds)

    def read(self, tensor: torch.Tensor) -> float:
        return tensor.item()


class Asynchronous:
    """One that the host runs ahead of."""

    def take(self, milliseconds: float, issue: float = 0) -> None:
        """Some work in one launch; or where the host takes time to issue it, in one for each millisecond."""
        launches = ceil(milliseconds) if issue else 1
        for _ in range(launches):
            launch(milliseconds / launches, host_milliseconds=issue * milliseconds / launches)

    def read(self, tensor: torch.Tensor) -> float:
        """A value, for which the host waits."""
        return read(tensor)


Device = Gloo | Asynchronous


class DeviceTime(torch.autograd.Function):
    """Passes its input through, and takes as long as a device would in forward and in backward."""

    @staticmethod
    def forward(
        context: Any, activations: torch.Tensor, device: Device, forward_ms: float, backward_ms: float, issue: float
    ) -> torch.Tensor:
        """Take the first, remember the second."""
        context.backward = lambda: device.take(backward_ms, issue)
        device.take(forward_ms, issue)
        return activations.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None, None]:
        context.backward()
        return gradients[0], None, None, None, None


class Model(nn.Module):
    """Two layers with the device's time between them."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self._device = device

    def forward(self, batch: torch.Tensor, told: Behaviour, extra_ms: float) -> torch.Tensor:
        """One number a sample."""
        compute(told.forward_cpu)
        hidden = torch.relu(self.first(batch))
        times = (told.forward + extra_ms) / told.micro_steps, told.backward / told.micro_steps, told.issue
        hidden = DeviceTime.apply(hidden, self._device, *times)  # type: ignore[no-untyped-call]  # torch's
        result: torch.Tensor = self.second(hidden)
        return result


class Training:
    """One rank's loop."""

    def __init__(self, directory: Path, device: Device, control: Control) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        (directory / f"rank-{self.rank}.pid").write_text(str(os.getpid()))
        self.device, self.control = device, control
        self.progress = Progress(directory / "progress")
        self.told = self.control.at(0)
        self.model = DistributedDataParallel(Model(device))
        if isinstance(device, Gloo):
            self.model.register_comm_hook(None, self._transfer)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=INITIAL_SCALE)
        self.batches = iter(DataLoader(Samples(self.control), batch_size=None, num_workers=1))
        # Collections of the interpreter's own would be spikes that nobody injected; ours take as long as told.
        gc.disable()
        gc.callbacks.append(self._while_collecting)

    def run(self) -> None:
        """Until told to stop."""
        for step in itertools.count(1):
            if self.rank == 0:
                self.progress.write(step)
            before, self.told = self.told, self.control.at(step)
            if self.told.stops:
                return
            if self.told != before and self.told.evaluation:
                with rankscope.phase("evaluation"):
                    sleep(self.told.evaluation)
            self._restore_scale(self.told)
            self._step(step, self.told)

    def _step(self, step: int, told: Behaviour) -> None:
        for micro_step in range(1, told.micro_steps + 1):
            batch = next(self.batches)
            if told.copy:
                with rankscope.phase("h2d_copy"):
                    sleep(told.copy)
            is_last = micro_step == told.micro_steps
            with nullcontext() if is_last else self.model.no_sync():
                loss = self._forward_and_backward(batch, step, told)
        self._wait_while(lambda latest: latest.stays_in_startup)
        self._talk(told)
        self._update()
        if step % told.read_every == 0:
            self.device.read(loss)
        sleep(told.post)
        self._wait_while(lambda latest: latest.hangs)
        if step % told.collect_every == 0 and told.collect and self._is_my_turn(step):
            gc.collect(0)
        if told.checkpoint_every and step % told.checkpoint_every == 0:
            self._save(told.checkpoint)

    def _forward_and_backward(self, batch: torch.Tensor, step: int, told: Behaviour) -> torch.Tensor:
        extra = told.warm_up if step <= WARM_UP else 0.0
        extra += told.rotating if told.rotating and self._is_my_turn(step) else 0.0
        loss = self.model(batch, told, extra).square().mean()
        if told.overflows:
            loss = loss * float("inf")
        self.scaler.scale(loss).backward()
        detached: torch.Tensor = loss.detach()
        return detached

    def _talk(self, told: Behaviour) -> None:
        """Collectives besides DDP's own."""
        for _ in range(told.small_collectives):
            metric = torch.ones(1)
            dist.all_reduce(metric)
            self.device.read(metric)
        if told.aggregate:
            self._aggregate(self.model.module.first.weight.detach().clone(), told.aggregate)

    def _aggregate(self, weights: torch.Tensor, milliseconds: float) -> None:
        """By way of rank 0, as with a parameter server: it gets everybody's, works on them, and sends the result."""
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

    def _restore_scale(self, told: Behaviour) -> None:
        # Before a healed step and not after it: gradients that were scaled to nothing are finite, and NaN when they are
        # unscaled, which the optimizer would put into the weights for good.
        if not told.overflows and self.scaler.get_scale() < INITIAL_SCALE:
            self.scaler.update(INITIAL_SCALE)

    def _transfer(self, _state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        """DDP's communication hook: the mean over the ranks, and then what a slow network adds."""
        mean = bucket.buffer().div_(self.ranks)
        arrival: torch.futures.Future[Any] = dist.all_reduce(mean, async_op=True).get_future()

        def arrived(done: torch.futures.Future[Any]) -> torch.Tensor:
            network(self.control)
            tensor: torch.Tensor = done.value()[0]
            return tensor

        return arrival.then(arrived)

    def _save(self, milliseconds: float) -> None:
        with rankscope.phase("checkpoint"):
            self.device.read(self.model.module.second.bias.detach())  # what is saved is copied to the host
            sleep(milliseconds)
            torch.save(self.model.state_dict(), io.BytesIO())

    def _is_my_turn(self, step: int) -> bool:
        return random.Random(step).randrange(self.ranks) == self.rank

    def _while_collecting(self, moment: str, _info: dict[str, int]) -> None:
        if moment == "start":
            sleep(self.told.collect)

    def _wait_while(self, condition: Callable[[Behaviour], bool]) -> None:
        wait_while(self.control, condition)


def wait_while(control: Control, condition: Callable[[Behaviour], bool]) -> None:
    """What stands still looks whether it may go on."""
    if condition(control.now):
        while condition(control.latest()):
            time.sleep(0.05)


def network(control: Control) -> None:
    """What it does with each gradient that has come from all ranks."""
    sleep(control.now.transfer)
    wait_while(control, lambda latest: latest.hangs_in_collective)


def train(directory: Path, backend: str, device: Device, control: Control) -> None:
    """Under the process group that torchrun describes."""
    dist.init_process_group(backend)
    try:
        Training(directory, device, control).run()
        dist.barrier()
    finally:
        leave()


def main() -> None:
    """Train on the kind of device that the command line says."""
    directory, kind = Path(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    control = Control(directory / "control.json", int(os.environ["RANK"]))
    if kind == GLOO:
        train(directory, GLOO, Gloo(), control)
        return
    assert kind == ASYNCHRONOUS
    with asynchronous_device(on_transfer=lambda: network(control)):
        device_clock.SECONDS_PER_MARK = SECONDS_PER_MARK
        rankscope.instrument()  # else RANKSCOPE=1 has done it
        train(directory, BACKEND, Asynchronous(), control)


if __name__ == "__main__":
    main()
