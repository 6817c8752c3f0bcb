"""Real trainings on the GPU, each healthy or with one fault: what the exporter finds, and after how many seconds.

The GPU computes for one training at a time; the two that hang run at the same time. Ranks of one training share the
GPU and use gloo, so that transfer is slow, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any

from testing.servers import Server, free_port
from validation.gpu_check import dry_run
from validation.gpu_check.exporter import running
from validation.gpu_check.report import Check, ok_if

EVERY = 0.25  # seconds between readings
Found = tuple[str, str, int | None]
"""Kind, cause and rank of a finding."""
START_UP = 60.0  # seconds until the first step: compilation needs some
HANG_WITHIN = 150.0


@dataclass(frozen=True)
class Case:
    """A function of trainings.py and what must be found: kind, cause and rank, empty or None if it is open."""

    training: str
    finding: Found | None = None
    seconds: float = 40.0
    ranks: int = 1

    def is_right(self, found: Found) -> bool:
        """Return whether this is the finding."""
        if self.finding is None:
            return False
        kind, cause, rank = self.finding
        return found[0] == kind and cause in ("", found[1]) and rank in (None, found[2])

    def may_be(self, found: Found) -> bool:
        """Return whether this is the finding, or true as well."""
        return self.is_right(found) or (self.ranks > 1 and found[0] == "network")


HANGS = tuple(Case(training, ("hang", "", 1), HANG_WITHIN, ranks=2) for training in ("stuck_rank", "stuck_early"))
CASES = (
    Case("healthy", seconds=20),
    Case("product", seconds=10),
    Case("transformers_trainer", seconds=20),
    Case("lightning", seconds=20),
    Case("compiled", seconds=15),
    Case("graphed", seconds=15),
    Case("slow_preprocessing", ("data", "cpu", None)),
    Case("slow_storage", ("data", "io", None)),
    Case("pageable_copies", ("copies", "", None)),
    Case("gradient_norms", ("device_reads", "", None)),
    Case("tiny_kernels", ("launch", "", None)),
    Case("slow_host", ("straggler", "other", 1), ranks=3),
    Case("slow_device", ("straggler", "forward", 1), ranks=3),
    Case("out_of_memory", ("crash", "exception", 0)),
    Case("device_assertion", ("crash", "exception", 0)),
)
# What differed on the first real GPU, and was mended.
AGAIN = ("healthy", "product", "slow_preprocessing", "pageable_copies", "gradient_norms", "slow_device")
AGAIN_FOR = 25.0  # seconds: each was found after less than ten, where it was found
UNDER_POWER_LIMIT = ("healthy", "product")
"""Trainings that lower the clock by the default power limit, which is no loss."""
THROTTLING_MOST = 0.01


@dataclass
class Run:
    """A training that is started, and what the exporter has said of it."""

    case: Case
    device: str
    directory: Path
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    state: dict[str, Any] = field(default_factory=dict)
    found: dict[Found, tuple[float, dict[str, Any]]] = field(default_factory=dict)
    released: float = 0.0
    began: float = 0.0
    """When it was seen to make steps, like `released` by the monotonic clock."""

    def start(self) -> None:
        """Start the ranks, which import and wait."""
        environment = {
            **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "RANKSCOPE_RUN": self.name,
            "WORLD_SIZE": str(self.case.ranks), "RANKSCOPE_RUN_DIR": str(self.directory),
            "LOCAL_WORLD_SIZE": str(self.case.ranks),
        }  # fmt: skip
        command = [sys.executable, "-m", "validation.gpu_check.trainings", self.case.training, self.device]
        for rank in range(self.case.ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            with self.output(rank).open("wb") as output:
                process = subprocess.Popen(
                    [*command, str(self.case.seconds)],
                    env=environment | own, stdin=subprocess.PIPE, stdout=output, stderr=output,
                )  # fmt: skip
            self.processes.append(process)

    @property
    def name(self) -> str:
        return self.case.training

    def output(self, rank: int) -> Path:
        return self.directory.parent / f"{self.name}.{rank}.log"

    def release(self) -> None:
        """Let the ranks train."""
        self.released = time.monotonic()
        for process in self.processes:
            stdin: IO[bytes] | None = process.stdin
            assert stdin
            with suppress(BrokenPipeError):
                stdin.write(b"\n")
                stdin.close()

    def look(self, exporter: Server) -> None:
        """Read what the exporter says of this run."""
        now = time.monotonic()
        with suppress(OSError), urllib.request.urlopen(f"{exporter.url}/api/v1/runs", timeout=5) as answer:
            for run in json.load(answer)["runs"]:
                if run["run"] == self.name:
                    self._note(run, now)

    def _note(self, run: dict[str, Any], now: float) -> None:
        self.state = run if run["living"] else self.state
        if not self.began and any(rank["steps"] for rank in run["ranks"]):
            self.began = now
        for one in run["findings"]:
            self.found.setdefault((one["kind"], one["cause"], one["rank"]), (now, one))

    def wait(self, exporter: Server) -> None:
        """Wait until the finding is there, the time is over or the ranks have ended."""
        until = time.monotonic() + START_UP
        ended: float | None = None
        while time.monotonic() < until and not self._is_found():
            time.sleep(EVERY)
            was = self.began
            self.look(exporter)
            if self.began and not was:
                until = self.began + self.case.seconds
            if all(process.poll() is not None for process in self.processes):
                ended = ended or time.monotonic()
                until = min(until, ended + 3.0)

    def wait_since_release(self, exporter: Server) -> None:
        """Wait until the finding is there, or a hang should long have been found."""
        while time.monotonic() < self.released + dry_run.shortened(HANG_WITHIN) and not self._is_found():
            time.sleep(EVERY)
            self.look(exporter)

    def _is_found(self) -> bool:
        return any(map(self.case.is_right, self.found))

    def stop(self) -> None:
        """Wait for the ranks of a healthy training, and kill those of the others."""
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(20.0 if self.case.finding is None else 0.0)
            process.kill()
            process.wait()

    def checks(self) -> Iterator[Check]:
        """Yield whether the finding is right, and where the time went."""
        expected = "none" if self.case.finding is None else words(self.case.finding)
        began = self.began or self.released
        found = "; ".join(f"{words(key)} after {at - began:.1f} s" for key, (at, _) in self.found.items())
        is_right = self._is_found() and all(map(self.case.may_be, self.found))
        if self.case.finding is None:
            is_right = not self.found and self.steps() is not None
        note = " / ".join(one["sentence"] for _, one in self.found.values())
        pending = " / ".join(one["sentence"] for one in self.state.get("pending", ()))
        yield Check(f"{self.name}: finding", ok_if(is_right), found or "none", expected, note or f"pending: {pending}")
        lost = self.state.get("lost") or {}
        shown = ", ".join(f"{name} {ratio:.1%}" for name, ratio in lost.items())
        unjudged = self.state.get("not_judged_reason") or ""
        yield Check(f"{self.name}: useful", "measured", f"{self.state.get('useful_ratio')}", unjudged, f"lost: {shown}")
        for rank in self.state.get("ranks", ()):
            phases = ", ".join(f"{name} {ratio:.1%}" for name, ratio in rank["phases"].items() if ratio)
            seen = f"{rank['clock']}: {phases}"
            note = f"{rank['steps']} steps, marked by {rank['step_marker']}; {self.state['step_seconds']} s a step"
            yield Check(f"{self.name}: rank {rank['rank']}", "measured", seen, note=note)
        if self.case.finding is None:
            yield self._ended()
        if self.name in UNDER_POWER_LIMIT:
            ratio = float(lost.get("throttling") or 0.0)
            yield Check(
                f"{self.name}: throttling", ok_if(ratio <= THROTTLING_MOST), f"{ratio:.1%}", f"{THROTTLING_MOST:.0%}"
            )

    def steps(self, rank: int = 0) -> int | None:
        """Return the steps that a rank has counted itself; None if it failed."""
        lines = self.output(rank).read_text(errors="replace").splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("steps ")), None)

    def _ended(self) -> Check:
        steps = self.steps()
        end = "" if steps is not None else self.output(0).read_text(errors="replace")[-500:]
        return Check(f"{self.name}: its own steps", "failed" if end else "measured", str(steps), note=end)


def words(key: Found) -> str:
    kind, cause, rank = key
    return kind + (f" ({cause})" if cause else "") + ("" if rank is None else f" of rank {rank}")


def check(argument: str = "", device: str = dry_run.DEVICE, *flags: str) -> Iterator[Check]:
    """Yield the checks of each case, or with `again` of those that differed before."""
    is_again = argument == "again"
    selected = [
        replace(case, seconds=dry_run.shortened(min(case.seconds, AGAIN_FOR) if is_again else case.seconds))
        for case in CASES
        if not is_again or case.training in AGAIN
    ]
    with running(flags) as (exporter, run_dir), ExitStack() as stack:
        hangs, runs = ([Run(case, device, run_dir) for case in cases] for cases in (HANGS, selected))
        for run in (*hangs, *runs):
            stack.callback(run.stop)
        for run in (*hangs, runs[0]):
            run.start()
        for hang in hangs:
            hang.release()
        for run, following in zip(runs, [*runs[1:], None], strict=True):
            run.release()
            if following:
                following.start()
            run.wait(exporter)
            run.stop()
            for hang in hangs:
                hang.look(exporter)
            yield from run.checks()
        for hang in hangs:
            hang.wait_since_release(exporter)
            yield from hang.checks()
