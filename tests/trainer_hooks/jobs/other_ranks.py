"""Processes that become ranks or change their rank. Each scenario has its own run directory."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo  # which the first optimizer of each forked process would import
import torch.distributed as dist

HERE = Path(sys.argv[1])
FORK = multiprocessing.get_context("fork")


def train(steps: int) -> None:
    """Train a small model, with the other ranks if there are some."""
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(steps):
        weights.sum().backward()
        if dist.is_initialized():
            dist.all_reduce(weights.grad)
        optimizer.step()


def train_in_group(rank: int, size: int, store: str, steps: int) -> None:
    """Train in a new process group, and destroy it."""
    init = f"file://{os.environ['RANKSCOPE_RUN_DIR']}/{store}"
    dist.init_process_group("gloo", init_method=init, rank=rank, world_size=size)
    train(steps)
    dist.barrier()
    dist.destroy_process_group()


def start(target: Callable[..., None], *arguments: tuple[object, ...]) -> None:
    """Run the function in one forked process for each tuple of arguments."""
    processes = [FORK.Process(target=target, args=one) for one in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0


def forked_ranks() -> None:
    """Train alone, then let two forked ranks train in a group."""
    train(2)
    start(train_in_group, (0, 2, "store", 3), (1, 2, "store", 3))


def swap(rank: int) -> None:
    """Train as one rank, then as the other one."""
    train_in_group(rank, 2, "first", 2)
    train_in_group(1 - rank, 2, "second", 4)


def swapped_ranks() -> None:
    """Let two ranks swap their numbers in their second group."""
    start(swap, (0,), (1,))


def same_rank() -> None:
    """Train alone, then in two groups of one rank."""
    train(2)
    train_in_group(0, 1, "first", 3)
    train_in_group(0, 1, "second", 4)


def helper_of_a_rank() -> None:
    """Train in a group, and let a forked helper run its own backward pass."""

    def helper() -> None:
        torch.nn.Linear(2, 2)(torch.ones(1, 2)).sum().backward()

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    train(2)
    start(helper, ())
    dist.destroy_process_group()


def evaluator_of_a_rank() -> None:
    """Train alone, and let a forked helper evaluate the model."""

    def evaluate() -> None:
        torch.nn.Linear(2, 2)(torch.ones(1, 2))

    train(2)
    start(evaluate, ())


def hogwild() -> None:
    """Train in two processes at once without a process group, then evaluate in their parent."""
    both_train = FORK.Barrier(2)

    def worker() -> None:
        train(2)
        both_train.wait()

    start(worker, (), ())
    with torch.no_grad():
        torch.nn.Linear(2, 2)(torch.ones(1, 2))


def programs_of_a_rank() -> None:
    """Train alone, and let one program evaluate and another one train."""
    train(2)
    model = "import torch\nmodel = torch.nn.Linear(2, 2)\nloss = model(torch.ones(1, 2)).sum()\n"
    optimizer = "loss.backward()\ntorch.optim.SGD(model.parameters(), lr=0.1).step()\n"
    for program in (model, model + optimizer):
        subprocess.run([sys.executable, "-c", program], check=True)


SCENARIOS = (
    forked_ranks,
    swapped_ranks,
    same_rank,
    hogwild,
    helper_of_a_rank,
    evaluator_of_a_rank,
    programs_of_a_rank,
)

if __name__ == "__main__":
    torch.set_num_threads(1)
    for scenario in SCENARIOS:
        directory = HERE / scenario.__name__
        directory.mkdir()
        os.environ["RANKSCOPE_RUN_DIR"] = str(directory)
        start(scenario, ())
