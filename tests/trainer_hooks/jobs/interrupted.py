"""A job with Ctrl-C at every point within the hook where Python can deliver it; prints what was wrong afterwards.

Signals are handled where a function begins and after a call into C. At each such point in the hook's code that a
training step comes through, one KeyboardInterrupt is raised; then training goes on, as it does in a notebook.
"""

from __future__ import annotations

import dis
import json
import sys
import tempfile
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist
from testing.leaving import leave
from testing.own_record import attachment
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import rankscope
from rankscope import attach
from rankscope.record import layout
from rankscope.record.layout import INDEX

HOOK = str(Path(attach.__file__).parent)
STEPS_AFTERWARDS = 2


class Job:
    """Everything that is watched, in a small step."""

    def __init__(self, directory: str) -> None:
        self.model = DistributedDataParallel(torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.batches = DataLoader(TensorDataset(torch.randn(4, 4)), batch_size=4)
        self.path = Path(directory) / "model.pt"

    def step(self) -> None:
        for (batch,) in rankscope.timed(self.batches):
            with torch.autocast("cpu", torch.bfloat16), rankscope.phase("tokenize"):
                output = self.model(batch)
            output.float().sum().backward()
            dist.all_reduce(torch.ones(1))
            torch.save(self.model.state_dict(), self.path)
            self.optimizer.step()


@cache
def points(code: CodeType) -> set[int]:
    """Where in the code a signal may be handled. A call whose result is returned is left out: the exception would come
    from the call itself, hence within a `try` around it, and not from the return, which is in none.
    """
    instructions = [it for it in dis.get_instructions(code) if it.opname not in ("CACHE", "EXTENDED_ARG")]
    return {after.offset for before, after in pairwise(instructions) if is_place(before, after)}


def is_place(before: dis.Instruction, after: dis.Instruction) -> bool:
    return before.opname.startswith(("CALL", "RESUME")) and after.opname != "RETURN_VALUE"


class Interrupt:
    """A trace function that raises at the point number `at`, and counts the points before."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.where = ""
        self._came_back = False  # out of a function of the hook's own: that is no point, as only calls into C are

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOOK):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        came_back, self._came_back = self._came_back, event == "return"
        if event == "opcode" and not came_back and frame.f_lasti in points(frame.f_code):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(job: Job, at: int) -> Interrupt | None:
    """One step with an interrupt; None if it has no point of that number."""
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        job.step()
        return None
    except KeyboardInterrupt:
        return interrupt
    finally:
        sys.settrace(None)


def wrongs(job: Job) -> list[str]:
    """What is wrong after a few steps without an interrupt."""
    names = ("steps", "micro_steps")
    job.step()  # there is a record now, and what the optimizer had open is closed
    timeline, slots = attachment().timeline, attachment().writer.slots
    before = [slots[INDEX[name]] for name in names]
    for _ in range(STEPS_AFTERWARDS):
        job.step()
    counted = [slots[INDEX[name]] - count for name, count in zip(names, before, strict=True)]
    sums = sum(slots[INDEX["phase_seconds"] : INDEX["phase_seconds"] + layout.MAX_PHASES])
    truths = {
        f"open {timeline.open_phases}": timeline.open_phases == (layout.OTHER, None),
        f"in {slots[INDEX['phase']]}": slots[INDEX["phase"]] == layout.OTHER,
        f"in collective {slots[INDEX['collective_op']]}": slots[INDEX["collective_op"]] == 0,
        f"counted {counted}": counted == [STEPS_AFTERWARDS] * len(names),
        "partition": abs(slots[INDEX["started_monotonic"]] + sums - timeline.last_event) < 1e-6,
        f"off {attachment()._disabled}": not attachment()._disabled,
    }
    return [wrong for wrong, is_right in truths.items() if not is_right]


def main() -> None:
    """Interrupt the step after `sys.argv[1]` others, at each `sys.argv[2]`th point; each time with a fresh hook."""
    torch.set_num_threads(1)
    found, at = [], 1
    with tempfile.TemporaryDirectory() as directory:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        while True:
            rankscope.instrument()
            job = Job(directory)
            for _ in range(int(sys.argv[1])):
                job.step()
            interrupt = interrupted(job, at)
            if interrupt is None:
                break
            job.model = DistributedDataParallel(job.model.module)  # its own state does not survive an interrupt
            found += [f"{at}, {interrupt.where}: {wrong}" for wrong in wrongs(job)]
            rankscope.uninstrument()
            at += int(sys.argv[2])
        leave()
    print(json.dumps({"points": at, "wrong": found}))


main()
