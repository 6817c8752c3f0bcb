"""Measure the cost of aligning a node's ranks, of reading their processes, and of the diagnosis of their run.

    python -m benchmarks.alignment_cost --ranks 8 --threads 100 --device

The ranks are processes that hold their records' locks and have as many threads as a training process. Their own clock
writes 20 steps between two polls. With `--device` one step in 16 is measured on a device, otherwise the ranks wait on
the host. The figures are median CPU times of the exporter's functions, which other load hardly changes. Those of the
diagnosis are of one update a second, of simulated readings: of a healthy run, one with a slow rank, and one that hangs.
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from testing import report
from testing.readings import RUN, SLOW, Training, hang

from rankscope.record import layout
from rankscope.record.sampling import is_sampled
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline
from rankscope_exporter.diagnosis.judge import RunJudge
from rankscope_exporter.ranks.checks import LABELS
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.run_directory import RunDirectory

STEPS = 20
POLLS = 100
UPDATES = 120
"""Seconds of each state of the diagnosed run, with one update a second."""
LEVEL = 4  # of the steps measured on a device: one in 16
STEP = {layout.DATA_WAIT: 0.001, layout.FORWARD: 0.012, layout.BACKWARD: 0.03, layout.COLLECTIVE_WAIT: 0.007}


def live(directory: Path, rank: int, options: argparse.Namespace, orders: Connection) -> None:
    """Run a rank that makes STEPS steps at each order."""
    now = options.began
    writer = RankWriter()
    timeline = Timeline(writer, lambda: now)
    info = {**dict.fromkeys(LABELS, ""), "run": "benchmark", "rank": str(rank), "pid": "1", "group": "all"}
    writer.publish(directory, f"benchmark.{rank}", info)
    for _ in range(options.threads):
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    while orders.recv():
        for _ in range(STEPS):
            for phase, seconds in STEP.items():
                opened = timeline.enter(phase)
                now += seconds * (1 + rank / (10 * options.ranks))
                timeline.leave(opened)
            now += sum(STEP.values()) * (options.ranks - rank) / (10 * options.ranks)  # all end at the same time
            timeline.step()
            if options.device and is_sampled(timeline.steps.count, LEVEL):
                measure_on_device(writer, timeline.steps.count, now)
        orders.send(True)


def measure_on_device(writer: RankWriter, number: int, end: float) -> None:
    """Write step `number` as measured on the device."""
    nth = writer.slots[layout.INDEX["device_steps"]] + 1
    phases = [STEP.get(phase, 0.0) for phase in range(len(layout.PHASES))]
    writer.device_ring[int(nth) % layout.DEVICE_RING_STEPS][:] = array("d", [nth, number, end, number, *phases])
    writer.slots[layout.INDEX["device_steps"]] = nth


def cost(action: Callable[[], object]) -> float:
    """Return the CPU seconds of one call."""
    began = time.process_time()
    action()
    return time.process_time() - began


def measure(options: argparse.Namespace) -> tuple[dict[str, float], float]:
    """Return the median CPU milliseconds of each action, and the number of aligned steps."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        pipes = [context.Pipe() for _ in range(options.ranks)]
        for rank, (_, orders) in enumerate(pipes):
            context.Process(target=live, args=(Path(name), rank, options, orders), daemon=True).start()
        run_directory = RunDirectory([Path(name)])
        aligned_steps, processes = AlignedSteps(), RankProcesses()
        actions: dict[str, Callable[[], object]] = {
            "scan": run_directory.scan,
            "scan and alignment": lambda: aligned_steps.poll(run_directory.scan(with_steps=True)),
            "scan and processes": lambda: processes.poll(run_directory.scan(with_steps=True)),
        }
        costs: dict[str, list[float]] = {action: [] for action in actions}
        for _ in range(POLLS):
            for pipe, _ in pipes:
                pipe.send(True)
            for pipe, _ in pipes:
                pipe.recv()
            for action, run in actions.items():
                costs[action].append(cost(run))
        families = aligned_steps.poll(run_directory.scan(with_steps=True))
        aligned = next(family for family in families if family.name == "rankscope_rank_aligned_steps").samples[0].value
        for pipe, _ in pipes:
            pipe.send(False)
    return {action: round(1000 * median(values), 2) for action, values in costs.items()}, aligned


def diagnosis_costs(ranks: int) -> dict[str, float]:
    """Return the median CPU milliseconds of an update of the diagnosis by the state of the run."""
    training, judge = Training(ranks), RunJudge(RUN)
    costs: dict[str, float] = {}
    for state, change in {"healthy": (), "slow rank": (SLOW,), "hang": (hang("backward", 1),)}.items():
        updates = [partial(judge.update, *moment) for moment in training.train(UPDATES, *change)]
        costs[f"diagnosis, {state}"] = round(1000 * median(map(cost, updates)), 2)
    return costs


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--threads", type=int, default=100)
    parser.add_argument("--device", action="store_true", help="measure steps on a device")
    options = parser.parse_args()
    options.began = time.monotonic()
    figures, aligned = measure(options)
    figures |= diagnosis_costs(options.ranks)
    body = [report.table([*figures], [[*figures.values()]]), f"In milliseconds; {aligned:.0f} steps were aligned."]
    report.Report("alignment_cost", "Cost of the alignment and the diagnosis", __doc__, "none", body, figures).publish(
        options.save
    )


if __name__ == "__main__":
    main()
