"""Where faults happen: one training job after another on a node of six simulated GPUs, and the stack that watches.

A fault does what it does through the methods here. The arena knows of no fault, and what watches knows of no arena.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import yaml
from testing import servers
from testing.job.device import GLOO
from testing.job.launch import RANKS, STARTS_WITHIN, JobError, TrainingJob
from testing.servers import Prometheus
from testing.stack import Stack, wait_for

from rankscope.record import layout

THRESHOLDS = Path(__file__).with_name("thresholds.json")
"""Of the exporter's findings, where a run has a minute."""
GPUS = RANKS + 2  # two that belong to no rank
RUN = "train"
QUIET_FOR = 8.0  # seconds without an alert, pending or firing: the rules' window, and some
QUIET_WITHIN = 75.0  # an XID stays for 30 s
READY = f"count(rankscope_rank_up == 1) == {RANKS} and count(rate(rankscope_rank_steps_total[4s]) > 2) == {RANKS}"

SomeArena = TypeVar("SomeArena", bound="Arena")


class Arena:
    """One node: its job starts when the context is entered, and ends with it. Nothing outside is touched.

    Its exporter belongs to whichever stack watches the node.
    """

    stack: Stack
    job: TrainingJob
    """The one that runs now, or the last that did."""

    def __init__(
        self,
        directory: Path,
        memory: Path,
        device: str = GLOO,
        run: str = RUN,
        machine: int = 0,
        exporter: Sequence[str] = ("rankscope_exporter",),
        thresholds: Path | None = THRESHOLDS,
        **healthy: Any,
    ) -> None:
        """`directory` is for logs and databases; `memory`, on tmpfs, for records and what ranks and GPUs are told.

        `exporter` is the module that runs one, `healthy` how ranks without a fault behave where that is not as usual.
        """
        self.run = run
        self._memory, self._device, self._machine, self._healthy = memory, device, machine, healthy
        self._run_dir, self._claims = memory / "run", memory / "claims"
        self._changes, self._holders = memory / "gpus", memory / "holders"
        self._newer = self._run_dir / "newer.rank"
        for made in (self._run_dir, self._claims, self._changes, self._holders):
            made.mkdir(parents=True, exist_ok=True)
        scenario = directory / "scenario.yml"
        told_by = {"processes_dir": str(self._holders), "changes_dir": str(self._changes)}
        gpus = {"gpus": GPUS, "machine": machine, "model": {"nvlinks": 18}, "follow_ranks": True, **told_by}
        scenario.write_text(yaml.safe_dump(gpus))
        flags = [f"--collector.allocation.slurm-dir={self._claims}"]
        flags += [f"--collector.findings.thresholds={thresholds}"] if thresholds else []
        self.exporter = servers.exporter(directory, str(scenario), self._run_dir, flags=flags, module=exporter)
        self._jobs = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self.onset = 0.0
        """When the first thing since `heal` began to go wrong, in unix time; 0 while nothing does."""

    def __enter__(self: SomeArena) -> SomeArena:
        with ExitStack() as started:
            self._start(started)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    # What a fault may do.

    def change_ranks(
        self, everybody: dict[str, Any] | None = None, ranks: dict[int, dict[str, Any]] | None = None
    ) -> None:
        """Change the behavior (testing/job/control.py) of all ranks, or of some. Raises JobError."""
        self._began(self.job.change(everybody, ranks))

    def change_gpu(self, gpu: int, **state: Any) -> None:
        """A simulated GPU does this (simulation/changes.py) from now on."""
        path = self._changes / f"{gpu}.yml"
        path.with_suffix(".draft").write_text(yaml.safe_dump(state))
        path.with_suffix(".draft").rename(path)
        self._began(time.time())

    def hold_memory(self, gpu: int, memory: str) -> None:
        """A process that is no rank holds so much memory of a GPU (such as "20 GiB")."""
        command = ["-m", "rankscope_exporter.simulation.hold", f"--dir={self._holders}"]
        self._spawn(*command, f"--gpu={gpu}", f"--memory={memory}")

    def crowd(self, rank: int, hogs: int) -> None:
        """A rank has to share one processor with so many busy processes."""
        processor = {max(os.sched_getaffinity(0))}
        self.job.pin(rank, processor)
        for _ in range(hogs):
            self._spawn("-c", f"import os; os.sched_setaffinity(0, {processor})\nwhile True: pass")

    def start_job(self, **everybody: Any) -> None:
        """A new job in the place of the one that there was, under its name, as when a job is queued again."""
        if self._jobs:
            self.job.terminate()
        self._jobs += 1
        self.job = TrainingJob(self._memory / f"job-{self._jobs}", self.run, self._run_dir, self._device, self._machine)
        self.job.start(**{**self._healthy, **everybody})

    def claim(self, gpu: int) -> None:
        """A scheduler gives a GPU to somebody's job."""
        (self._claims / str(gpu)).write_text("4711 alice notebook\n")
        self._began(time.time())

    def stop_exporter(self) -> None:
        """Nobody watches the node any more."""
        self.exporter.stop()
        self._began(time.time())

    def publish_of_another_version(self) -> None:
        """A record with the header of another version is among those of the ranks."""
        header = layout.HEADER.pack(layout.MAGIC, layout.VERSION + 1, layout.SIZE, layout.LAYOUT)
        self._newer.write_bytes(header.ljust(layout.SIZE, b"\0"))
        self._began(time.time())

    def wait_for_ranks(self) -> None:
        """Until all ranks of the job have a record, though none may have made a step yet. Raises JobError."""
        began = f'rankscope_rank_start_timestamp_seconds{{run="{self.run}"}} > {self.job.started}'
        if not wait_for(lambda: len(self.stack.prometheus.query(began)) == RANKS, STARTS_WITHIN):
            raise JobError(f"no records of {RANKS} ranks")

    def begin(self) -> None:
        """Something begins to go wrong now, by other means than the above."""
        self._began(time.time())

    def kill(self, rank: int) -> None:
        """SIGKILL to a rank; torchrun ends the job."""
        self._began(self.job.kill(rank))

    # What the runner does.

    def heal(self) -> float:
        """Undo everything, with a new job if this one is gone; returns when all was well again. Raises JobError."""
        self._stop_children()
        for path in (*self._changes.glob("*.yml"), *self._claims.iterdir()):
            path.unlink()
        self._newer.unlink(missing_ok=True)
        if self.exporter.pid is None:
            self.exporter.start()
        if not self.job.is_running():
            self.start_job()
            self.job.wait_until_training()
            healed = time.time()
        else:
            healed = self.job.heal(**self._healthy)
            self._free_processors()
        self.onset = 0.0
        return healed

    def _start(self, started: ExitStack) -> None:
        started.callback(self._end)
        self.start_job()
        self.job.wait_until_training()

    def _began(self, when: float) -> None:
        self.onset = self.onset or when

    def _spawn(self, *arguments: str) -> None:
        # In a session of its own, as torchrun's ranks are: where the kernel shares processors out among sessions
        # (sched_autogroup_enabled) all of ours together would take no more than one rank.
        self._children.append(subprocess.Popen([sys.executable, *arguments], start_new_session=True))
        self._began(time.time())

    def _stop_children(self) -> None:
        for child in self._children:
            child.terminate()
            child.wait()
        self._children.clear()

    def _free_processors(self) -> None:
        for rank in range(RANKS):
            self.job.pin(rank, os.sched_getaffinity(0))

    def _end(self) -> None:
        self._stop_children()
        self.job.terminate()


