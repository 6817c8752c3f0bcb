"""A job that is killed many times, at random bytecode instructions of the hook or at random times.

`killed.py instructions 200` or `killed.py moments 200`. Each time a forked child trains, with its own record. The
parent reads the record before and after it kills the child. It prints a JSON line with the number of each ending, and
all wrong values.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from testing.own_record import attachment

import rankscope
from rankscope import attach
from rankscope.record.reader import UnreadableRecordError, read_rank

HOOK = str(Path(attach.__file__).parent)
RUN_DIR = Path(os.environ["RANKSCOPE_RUN_DIR"])
PUBLISHED, LEAVING, LEFT, STEPS, INSTRUCTIONS = 0, 1, 2, 3, 4  # the child's state in shared memory

memory = memoryview(mmap.mmap(-1, 64)).cast("q")
weights = torch.nn.Parameter(torch.ones(2))
optimizer = torch.optim.SGD([weights], lr=0.1)


def train(steps: float) -> None:
    """Make steps, each with a new info."""
    while memory[STEPS] < steps:
        with rankscope.phase(f"phase {memory[STEPS] % 20}"):
            weights.sum().backward()
        optimizer.step()
        attachment().publication.refresh()
        memory[PUBLISHED] = 1
        memory[STEPS] += 1


def live_and_leave() -> None:
    train(3)
    memory[LEAVING] = 1
    rankscope.uninstrument()
    memory[LEFT] = 1


def die_at(instruction: int) -> Callable[..., Any]:
    """Return a trace function that kills this process at an instruction of the hook."""

    def trace(frame: FrameType, event: str, _: object) -> Callable[..., Any] | None:
        if not frame.f_code.co_filename.startswith(HOOK):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        if event == "opcode":
            memory[INSTRUCTIONS] += 1
            if memory[INSTRUCTIONS] == instruction:
                os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def child(live: Callable[[], None]) -> int:
    """Start a rank by fork and return its process ID."""
    memory[:] = memoryview(bytes(len(memory) * 8)).cast("q")
    pid = os.fork()
    if pid == 0:
        live()
        os._exit(0)
    return pid


def traced(instruction: int) -> int:
    """Run a child with `die_at` and return its process ID. It trains to the end if there is no such instruction."""

    def live() -> None:
        sys.settrace(die_at(instruction))
        live_and_leave()

    pid = child(live)
    os.waitpid(pid, 0)
    return pid


def errors(pid: int, reasons: set[str | None] | None = None) -> list[str]:
    """Return what is wrong in a child's record. Without `reasons`, the child is dead and they follow from its state."""
    paths = [path for path in RUN_DIR.glob(f"*.{pid}.rank") if path.name[0] != "."]
    if not paths:
        return ["no record"] if memory[PUBLISHED] else []
    steps = memory[STEPS]
    try:
        snapshot = read_rank(paths[0])
    except UnreadableRecordError as error:
        return [str(error)]
    reasons = reasons or ({"killed", "finished"} if memory[LEAVING] and not memory[LEFT] else {ending()})
    endings[str(snapshot.exit_reason)] += 1
    are_steps = steps <= snapshot["steps"] <= memory[STEPS] + 1
    is_right = snapshot.exit_reason in reasons and are_steps
    return [] if is_right else [f"{snapshot.exit_reason} after {snapshot['steps']} steps, not {reasons} after {steps}"]


def ending() -> str:
    return "finished" if memory[LEFT] else "killed"


def kill_at_instructions(times: int, choose: random.Random) -> list[str]:
    traced(0)
    total, found = memory[INSTRUCTIONS], []
    for _ in range(times):
        instruction = choose.randrange(1, total)
        found += [f"{error} (instruction {instruction} of {total})" for error in errors(traced(instruction))]
    return found


def kill_at_moments(times: int, choose: random.Random) -> list[str]:
    found = []
    for _ in range(times):
        pid = child(lambda: train(float("inf")))
        while not memory[PUBLISHED]:
            time.sleep(0.001)
        moment = time.monotonic() + choose.uniform(0, 0.01)
        while time.monotonic() < moment:
            found += errors(pid, {None})
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        found += errors(pid)
    return found


endings: Counter[str] = Counter()


def main() -> None:
    torch.set_num_threads(1)
    kill = {"instructions": kill_at_instructions, "moments": kill_at_moments}[sys.argv[1]]
    rankscope.instrument()
    found = kill(int(sys.argv[2]), random.Random(4))
    traced(0)  # the next rank removes their records
    print(json.dumps({"errors": found, "endings": endings, "files": len(list(RUN_DIR.iterdir()))}))
    os._exit(0)


main()
