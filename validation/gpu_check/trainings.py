"""Trainings for the part `faults`: a Transformer, frameworks and compiled models, each healthy or with one fault.

    python -m validation.gpu_check.trainings NAME DEVICE SECONDS

The program imports, waits for a line on stdin, trains that long and prints how many steps it made.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, Dataset
from validation.gpu_check.dry_run import IS_DRY, shortened

import rankscope

VOCABULARY = 32_000
LATE = 0.04  # seconds by which the slow rank is late in each step
BEFORE = shortened(5.0)  # seconds of healthy steps before a crash or a hang
SPIN = 12.0 if IS_DRY else 40.0  # seconds, in which a capture starts and ends
WARM_UP = 5  # steps, which may compile and capture


class Tokens(Dataset[torch.Tensor]):
    """Samples that need time on the CPU, or wait as for storage."""

    def __init__(self, length: int, computing: float = 0.0, waiting: float = 0.0) -> None:
        self.length, self.computing, self.waiting = length, computing, waiting

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(self.waiting)
        until = time.thread_time() + self.computing
        while time.thread_time() < until:
            pass
        return torch.randint(0, VOCABULARY, (self.length,))


class Transformer(nn.Module):
    """A Transformer over tokens, as small as a test on a CPU needs it, or as large as a GPU does."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        one = (max(width // 64, 1), 4 * width, 0.0)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, *one, batch_first=True, norm_first=True) for _ in range(layers)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1).float(), tokens.flatten())


