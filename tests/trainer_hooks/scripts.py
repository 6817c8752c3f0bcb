"""Scripts that become ranks: watched ones that train, and one that needs no torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from subprocess import PIPE

from testing.programs import Program, python, running

# The first optimizer of a process imports torch._dynamo, which takes as much CPU time as torch itself.
TRAIN = """
import os, re, signal, sys, threading, time
import rankscope
import torch
torch.set_num_threads(1)
weights = torch.nn.Parameter(torch.ones(2))

def step():
    weights.sum().backward()
    rankscope.step()

step()
"""
# A rank that needs no torch: its record, lines, stacks and end, without probes.
WITHOUT_TORCH = """
import os, re, signal, sys, threading, time
from pathlib import Path
from rankscope.announcements import Announcer
from rankscope.process.ending import Ending
from rankscope.process.stack_dump import StackDump
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from testing.records import rank_info
writer, dump, rank = RankWriter(), StackDump(), os.environ.get("RANK", "0")
timeline = Timeline(writer)
for _ in range(8): timeline.step()
dump.watch()
info = rank_info(run=os.environ["RANKSCOPE_RUN"], rank=rank, world_size="1", stacks=dump.info)
writer.publish(Path(os.environ["RANKSCOPE_RUN_DIR"]), f"r.{rank}", info)
announcer = Announcer(timeline, lambda: info)
announcer.begin()
ending = Ending(writer, announcer.end)
ending.watch()
ending.watch_published()
"""
READY = "print('ready', flush=True)\n"
WAIT = "sys.stdin.read()\n"


def watched(**variables: str) -> dict[str, str]:
    """Return an environment in which torch loads the hook."""
    return {**os.environ, "RANKSCOPE": "1", "RANKSCOPE_RUN": "job", **variables}


@contextmanager
def job(code: str, *options: str, rank: str = TRAIN, setup: str = "", **variables: str) -> Iterator[Program]:
    """Start a script that becomes a rank, runs `setup`, reports that it is ready, and runs `code`."""
    interpreter, *script = python(rank + setup + READY + code)
    with running(interpreter, *options, *script, env=watched(**variables), stderr=PIPE) as program:
        yield program
