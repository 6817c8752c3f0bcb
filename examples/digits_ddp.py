"""Train a digit classifier on real data (digits.csv.gz) with DistributedDataParallel.

    torchrun --standalone --nproc-per-node 4 examples/digits_ddp.py --epochs 5

The script does not use Rankscope: start it with `rankscope run -- torchrun …` to monitor it. The CPU stands in for a
GPU: forward and backward sleep for the time of a device (`--device-ms`). `--extra-work FILE` is the fault of the demo:
while FILE exists, rank 0 logs weight histograms after every step, as many scripts do.

A row of digits.csv.gz has the 64 pixels of an image, from 0 to 16, and its digit. It is the test set of "Optical
Recognition of Handwritten Digits" by E. Alpaydin and C. Kaynak (UCI Machine Learning Repository, 1998, CC BY 4.0).
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

DATA = Path(__file__).with_name("digits.csv.gz")
HELD_OUT = 360  # of 1,797 images
UPLOAD_SECONDS = 0.05  # for sending a step's histograms to a tracking server


class DeviceTime(torch.autograd.Function):
    """An identity function that takes the time of a device: a third in forward, two thirds in backward."""

    @staticmethod
    def forward(context: Any, images: torch.Tensor, seconds: float) -> torch.Tensor:
        """Sleep for the forward pass."""
        context.seconds = seconds
        time.sleep(seconds / 3)
        return images.clone()

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Sleep for the backward pass."""
        time.sleep(context.seconds * 2 / 3)
        return gradients[0], None


class Classifier(nn.Module):
    """A small perceptron from 64 pixels to 10 digits."""

    def __init__(self, device_seconds: float) -> None:
        super().__init__()
        self.device_seconds = device_seconds
        self.first = nn.Linear(64, 128)
        self.second = nn.Linear(128, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return ten scores an image."""
        hidden = torch.relu(self.first(images))
        scores: torch.Tensor = self.second(DeviceTime.apply(hidden, self.device_seconds))  # type: ignore[no-untyped-call]  # torch's
        return scores


def load_data() -> tuple[TensorDataset, torch.Tensor, torch.Tensor]:
    """Return the training set, and the held-out images and labels."""
    with gzip.open(DATA, "rt") as file:
        rows = torch.tensor([[float(value) for value in row] for row in csv.reader(file)])
    images, labels = rows[:, :-1] / 16.0, rows[:, -1].long()
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[HELD_OUT:], order[:HELD_OUT]
    return TensorDataset(images[train], labels[train]), images[test], labels[test]


def log_histograms(model: nn.Module, log: Path, step: int) -> None:
    """Do the extra work: write every weight's histogram to a file and to a (simulated) tracking server."""
    histograms = {name: torch.histc(weights.detach(), 50).tolist() for name, weights in model.named_parameters()}
    with log.open("a") as file:
        file.write(json.dumps({"step": step, "histograms": histograms}) + "\n")
    time.sleep(UPLOAD_SECONDS)


def should_stop(options: argparse.Namespace) -> bool:
    """Return whether the job should stop. Rank 0 decides, so that all ranks end after the same epoch."""
    flag = torch.tensor(int(options.stop is not None and options.stop.exists()))
    dist.broadcast(flag, src=0)
    return bool(flag)


def train(options: argparse.Namespace) -> None:
    """Train all epochs, then print the accuracy on the held-out images on rank 0."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    dataset, images, labels = load_data()
    sampler: DistributedSampler[Any] = DistributedSampler(dataset)
    loader = DataLoader(dataset, batch_size=options.batch_size, sampler=sampler)
    model = DistributedDataParallel(Classifier(options.device_ms / 1000))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    log = Path(tempfile.gettempdir()) / f"digits-histograms-{os.getpid()}.jsonl"
    step = 0
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for batch, targets in loader:
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch), targets)
            loss.backward()
            optimizer.step()
            step += 1
            if rank == 0 and options.extra_work is not None and options.extra_work.exists():
                log_histograms(model, log, step)
        if should_stop(options):
            break
    log.unlink(missing_ok=True)
    if rank == 0:
        with torch.no_grad():
            accuracy = (model.module(images).argmax(1) == labels).float().mean()
        print(f"accuracy {accuracy:.1%} on {HELD_OUT} held-out digits after {step} steps", flush=True)


def main() -> None:
    """Parse the command line and train in the process group that torchrun describes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="images a rank and step")
    parser.add_argument("--device-ms", type=float, default=45.0, help="emulated device time of a step")
    parser.add_argument(
        "--extra-work", type=Path, metavar="FILE", help="while FILE exists, rank 0 logs after each step"
    )
    parser.add_argument("--stop", type=Path, metavar="FILE", help="end after the epoch in which FILE appears")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        train(options)
        time.sleep(0.5)  # until gloo's threads release the last backward pass, else torch 2.13 may abort
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
