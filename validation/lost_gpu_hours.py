"""Check whether the exporter's lost GPU time is right at any scrape interval and over restarts of the exporter.

    python -m validation.lost_gpu_hours --minutes 20 --save

A real exporter monitors a real job of four ranks with slow loaders and a slow rank. One Prometheus for each scrape
interval adds up `increase(rankscope_run_lost_gpu_seconds_total)`. The truth is in the ranks' own records: the time in
which their training threads were not in forward, backward or the optimizer. The exporter is restarted after half of the
time. The GPUs are simulated, and the device's time is slept.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import yaml
from testing import report, servers
from testing.job.launch import RANKS, TrainingJob

from rankscope.record.phases import COMPUTING
from rankscope.record.reader import read_rank
from rankscope.record.writer import SUFFIX

INTERVALS = (5, 15, 30, 60)  # seconds
LOST = "sum(max by (run, owner, cause) (increase(rankscope_run_lost_gpu_seconds_total[{seconds}s] @ {until:.3f})))"
SETTLED = 120.0  # seconds until each Prometheus has two samples, and the run a verdict
BEHAVIOR = {"fetch": 140.0}  # milliseconds: longer than a step
SLOW_RANK = {1: {"post": 40.0}}


def lost_seconds(run_dir: Path) -> float:
    """Return the ranks' losses so far, in GPU seconds."""
    snapshots = [read_rank(path) for path in run_dir.glob(f"*{SUFFIX}")]
    return sum(seconds for one in snapshots for phase, seconds in one.phase_seconds.items() if phase not in COMPUTING)


def prometheus(directory: Path, interval: int, target: str) -> servers.Prometheus:
    """Return a Prometheus that scrapes the exporter at this interval."""
    directory.mkdir()
    config = {
        "global": {"scrape_interval": f"{interval}s", "scrape_timeout": f"{min(interval, 10)}s"},
        "scrape_configs": [{"job_name": "rankscope", "static_configs": [{"targets": [target]}]}],
    }
    return servers.prometheus(directory, yaml.safe_dump(config))


def measure(directory: Path, minutes: float) -> tuple[float, Mapping[int, float]]:
    """Return the true loss in GPU seconds, and Prometheus' result by interval."""
    run_dir, state = directory / "run", directory / "state"
    for made in (run_dir, state):
        made.mkdir()
    scenario = {"gpus": RANKS, "follow_ranks": True}
    exporter = servers.exporter(directory, scenario, run_dir, flags=[f"--state-dir={state}"])
    servers_by_interval = {each: prometheus(directory / f"{each}s", each, exporter.address) for each in INTERVALS}
    job = TrainingJob(directory / "job", "train", run_dir)
    with ExitStack() as running:
        for server in (exporter, *servers_by_interval.values()):
            running.enter_context(server)
        running.callback(job.terminate)
        job.start(**BEHAVIOR)
        job.wait_until_training()
        job.change(ranks=SLOW_RANK)
        time.sleep(SETTLED)
        begin, before = time.time(), lost_seconds(run_dir)
        time.sleep(30.0 * minutes)
        exporter.stop()
        exporter.start()
        time.sleep(30.0 * minutes)
        truth, until = lost_seconds(run_dir) - before, time.time()
        query = LOST.format(seconds=round(until - begin), until=until)
        return truth, {each: float(one.query(query)[0]["value"][1]) for each, one in servers_by_interval.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and publish. Return 1 if an interval's error is more than 1%."""
    parser = report.parser(__doc__)
    parser.add_argument("--minutes", type=float, default=20.0)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="rankscope-hours-", dir="/dev/shm") as name:
        truth, found = measure(Path(name), options.minutes)
    rows = [
        (f"{each} s", f"{truth:.0f}", f"{seconds:.0f}", f"{100 * (seconds / truth - 1):+.2f}%")
        for each, seconds in found.items()
    ]
    body = report.table(("scrape interval", "lost GPU seconds", "by Prometheus", "error"), rows)
    lines = [{"interval": each, "truth": truth, "found": seconds} for each, seconds in found.items()]
    title = "Lost GPU time, added up by Prometheus"
    report.Report("lost_gpu_hours", title, __doc__, "1%", [body], lines).publish(options.save)
    return int(any(abs(seconds / truth - 1) > 0.01 for seconds in found.values()))


if __name__ == "__main__":
    sys.exit(main())