class Job:
    """One training: the sizes fit the device."""

    def __init__(self, device: str, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.is_gpu = device == "cuda"
        self.rank = int(os.environ["RANK"])
        self.steps = 0
        self._began = 0.0

    @property
    def trained(self) -> float:
        """Seconds since the first steps."""
        return time.monotonic() - self._began if self._began else 0.0

    def count(self) -> None:
        """Count a step."""
        self.steps += 1
        if self.steps == WARM_UP:
            self._began = time.monotonic()

    def model(self, width: int = 1024, layers: int = 12) -> nn.Module:
        return Transformer(*((width, layers) if self.is_gpu else (64, 2))).to(self.device)

    def batches(self, size: int, length: int = 512, workers: int = 4, **samples: float) -> Iterable[torch.Tensor]:
        tokens = Tokens(length if self.is_gpu else 16, **samples)
        size = size if self.is_gpu else 4
        return DataLoader(tokens, size, num_workers=workers, pin_memory=self.is_gpu, persistent_workers=workers > 0)

    def within(self, batches: Iterable[Any]) -> Iterator[Any]:
        """Yield batches until the time is over, which begins after the first steps."""
        for batch in batches:
            yield batch
            self.count()
            if self.trained > self.seconds:
                return

    def train(
        self,
        model: nn.Module,
        batches: Iterable[torch.Tensor],
        after: Callable[[nn.Module], object] = lambda _model: None,
        before: Callable[[], object] = lambda: None,
    ) -> None:
        """Train; `before` runs before each step, and `after` between the backward pass and the optimizer."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=self.is_gpu)
        for batch in self.within(batches):
            before()
            tokens = batch.to(self.device, non_blocking=True)
            with torch.autocast(self.device, torch.bfloat16):
                loss = model(tokens)
            loss.backward()
            after(model)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


def healthy(job: Job) -> None:
    job.train(job.model(), job.batches(32))


def compiled(job: Job) -> None:
    """Train with CUDA graphs that torch.compile captures while the hook is installed."""
    model = job.model(layers=4)
    job.train(torch.compile(model, mode="reduce-overhead"), job.batches(64))  # type: ignore[arg-type]


def graphed(job: Job) -> None:
    """Train with CUDA graphs that are captured by hand."""
    model, batches = job.model(layers=4), job.batches(64)
    if job.is_gpu:
        example = next(iter(batches)).to(job.device)
        with torch.autocast(job.device, torch.bfloat16, cache_enabled=False):
            model = torch.cuda.make_graphed_callables(model, (example,))  # type: ignore[assignment]
    job.train(model, batches)


def transformers_trainer(job: Job) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

    class Samples(Tokens):
        def __getitem__(self, index: int) -> Any:
            tokens = super().__getitem__(index)
            return {"input_ids": tokens, "labels": tokens}

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:  # noqa: ARG002
            job.count()
            control.should_training_stop = job.trained > job.seconds

    width, layers = (768, 12) if job.is_gpu else (48, 2)
    model = GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_embd=width, n_layer=layers))
    arguments = TrainingArguments(
        output_dir=os.environ["RANKSCOPE_RUN_DIR"] + "/../out", per_device_train_batch_size=16 if job.is_gpu else 2,
        max_steps=100_000, bf16=job.is_gpu, dataloader_num_workers=4, save_strategy="no", report_to=[],
        logging_steps=100, disable_tqdm=True, use_cpu=not job.is_gpu,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=Samples(512 if job.is_gpu else 16), callbacks=[Stop()]).train()


def lightning(job: Job) -> None:
    import pytorch_lightning as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def training_step(self, batch: torch.Tensor, _index: int) -> Any:
            job.count()
            loss = self.model(batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-4)

    trainer = pl.Trainer(
        accelerator="gpu" if job.is_gpu else "cpu", devices=1, precision="bf16-mixed", logger=False,
        max_time={"seconds": int(job.seconds)}, max_epochs=1, enable_checkpointing=False, enable_progress_bar=False,
    )  # fmt: skip
    trainer.fit(Module(), job.batches(32))


def slow_preprocessing(job: Job) -> None:
    job.train(job.model(), job.batches(8, computing=0.05))


def slow_storage(job: Job) -> None:
    job.train(job.model(), job.batches(8, waiting=0.05))


def pageable_copies(job: Job) -> None:
    """Copy a large part of each sample from pageable memory."""
    features = torch.ones(2**26 if job.is_gpu else 2**10)  # 256 MiB
    job.train(job.model(), job.batches(8), before=lambda: features.to(job.device))


def gradient_norms(job: Job) -> None:
    """Read each parameter's gradient norm from the device, as for a log."""

    def read(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.norm().item()

    job.train(job.model(), job.batches(32), after=read)


def tiny_kernels(job: Job) -> None:
    """Launch kernels that the device computes faster than the host launches them."""
    job.train(job.model(width=128, layers=48), job.batches(2, length=64))


def out_of_memory(job: Job) -> None:
    fail_after(job, lambda: torch.empty(2**46, dtype=torch.uint8, device=job.device))


def device_assertion(job: Job) -> None:
    """Look up a token outside of the vocabulary, so that the kernel asserts."""
    weights = torch.ones(10, 10, device=job.device)

    def look_up() -> None:
        nn.functional.embedding(torch.tensor([10], device=job.device), weights).sum().item()

    fail_after(job, look_up)


def fail_after(job: Job, fail: Callable[[], object]) -> None:
    job.train(job.model(), job.batches(8), before=lambda: fail() if job.trained > BEFORE else None)


def slow_host(job: Job) -> None:
    """Rank 1's host is late before each step."""
    job.train(parallel(job), job.batches(8, length=128), before=lambda: time.sleep(LATE * (job.rank == 1)))


def slow_device(job: Job) -> None:
    """Rank 1's device is late in the forward pass, while its host runs ahead."""

    def wait(*_arguments: object) -> None:
        if job.rank == 1 and job.is_gpu:
            torch.cuda._sleep(int(LATE * 1.8e9))
        else:
            time.sleep(LATE * (job.rank == 1))

    model = parallel(job)
    model.module.layers[0].register_forward_pre_hook(wait)
    job.train(model, job.batches(8, length=128))


def stuck_rank(job: Job) -> None:
    """Rank 1 stops outside of a collective."""

    def stop() -> None:
        if job.rank == 1 and job.trained > BEFORE:
            time.sleep(10_000)

    job.train(parallel(job), job.batches(8, length=128), before=stop)


def spinning_kernel(job: Job) -> None:
    """Rank 1's device runs one kernel for a long time, and the host waits for it in the next collective."""
    left = [SPIN]

    def spin() -> None:
        if job.rank == 1 and left and job.trained > BEFORE:
            seconds = left.pop()
            torch.cuda._sleep(int(seconds * 1.8e9)) if job.is_gpu else time.sleep(seconds)

    job.train(parallel(job), job.batches(8, length=128), before=spin)


def product(job: Job) -> None:
    """Multiply matrices that are large enough for the power limit to lower the clock."""
    size = 8192 if job.is_gpu else 64
    model = nn.Linear(size, size, device=job.device, dtype=torch.bfloat16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    inputs = torch.randn(4 * size, size, device=job.device, dtype=torch.bfloat16)
    for _ in job.within(iter(int, 1)):
        model(inputs).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def stuck_early(job: Job) -> None:
    """Rank 1 does not reach its first step."""
    job.train(parallel(job), job.batches(8, length=128), before=lambda: time.sleep(10_000 * (job.rank == 1)))


def parallel(job: Job) -> Any:
    dist.init_process_group("gloo")  # NCCL refuses two ranks on a GPU
    return nn.parallel.DistributedDataParallel(job.model(width=256, layers=4))


def main() -> None:
    """Train."""
    name, device, seconds = sys.argv[1:]
    torch.set_num_threads(1)
    job = Job(device, float(seconds))
    print("imported", flush=True)
    sys.stdin.readline()
    rankscope.instrument()
    globals()[name](job)
    print(f"steps {job.steps}", flush=True)


if __name__ == "__main__":
    main()
