"""A job with Ctrl-C at every point in the hook where Python can raise it. It prints the errors after that.

Python handles signals at the start of a function and after a call of C code. At each such point of the hook's code in a
training step, one KeyboardInterrupt is raised. Then training continues, as in a notebook.
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
    """A small training step with everything that the hook watches."""

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
    """Return the offsets at which a signal may be handled. A call whose result is returned is omitted: its exception
    would be raised by the call, inside a `try` around it, not by the return, which is outside.
    """
    instructions = [it for it in dis.get_instructions(code) if it.opname not in ("CACHE", "EXTENDED_ARG")]
    return {after.offset for before, after in pairwise(instructions) if is_point(before, after)}


def is_point(before: dis.Instruction, after: dis.Instruction) -> bool:
    return before.opname.startswith(("CALL", "RESUME")) and after.opname != "RETURN_VALUE"


class Interrupt:
    """A trace function that raises at the point number `at`, and counts the points before."""

    def __init__(self, at: int) -> None:
        self.at = at
        self.seen = 0
        self.where = ""
        self._has_returned = False  # from a function of the hook: that is not a point, unlike a call of C code

    def __call__(self, frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOOK):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        has_returned, self._has_returned = self._has_returned, event == "return"
        if event == "opcode" and not has_returned and frame.f_lasti in points(frame.f_code):
            self.seen += 1
            if self.seen == self.at:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self


def interrupted(job: Job, at: int) -> Interrupt | None:
    """Run one step with an interrupt; return None if it has no point of that number."""
    interrupt = Interrupt(at)
    sys.settrace(interrupt)
    try:
        job.step()
        return None
    except KeyboardInterrupt:
        return interrupt
    finally:
        sys.settrace(None)


def errors(job: Job) -> list[str]:
    """Return what is wrong after a few steps without an interrupt."""
    names = ("steps", "micro_steps")
    job.step()  # now there is a record, and the optimizer's open phase is closed
    timeline, slots = attachment().timeline, attachment().writer.slots
    before = [slots[INDEX[name]] for name in names]
    for _ in range(STEPS_AFTERWARDS):
        job.step()
    counted = [slots[INDEX[name]] - count for name, count in zip(names, before, strict=True)]
    sums = sum(slots[INDEX["phase_seconds"] : INDEX["phase_seconds"] + layout.MAX_PHASES])
    checks = {
        f"open {timeline.open_phases}": timeline.open_phases == (layout.OTHER, None),
        f"in {slots[INDEX['phase']]}": slots[INDEX["phase"]] == layout.OTHER,
        f"in collective {slots[INDEX['collective_op']]}": slots[INDEX["collective_op"]] == 0,
        f"counted {counted}": counted == [STEPS_AFTERWARDS] * len(names),
        "partition": abs(slots[INDEX["started_monotonic"]] + sums - timeline.last_event) < 1e-6,
        f"off {attachment()._disabled}": not attachment()._disabled,
    }
    return [error for error, is_right in checks.items() if not is_right]


def main() -> None:
    """Interrupt the step after `sys.argv[1]` others, at each `sys.argv[2]`th point, each time with a new hook."""
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
            job.model = DistributedDataParallel(job.model.module)  # an interrupt breaks DDP's own state
            found += [f"{at}, {interrupt.where}: {error}" for error in errors(job)]
            rankscope.uninstrument()
            at += int(sys.argv[2])
        leave()
    print(json.dumps({"points": at, "errors": found}))


main()
