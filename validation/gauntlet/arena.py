"""The place of faults: one training job after another on nodes with simulated GPUs, and the stack that monitors them.

A fault uses only the methods here. The arena knows no fault, and the stack does not know the arena.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import yaml
from testing import servers
from testing.job.device import GLOO
from testing.job.launch import RANKS, STARTS_WITHIN, JobError, TrainingJob
from testing.servers import Prometheus
from testing.stack import Stack, wait_for
from validation.gauntlet.node_job import node

from rankscope.record import layout
from rankscope_exporter.simulation import simulated_uuid

THRESHOLDS = Path(__file__).with_name("thresholds.json")
"""Limits of the exporter's findings for runs of a minute."""
GPUS = RANKS + 2  # two that belong to no rank
RUN = "train"
QUIET_FOR = 8.0  # seconds without an alert, pending or firing: longer than the rules' window
QUIET_WITHIN = 75.0  # an XID stays for 30 s
READY = f"count(rankscope_rank_up == 1) == {RANKS} and count(rate(rankscope_rank_steps_total[4s]) > 2) == {RANKS}"

SomeArena = TypeVar("SomeArena", bound="Arena")


class NodesJob(TrainingJob):
    """A job on several nodes: each rank has the name, the run directory and the GPUs of its node (node_job.py)."""

    script = "validation.gauntlet.node_job"

    def __init__(self, *arguments: Any, ranks_per_node: int = 1, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._ranks_per_node = ranks_per_node

    def environment(self) -> dict[str, str]:
        places = (divmod(rank, self._ranks_per_node) for rank in range(self.ranks))
        uuids = ",".join(simulated_uuid(gpu, self._machine + machine) for machine, gpu in places)
        return {
            **super().environment(),
            "CUDA_VISIBLE_DEVICES": uuids,
            "RANKS_PER_NODE": str(self._ranks_per_node),
        }


class Arena:
    """One node, or several. Their job starts and ends with the context. Nothing outside is changed.

    Their exporters are started by the stack that monitors the nodes.
    """

    stack: Stack
    job: TrainingJob
    """The job that runs now, or the last one."""

    def __init__(
        self,
        directory: Path,
        memory: Path,
        device: str = GLOO,
        run: str = RUN,
        machine: int = 0,
        exporter: Sequence[str] = ("rankscope_exporter",),
        thresholds: Path | None = THRESHOLDS,
        nodes: int = 1,
        **healthy: Any,
    ) -> None:
        """Prepare the nodes. `memory` is a tmpfs directory for records and for control files of ranks and GPUs.

        `directory` is for logs and databases, `exporter` is the module and arguments that run one, and `healthy` is
        how a healthy rank differs from the default behavior. `nodes` must divide the number of ranks.
        """
        self.run, self.nodes, self._ranks_per_node = run, nodes, RANKS // nodes
        self._memory, self._device, self._machine, self._healthy = memory, device, machine, healthy
        self._run_dir, self._claims = memory / "run", memory / "claims"
        self._changes, self._holders = memory / "gpus", memory / "holders"
        self._newer = self._run_dir / "newer.rank"
        flags = [f"--collector.findings.thresholds={thresholds}"] if thresholds else []
        self.exporters = [self._exporter(directory, index, exporter, flags) for index in range(nodes)]
        self.exporter = self.exporters[0]
        self._jobs = 0
        self._children: list[subprocess.Popen[bytes]] = []
        self.onset = 0.0
        """The unix time at which the first fault since `heal` began; 0 without one."""

    def __enter__(self: SomeArena) -> SomeArena:
        with ExitStack() as started:
            self._start(started)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    # For faults.

    def change_ranks(
        self, common: dict[str, Any] | None = None, ranks: dict[int, dict[str, Any]] | None = None
    ) -> None:
        """Change the behavior (testing/job/control.py) of all ranks, or of some. Raises JobError."""
        self._mark_onset(self.job.change(common, ranks))

    def change_gpu(self, gpu: int, **state: Any) -> None:
        """Change the state of a simulated GPU (simulation/changes.py)."""
        on, index = self._place(gpu)
        path = self._part(self._changes, on) / f"{index}.yml"
        path.with_suffix(".draft").write_text(yaml.safe_dump(state))
        path.with_suffix(".draft").rename(path)
        self._mark_onset(time.time())

    def hold_memory(self, gpu: int, memory: str) -> None:
        """Start a process that is no rank and holds memory of a GPU, such as "20 GiB"."""
        on, index = self._place(gpu)
        command = ["-m", "rankscope_exporter.simulation.hold", f"--dir={self._part(self._holders, on)}"]
        self._spawn(*command, f"--gpu={index}", f"--memory={memory}")

    def crowd(self, rank: int, hogs: int) -> None:
        """Pin a rank to one CPU, and start `hogs` busy processes on it."""
        cpu = {max(os.sched_getaffinity(0))}
        self.job.pin(rank, cpu)
        for _ in range(hogs):
            self._spawn("-c", f"import os; os.sched_setaffinity(0, {cpu})\nwhile True: pass")

    def start_job(self, **behavior: Any) -> None:
        """Start a new job under the same name instead of the current one, as a scheduler requeues a job."""
        if self._jobs:
            self.job.terminate()
        self._jobs += 1
        kind = partial(NodesJob, ranks_per_node=self._ranks_per_node) if self.nodes > 1 else TrainingJob
        self.job = kind(self._memory / f"job-{self._jobs}", self.run, self._run_dir, self._device, self._machine)
        self.job.start(**{**self._healthy, **behavior})

    def claim(self, gpu: int) -> None:
        """Allocate a GPU to a job of another user, as a scheduler does."""
        on, index = self._place(gpu)
        (self._part(self._claims, on) / str(index)).write_text("4711 alice notebook\n")
        self._mark_onset(time.time())

    def stop_exporter(self) -> None:
        self.exporter.stop()
        self._mark_onset(time.time())

    def publish_other_version(self) -> None:
        """Add a record with the header of another version to the run directory."""
        header = layout.HEADER.pack(layout.MAGIC, layout.VERSION + 1, layout.SIZE, layout.LAYOUT)
        self._newer.write_bytes(header.ljust(layout.SIZE, b"\0"))
        self._mark_onset(time.time())

    def wait_for_ranks(self) -> None:
        """Wait until all ranks have a record, perhaps without a step. Raises JobError."""
        began = f'rankscope_rank_start_timestamp_seconds{{run="{self.run}"}} > {self.job.started}'
        if not wait_for(lambda: len(self.stack.prometheus.query(began)) == RANKS, STARTS_WITHIN):
            raise JobError(f"no records of {RANKS} ranks")

    def begin(self) -> None:
        """Mark the onset of a fault that uses none of these methods."""
        self._mark_onset(time.time())

    def kill(self, rank: int) -> None:
        """Send SIGKILL to a rank; torchrun ends the job."""
        self._mark_onset(self.job.kill(rank))

    def labels_of(self, place: Mapping[str, str]) -> dict[str, str]:
        """Return the labels of a place, in which `gpu` is the number of a GPU of all nodes."""
        if self.nodes == 1 or "gpu" not in place:
            return {**place}
        on, index = self._place(int(place["gpu"]))
        return {**place, "gpu": str(index), "node": node(on)}

    # For the runner.

    def heal(self) -> float:
        """Undo everything, with a new job if this one has ended. Return when all was healthy again. Raises JobError."""
        self._stop_children()
        for path in (*self._changes.rglob("*.yml"), *filter(Path.is_file, self._claims.rglob("*"))):
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
            self._unpin_ranks()
        self.onset = 0.0
        return healed

    def _exporter(self, directory: Path, index: int, module: Sequence[str], flags: Sequence[str]) -> servers.Server:
        """Return the exporter of a node with the GPUs of its ranks and two others."""
        places = (directory, self._run_dir, self._claims, self._changes, self._holders)
        directory, run_dir, claims, changes, holders = (self._part(place, index) for place in places)
        control = {"processes_dir": str(holders), "changes_dir": str(changes)}
        gpus = {"gpus": self._ranks_per_node + GPUS - RANKS, "machine": self._machine + index, "follow_ranks": True}
        scenario = {**gpus, "model": {"nvlinks": 18}, **control}
        flags = [f"--collector.allocation.slurm-dir={claims}", *flags]
        flags += [f"--node={node(index)}"] if self.nodes > 1 else []
        return servers.exporter(directory, scenario, run_dir, flags=flags, module=module)

    def _part(self, directory: Path, index: int) -> Path:
        """Return a node's part of a directory: all of it if there is one node."""
        part = directory / node(index) if self.nodes > 1 else directory
        part.mkdir(parents=True, exist_ok=True)
        return part

    def _place(self, gpu: int) -> tuple[int, int]:
        """Return the node of a GPU, and its index there. Spare GPUs are on the last node."""
        index = min(gpu // self._ranks_per_node, self.nodes - 1)
        return index, gpu - index * self._ranks_per_node

    def _start(self, started: ExitStack) -> None:
        started.callback(self._end)
        self.start_job()
        self.job.wait_until_training()

    def _mark_onset(self, when: float) -> None:
        self.onset = self.onset or when

    def _spawn(self, *arguments: str) -> None:
        # A session of its own, as torchrun's ranks have: with sched_autogroup_enabled, the kernel divides CPUs among
        # sessions, and all of these processes together would get no more than one rank.
        self._children.append(subprocess.Popen([sys.executable, *arguments], start_new_session=True))
        self._mark_onset(time.time())

    def _stop_children(self) -> None:
        for child in self._children:
            child.terminate()
            child.wait()
        self._children.clear()

    def _unpin_ranks(self) -> None:
        for rank in range(RANKS):
            self.job.pin(rank, os.sched_getaffinity(0))

    def _end(self) -> None:
        self._stop_children()
        self.job.terminate()


class LoneArena(Arena):
    """An arena with its own stack, at the fast speed."""

    def __init__(self, directory: Path, memory: Path, device: str = GLOO, nodes: int = 1) -> None:
        super().__init__(directory, memory, device, nodes=nodes)
        flags = [f"--collector.findings.thresholds={THRESHOLDS}"]
        targets = [exporter.address for exporter in self.exporters]
        analyzers = [servers.analyzer(directory, targets, flags)] if nodes > 1 else []
        self.stack = Stack(directory, [*self.exporters, *analyzers])

    def become_quiet(self) -> bool:
        """Wait until all ranks train without an alert for a while. Return whether they do."""
        return become_quiet(self.stack.prometheus, READY, QUIET_FOR, QUIET_WITHIN)

    def step_seconds(self) -> float | None:
        """Return the mean step time of the last five seconds; None without steps."""
        steps = self.stack.prometheus.query("1 / max(rate(rankscope_rank_steps_total[5s]) > 0)")
        return float(steps[0]["value"][1]) if steps else None

    def _start(self, started: ExitStack) -> None:
        started.enter_context(self.stack)
        super()._start(started)
        self.become_quiet()


def become_quiet(prometheus: Prometheus, ready: str, seconds: float, within: float) -> bool:
    """Wait until a query has had a result, without an alert, for some seconds. Return whether that happened."""
    deadline, since = time.monotonic() + within, time.monotonic()
    while time.monotonic() < deadline:
        if prometheus.query("ALERTS") or not prometheus.query(ready):
            since = time.monotonic()
        elif time.monotonic() - since > seconds:
            return True
        time.sleep(0.5)
    return False
