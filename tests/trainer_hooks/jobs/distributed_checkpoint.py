"""A job for torchrun that saves a sharded model with torch.distributed.checkpoint, synchronously and asynchronously.

Each rank prints a JSON line with the values in the record, the time by the script's own clock, and its files' size.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from testing.leaving import leave
from testing.own_record import snapshot
from testing.torchrun import report
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import rankscope
from rankscope import guard

FIELDS = ("checkpoints", "checkpoint_bytes", "checkpoint_last_bytes", "checkpoint_last_seconds")


def fields() -> dict[str, float]:
    rank = snapshot()
    return {name: rank[name] for name in FIELDS} | {"phase_seconds": rank.phase_seconds["checkpoint"]}


def save(directory: Path, model: torch.nn.Module, background: bool) -> dict[str, Any]:
    """Save once, end a step, and return the measured values."""
    state = {"model": model.state_dict()}
    began = time.monotonic()
    future = (checkpoint.async_save if background else checkpoint.save)(state, checkpoint_id=directory)
    took = time.monotonic() - began
    if background:
        future.result()
        time.sleep(0.2)  # a waiter is woken before the future's callbacks run
    dist.barrier()
    rankscope.step()
    files = directory.glob(f"__{dist.get_rank()}_*.distcp")
    return {"took": took, "file_bytes": sum(path.stat().st_size for path in files), "record": fields()}


def main() -> None:
    guard.reraise = True
    rankscope.instrument()
    dist.init_process_group("gloo")
    model = torch.nn.Linear(2048, 2048)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    rankscope.step()
    directory = Path(sys.argv[1])
    result = {"rank": dist.get_rank(), "save": save(directory / "save", model, background=False)}
    result["async_save"] = save(directory / "async_save", model, background=True)
    report(result)
    leave()


main()
