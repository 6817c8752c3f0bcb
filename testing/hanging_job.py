"""A training script whose last rank hangs at one step, in one of eight ways, until the file `release` appears.

    RANK=2 WORLD_SIZE=3 … python -m testing.hanging_job DIRECTORY gloo filter

It uses torch's DistributedDataParallel on a kind of device of testing/job/device.py, on equal samples in each run. Each
rank writes a digest of its trained parameters. A dead peer kills itself, so its job does not continue.
"""

# No `annotations` from __future__: torch checks the annotations of a communication hook.
import ctypes
import hashlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, IterableDataset

import rankscope
from testing.job.device import ASYNCHRONOUS, Device, installed
from testing.leaving import leave

HANGS_AT, STEPS, WIDTH, BATCH = 40, 60, 16, 8
STEP_MILLISECONDS = 40.0
KINDS = ("inside", "before", "loader", "filter", "storage", "dead", "gil", "stopped")
PIPE, RELEASE = "shard.bin", "release"


class Hang:
    """The hang of one rank, which begins once."""

    def __init__(self, directory: Path, kind: str, rank: int) -> None:
        self._directory, self._kind, self._rank = directory, kind, rank
        self._is_mine = rank == int(os.environ["WORLD_SIZE"]) - 1

    def is_due(self, kind: str, step: int) -> bool:
        return self._is_mine and self._kind == kind and step == HANGS_AT and not self.is_released()

    def is_released(self) -> bool:
        return (self._directory / RELEASE).exists()

    def wait(self) -> None:
        while not self.is_released():
            time.sleep(0.5)

    def read_shard(self) -> None:
        """Read from storage that does not answer: a named pipe, until a byte is written to it."""
        descriptor = os.open(self._directory / PIPE, os.O_RDWR)
        os.read(descriptor, 1)
        os.close(descriptor)

    def hold_gil(self) -> None:
        """Call C code that does not release the interpreter's lock, as an extension with a bug does."""
        descriptor = os.open(self._directory / PIPE, os.O_RDWR)
        ctypes.PyDLL(None).poll(ctypes.c_char_p(descriptor.to_bytes(4, "little") + b"\1\0\0\0"), 1, -1)
        os.close(descriptor)


class Samples(IterableDataset[torch.Tensor]):
    """The same samples in each run. The filter accepts no sample while it hangs."""

    def __init__(self, hang: Hang, rank: int) -> None:
        self._hang, self._rank = hang, rank

    def __iter__(self) -> Iterator[torch.Tensor]:
        for step in range(1, STEPS + 1):
            while not self._accepts(step):
                time.sleep(0.001)
            yield self._load(step)

    def _accepts(self, step: int) -> bool:
        return not self._hang.is_due("filter", step)

    def _load(self, step: int) -> torch.Tensor:
        if self._hang.is_due("storage", step):
            self._hang.read_shard()
        if self._hang.is_due("loader", step):
            self._hang.wait()
        return torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1000 * self._rank + step))


def train(hang: Hang, kind: str, device: Device, rank: int, directory: Path) -> None:
    """Train, and write the digest."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1))
    model: Any = DistributedDataParallel(layers)
    step = 0

    def arrive(_state: None, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        mean = bucket.buffer().div_(dist.get_world_size())
        arrival: torch.futures.Future[Any] = dist.all_reduce(mean, async_op=True).get_future()
        return arrival.then(arrived)

    def arrived(done: torch.futures.Future[Any]) -> torch.Tensor:
        if hang.is_due("inside", step):
            hang.wait()
        tensor: torch.Tensor = done.value()[0]
        return tensor

    if device.backend == "gloo":
        model.register_comm_hook(None, arrive)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = iter(DataLoader(Samples(hang, rank), batch_size=None, num_workers=1 if kind == "loader" else 0))
    for step in range(1, STEPS + 1):
        (directory / f"step-{rank}").write_text(str(step))
        batch = next(batches)
        device.take(STEP_MILLISECONDS)
        loss = model(batch).square().mean()
        loss.backward()
        evaluate(hang, step)
        optimizer.step()
        optimizer.zero_grad()
        device.read(loss.detach())
    parameters = b"".join(one.detach().numpy().tobytes() for one in layers.parameters())
    (directory / f"digest-{rank}").write_text(hashlib.sha256(parameters).hexdigest())


def evaluate(hang: Hang, step: int) -> None:
    """Hang outside of the collectives, in the script's own code."""
    if hang.is_due("before", step):
        hang.wait()
    if hang.is_due("gil", step):
        hang.hold_gil()
    if hang.is_due("dead", step):
        os.kill(os.getpid(), signal.SIGKILL)
    if hang.is_due("stopped", step):
        os.kill(os.getpid(), signal.SIGSTOP)


def heartbeat() -> None:
    """Wake up often, as the threads of loggers and progress bars do."""
    while True:
        time.sleep(0.02)


def main() -> None:
    directory, device, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    rank = int(os.environ["RANK"])
    torch.set_num_threads(1)
    threading.Thread(target=heartbeat, daemon=True).start()
    hang = Hang(directory, kind, rank)
    steps = directory / f"step-{rank}"

    def on_transfer() -> None:
        if steps.exists() and hang.is_due("inside", int(steps.read_text() or 0)):
            hang.wait()

    with installed(device, on_transfer) as made:
        if device == ASYNCHRONOUS:
            rankscope.instrument()  # over gloo RANKSCOPE=1 has done it
        dist.init_process_group(made.backend)
        try:
            train(hang, kind, made, rank, directory)
            dist.barrier()
        finally:
            leave()


if __name__ == "__main__":
    main()
