"""A training job that has everything that the panels show: run by test_panels_and_metrics.py under torchrun.

Loader workers, tokens, mixed precision with a gradient scaler, accumulation, checkpoints. It takes the options of
examples/digits_ddp.py that the demo's Job passes: `--extra-work FILE` is the same fault of rank 0.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

DEVICE_SECONDS = 0.02  # what a device would take for a micro-step
EXTRA_SECONDS = 0.06
MICRO_STEPS = 2
CHECKPOINT_EVERY = 50  # steps
COLLECT_EVERY = 25  # steps


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Random tokens without end."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        return {"input_ids": torch.randint(100, (16,), generator=generator)}


class Model(nn.Module):
    """Scores for the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(100, 16)
        self.scores = nn.Linear(16, 100)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time.sleep(DEVICE_SECONDS)
        scores: torch.Tensor = self.scores(self.embedding(tokens))
        return scores


def train(options: argparse.Namespace, directory: Path) -> None:
    """Until the job is ended."""
    model = DistributedDataParallel(Model())
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cpu")
    loader = DataLoader(Sentences(), batch_size=4, num_workers=1)
    for micro_step, batch in enumerate(loader, start=1):
        is_step = micro_step % MICRO_STEPS == 0
        with contextlib.nullcontext() if is_step else model.no_sync():
            with torch.autocast("cpu", torch.bfloat16):
                tokens = batch["input_ids"]
                loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
        if is_step:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            dist.all_reduce(loss.detach())  # for the log
            after_step(micro_step // MICRO_STEPS, model, options.extra_work, directory)


def after_step(step: int, model: nn.Module, extra_work: Path, directory: Path) -> None:
    """What scripts do beside training."""
    if step % COLLECT_EVERY == 0:
        gc.collect()
    if dist.get_rank() == 0:
        if step % CHECKPOINT_EVERY == 0:
            torch.save(model.state_dict(), directory / "checkpoint.pt")
        if extra_work.exists():
            time.sleep(EXTRA_SECONDS)


def main() -> None:
    """Train under the process group that torchrun describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--extra-work", type=Path)
    options, _ = parser.parse_known_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    gc.freeze()  # what was imported: else each collection is a step four times as long, and who is slow is told later
    with tempfile.TemporaryDirectory() as directory:
        train(options, Path(directory))


if __name__ == "__main__":
    main()
