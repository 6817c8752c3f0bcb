"""Train with and without the hook, and print one line of JSON for each rank and way, as a job for torchrun.

torchrun --nproc-per-node=2 -m testing.ways.job 20 replicas.ddp sharded.fsdp2
"""

from __future__ import annotations

import gc
import importlib
import json
import logging
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import rankscope
from rankscope import attach
from rankscope.record.reader import read_rank
from rankscope.record.snapshot import RankSnapshot
from testing.leaving import leave
from testing.ways import leftovers
from testing.ways.run import Parameters, Run


class Messages(logging.Handler):
    """Rankscope's log messages from WARNING on: a warning is a failed probe."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("rankscope").addHandler(self)

    def emit(self, entry: logging.LogRecord) -> None:
        self.texts.append(entry.getMessage())


def train(way: str, steps: int) -> tuple[Run, Parameters]:
    file, _, name = way.partition(".")
    function = getattr(importlib.import_module(f"testing.ways.{file}"), name)
    if dist.is_initialized():
        dist.barrier()
    with tempfile.TemporaryDirectory() as directory:
        run = Run(steps, Path(directory))
        return run, function(run)


def train_with_hook(way: str, steps: int) -> tuple[Run, Parameters, RankSnapshot, tuple[float, float]]:
    """Train with the hook. Return also its record, and bounds of the duration by an independent clock."""
    before = time.perf_counter()
    rankscope.instrument()
    after = time.perf_counter()
    run, parameters = train(way, steps)
    ended = time.perf_counter()
    with rankscope.phase("other"):
        pass  # accounts for the open phase, so that the sum is complete
    at_most = time.perf_counter() - before
    attachment = attach.current()
    assert attachment is not None
    assert attachment.writer.path is not None, "no record was published"
    return run, parameters, read_rank(attachment.writer.path), (ended - after, at_most)


def compare(way: str, steps: int, messages: Messages) -> dict[str, Any]:
    began = time.perf_counter()
    plain = train(way, steps)[1]
    before = leftovers.attributes()
    run, parameters, snapshot, elapsed = train_with_hook(way, steps)
    patched = leftovers.patches(leftovers.attributes())
    rankscope.uninstrument()
    after = leftovers.attributes()
    return {
        "way": way,
        "rank": int(os.environ.get("RANK", "0")),
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "identical": len(plain) == len(parameters) and all(map(torch.equal, plain, parameters)),
        "tensors": len(plain),
        "patched": len(patched),
        "not_restored": sorted(
            f"{place}.{name}"
            for place, name in patched
            if after.get(place, {}).get(name) is not before.get(place, {}).get(name)
        ),
        "left_behind": sorted(".".join(where) for where in leftovers.patches(after)),
        "messages": messages.texts[:],
        "probes_disabled": snapshot.info.get("probes_disabled", []),
        "script": clocks(run),
        "record": published(snapshot),
        "elapsed": elapsed,
        "took": time.perf_counter() - began,
    }


def clocks(run: Run) -> dict[str, Any]:
    """Return the script's own measurements since the end of the first step."""
    return {
        "steps": len(run.ends),
        "step_seconds": run.ends[-1] - run.ends[0],
        "batches": run.batches_seen,
        "fetches": run.fetches,
        "phases": run.seconds,
    }


def published(snapshot: RankSnapshot) -> dict[str, Any]:
    """Return the record's values."""
    numbers = ("steps", "micro_steps", "step_seconds", "samples", "tokens", "checkpoints", "amp_skipped_steps")
    return {
        **{name: snapshot[name] for name in numbers},
        "phases": {phase: seconds for phase, seconds in snapshot.phase_seconds.items() if seconds},
        "collectives": sum(snapshot.many("collectives")),
        "info": snapshot.info,
    }


def main() -> None:
    messages = Messages()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for way in sys.argv[2:]:
        line = json.dumps(compare(way, int(sys.argv[1]), messages))
        os.write(1, f"{line}\n".encode())  # one write: the ranks' lines do not mix
        messages.texts.clear()
        gc.collect()
    if dist.is_initialized():
        leave()


if __name__ == "__main__":
    main()
