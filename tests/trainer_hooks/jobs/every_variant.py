"""A job for torchrun that trains a small DDP model with and without the hook, in several variants.

Each variant is trained twice from the same seed in the same process group. Each rank prints a JSON line: whether the
parameters are bit-identical, and values of the record.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
import torch.distributed as dist
from testing.leaving import leave
from testing.own_record import snapshot
from testing.torchrun import report
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope import guard
from rankscope.record.snapshot import RankSnapshot

STEPS = 12


class Bystander(torch.nn.Identity):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1))


def build(variant: str) -> DistributedDataParallel:
    torch.manual_seed(0)
    # In "unused" the module's first parameter gets no gradient; static_graph permits that.
    unused = [Bystander()] if variant == "unused" else []
    layers = [*unused, torch.nn.Linear(16, 32), torch.nn.BatchNorm1d(32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
    model = DistributedDataParallel(
        torch.nn.Sequential(*layers),
        static_graph=variant in ("static_graph", "unused"),
        find_unused_parameters=variant == "find_unused",
    )
    if variant == "fp16":
        model.register_comm_hook(None, fp16_compress_hook)
    return model


def train(variant: str) -> list[torch.Tensor]:
    model = build(variant)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1 + dist.get_rank())
    batches = DataLoader(TensorDataset(torch.randn(8 * STEPS, 16), torch.randint(0, 4, (8 * STEPS,))), batch_size=8)
    for number, (inputs, targets) in enumerate(batches):
        accumulating = variant == "no_sync" and number % 2 == 0
        with model.no_sync() if accumulating else contextlib.nullcontext():
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            if variant == "peek":  # a forward without backward, between the two
                with torch.no_grad():
                    model.module.eval()(inputs)
                    model(inputs)
                    model.module.train()
            loss.backward()
        if not accumulating:
            optimizer.step()
            optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def instrumented(variant: str) -> tuple[list[torch.Tensor], RankSnapshot]:
    """Return the parameters and the record."""
    rankscope.instrument()
    result = train(variant)
    rank = snapshot()
    rankscope.uninstrument()
    return result, rank


def compare(variant: str) -> dict[str, Any]:
    plain = train(variant)
    watched, rank = instrumented(variant)
    return {
        "identical": all(map(torch.equal, plain, watched)),
        "steps": rank["steps"],
        "collectives": rank.many("collectives"),
        "collective_bytes": rank.many("collective_bytes"),
        "group": rank.info["group"],
        "run": rank.info["run"],
        "world_size": rank.info["world_size"],
    }


def main() -> None:
    guard.reraise = True
    dist.init_process_group("gloo")
    results = {variant: compare(variant) for variant in sys.argv[1:]}
    report({"rank": dist.get_rank(), "variants": results})
    leave()


main()
