"""What it costs to align eight ranks and to look at their processes: `python -m benchmarks.alignment_cost`.

The ranks are processes that hold their records' locks and have as many threads as a training process; their steps, 20
between two polls, are written by a clock of their own. It is the processor time of this process, so that a busy machine
matters little.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import tempfile
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from rankscope import record
from rankscope.rank_writer import RankWriter
from rankscope.timeline import Timeline
from rankscope_exporter.collectors.alignment import AlignedSteps
from rankscope_exporter.collectors.rank_processes import RankProcesses
from rankscope_exporter.run_directory import LABELS, RunDirectory

RANKS = 8
THREADS = 100
STEPS = 20
POLLS = 100
STEP = {record.DATA_WAIT: 0.001, record.FORWARD: 0.012, record.BACKWARD: 0.03, record.COLLECTIVE_WAIT: 0.007}


def live(directory: Path, rank: int, orders: Connection) -> None:
    """A rank that takes STEPS steps at each order."""
    now = 1000.0
    writer = RankWriter()
    timeline = Timeline(writer, lambda: now)
    info = {**dict.fromkeys(LABELS, ""), "run": "benchmark", "rank": str(rank), "pid": "1", "group": "0-7"}
    writer.publish(directory, f"benchmark.{rank}", info)
    for _ in range(THREADS):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    while orders.recv():
        for _ in range(STEPS):
            for phase, seconds in STEP.items():
                opened = timeline.enter(phase)
                now += seconds * (1 + rank / 100)
                timeline.leave(opened)
            now += sum(STEP.values()) * (RANKS - rank) / 100  # all end at the same time
            timeline.step()
        orders.send(True)


def cost(action: Callable[[], object]) -> float:
    """Processor seconds of one call."""
    began = time.process_time()
    action()
    return time.process_time() - began


def main() -> None:
    """Measure and print a line of JSON; milliseconds, medians."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        pipes = [context.Pipe() for _ in range(RANKS)]
        for rank, (_, orders) in enumerate(pipes):
            context.Process(target=live, args=(Path(name), rank, orders), daemon=True).start()
        run_directory = RunDirectory([Path(name)])
        aligned_steps, processes = AlignedSteps(30.0), RankProcesses()
        actions: dict[str, Callable[[], object]] = {
            "scan": run_directory.scan,
            "scan_and_alignment": lambda: aligned_steps.look(run_directory.scan(with_steps=True)),
            "scan_and_processes": lambda: processes.look(run_directory.scan(with_steps=True)),
        }
        costs: dict[str, list[float]] = {action: [] for action in actions}
        for _ in range(POLLS):
            for pipe, _ in pipes:
                pipe.send(True)
            for pipe, _ in pipes:
                pipe.recv()
            for action, run in actions.items():
                costs[action].append(cost(run))
        families = aligned_steps.look(run_directory.scan(with_steps=True))
        aligned = next(family for family in families if family.name == "rankscope_rank_aligned_steps").samples[0].value
        for pipe, _ in pipes:
            pipe.send(False)
    figures = {action: round(1000 * median(values), 2) for action, values in costs.items()}
    where = {"ranks": RANKS, "threads": THREADS, "steps": STEPS, "cores": os.cpu_count(), "load": os.getloadavg()[0]}
    print(json.dumps({**figures, "aligned_steps": aligned, **where}))


if __name__ == "__main__":
    main()
