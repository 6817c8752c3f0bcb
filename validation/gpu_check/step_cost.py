"""Measure what the hook costs a real model in steps of 10, 30 and 100 ms.

Two processes with the same Transformer share the GPU: one has the hook, and only one of them computes at a time.
Neither is started again, so both have done what the hook does once. A triple is a block of steps without the hook, one
with it, and one without it; those without it are the control.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from validation.gpu_check.dry_run import DEVICE, shortened
from validation.gpu_check.report import Check

TARGETS = (0.01, 0.03, 0.1)  # seconds of a step
SECONDS = 28.0  # for the triples of a target
BLOCK = 1.2  # seconds
WARM_UP = 130  # steps: the record is published, and the search for root modules in step 100 is over
FIRST_BATCH, TRIAL = 8, 20
READ_EVERY = 10  # steps between two readings of the loss, as for a log


class Worker:
    """A process that runs blocks of steps on request."""

    def __init__(self, mode: str) -> None:
        command = [sys.executable, "-m", "validation.gpu_check.step_cost", mode]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(self, batch: int, steps: int) -> float:
        """Return the seconds of a step. Raises RuntimeError."""
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.write(f"{batch} {steps}\n")
        self.process.stdin.flush()
        for line in self.process.stdout:
            if line.startswith("{"):
                return float(json.loads(line)["seconds"]) / steps
        raise RuntimeError(f"the training has ended with status {self.process.wait()}")


def check(_argument: str = "") -> Iterator[Check]:
    """Yield the cost of the hook for each length of a step."""
    with worker("plain") as plain, worker("hook") as hooked:
        for target in TARGETS:
            yield from compare(target, plain, hooked)


def compare(target: float, plain: Worker, hooked: Worker) -> Iterator[Check]:
    """Yield the length of a step and the costs per step, in microseconds."""
    batch, steps = find_batch(target, plain), max(2, round(shortened(BLOCK) / target))
    for one in (plain, hooked):
        one.run(batch, round(shortened(WARM_UP)))
    blocks: list[float] = []
    costs: list[float] = []
    controls: list[float] = []
    until = time.monotonic() + shortened(SECONDS)
    while len(costs) < 3 or time.monotonic() < until:
        before, during, after = (one.run(batch, steps) for one in (plain, hooked, plain))
        blocks += [before, after]
        costs.append(1e6 * (during - (before + after) / 2))
        controls.append(1e6 * (after - before))
    step = statistics.median(blocks)
    about = f"steps of {1000 * target:.0f} ms"
    yield Check(
        f"{about}: a step", "measured", f"{1000 * step:.2f} ms", note=f"batch of {batch}, {steps} steps a block"
    )
    for name, values in (("the hook", costs), ("nothing (the control)", controls)):
        low, median, high = statistics.quantiles(values, n=4)
        shown = f"{median:+.0f} µs a step, {median / 1e6 / step:+.2%}"
        yield Check(
            f"{about}: {name}", "measured", shown, note=f"quartiles {low:+.0f}, {high:+.0f}; {len(values)} triples"
        )


def find_batch(target: float, plain: Worker) -> int:
    """Return the batch with which a step takes about this long."""
    batch = FIRST_BATCH
    for _ in range(3):
        plain.run(batch, 3)  # allocates memory
        seconds = plain.run(batch, max(3, round(shortened(TRIAL))))
        batch = max(1, min(4 * batch, round(batch * target / seconds)))
    return batch


@contextmanager
def worker(mode: str) -> Iterator[Worker]:
    started = Worker(mode)
    try:
        yield started
    finally:
        started.process.kill()
        started.process.communicate()


def work(mode: str) -> None:
    """Train as many steps as each line of the input asks for, and print the seconds."""
    import torch
    from validation.gpu_check.trainings import VOCABULARY, Job

    import rankscope

    torch.set_num_threads(1)
    job = Job(DEVICE, 0.0)
    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=job.is_gpu)
    if mode == "hook":
        rankscope.instrument()
    for line in sys.stdin:
        batch, steps = map(int, line.split())
        tokens = torch.randint(0, VOCABULARY, (batch, 512 if job.is_gpu else 8), device=DEVICE)
        print(json.dumps({"seconds": run_block(torch, model, optimizer, tokens, steps)}), flush=True)


def run_block(torch: Any, model: Any, optimizer: Any, tokens: Any, steps: int) -> float:
    """Return the seconds of these steps, until the device has finished them."""
    synchronize = torch.cuda.synchronize if DEVICE == "cuda" else lambda: None
    synchronize()
    began = time.perf_counter()
    for step in range(steps):
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % READ_EVERY == 0:
            loss.item()
    synchronize()
    return time.perf_counter() - began


if __name__ == "__main__":
    work(sys.argv[1])