class LoneArena(Arena):
    """One that has a stack of its own, at the fast speed."""

    def __init__(self, directory: Path, memory: Path, device: str = GLOO) -> None:
        super().__init__(directory, memory, device)
        self.stack = Stack(directory, [self.exporter])

    def become_quiet(self) -> bool:
        """Wait until all ranks train without an alert for a while; return whether they do."""
        return become_quiet(self.stack.prometheus, READY, QUIET_FOR, QUIET_WITHIN)

    def step_seconds(self) -> float | None:
        """The mean step of the last five seconds; None while there is none."""
        steps = self.stack.prometheus.query("1 / max(rate(rankscope_rank_steps_total[5s]) > 0)")
        return float(steps[0]["value"][1]) if steps else None

    def _start(self, started: ExitStack) -> None:
        started.enter_context(self.stack)
        super()._start(started)
        self.become_quiet()


def become_quiet(prometheus: Prometheus, ready: str, seconds: float, within: float) -> bool:
    """Wait until for some seconds a query had a result and no alert was pending or firing; return whether it came."""
    deadline, since = time.monotonic() + within, time.monotonic()
    while time.monotonic() < deadline:
        if prometheus.query("ALERTS") or not prometheus.query(ready):
            since = time.monotonic()
        elif time.monotonic() - since > seconds:
            return True
        time.sleep(0.5)
    return False
