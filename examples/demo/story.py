"""The demo's story: a real job trains, rank 0 starts to do extra work, then the job ends but a GPU's memory stays held.

Real: the torchrun job and its data, the exporter, Prometheus, Alertmanager, the notifications. Simulated: the four
GPUs, below the real NVML calls.
"""

from __future__ import annotations

import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

from testing import servers
from testing.stack import Stack, wait_for
from testing.webhook import Notification

from examples.demo.job import Job

RUN = "digits"
GPUS = 4
HELD_GPU = 2
HELD_MEMORY = "20 GiB"
RANK_ZERO_FAULT = "RankscopeRankZeroLagging"
HELD_MEMORY_FAULT = "RankscopeGpuMemoryHeldIdle"
JOB_STARTS_WITHIN = 90.0  # seconds; mostly for importing torch four times on a slow machine
QUIET = 10.0  # seconds; a false alarm takes as long as a notification: 7 s
NOTIFIED_WITHIN = 30.0  # the demo's bound
RECOVERED_WITHIN = 30.0
SILENCE_AFTERWARDS = 8.0


class Demo:
    """One run of the demo. The stack and the job end with the context."""

    def __init__(self, directory: Path, run_dir: Path) -> None:
        self._holders = directory / "holders"
        self._holders.mkdir()
        scenario = {"gpus": GPUS, "follow_ranks": True, "processes_dir": str(self._holders)}
        exporter = servers.exporter(directory, scenario, run_dir)
        self.stack = Stack(directory, [exporter], _say_notification, _say_started)
        self.job = Job(directory, RUN, run_dir)
        self.delays: dict[str, float | None] = {}

    def __enter__(self) -> Demo:
        with ExitStack() as started:
            started.enter_context(self.stack)
            started.callback(self.job.kill)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def run(self) -> None:
        """Run all parts of the story."""
        self.start_training()
        say(f"all ranks are training; no alert should fire for {QUIET:.0f} s")
        time.sleep(QUIET)
        self.make_rank_zero_lag()
        self.stop_rank_zero_lagging()
        self.finish_with_memory_held()
        time.sleep(SILENCE_AFTERWARDS)

    def start_training(self) -> None:
        """Start the job and wait until every rank has made steps. Raises RuntimeError if they do not."""
        say(f"starting a training job: {GPUS} ranks under torchrun, real images of digits, an unchanged script")
        self.job.start()
        self._wait_until_training()

    def make_rank_zero_lag(self) -> None:
        """Inject the first fault, and wait for its notification."""
        say("FAULT 1: rank 0 starts to log histograms after every step, as many scripts do")
        self.job.begin_extra_work()
        self._await(RANK_ZERO_FAULT)

    def stop_rank_zero_lagging(self) -> None:
        """End the first fault, and wait for the resolved notification."""
        self.job.end_extra_work()
        say("rank 0 stops logging; the alert should resolve")
        wait_for(lambda: any(not n.is_firing for n in self.stack.webhook.notifications), RECOVERED_WITHIN)

    def finish_with_memory_held(self) -> None:
        """End the job with the second fault, and wait for its notification."""
        say(f"FAULT 2: the job finishes, but a helper process keeps {HELD_MEMORY} of GPU {HELD_GPU}")
        self._hold_memory()
        say(f"the job has ended: {self.job.finish()}")
        self._await(HELD_MEMORY_FAULT)

    def verdict(self) -> list[str]:
        """Return the problems, one line each; empty if everything was as expected."""
        expected = {
            RANK_ZERO_FAULT: {"rank": "0", "run": RUN, "cause": "other"},
            HELD_MEMORY_FAULT: {"gpu": str(HELD_GPU)},
        }
        wrong = []
        for notification in self.stack.webhook.firing():
            labels = expected.get(notification.name)
            if labels is None or not labels.items() <= notification.labels.items():
                wrong.append(f"notified without a fault of the demo: {notification.line()} {notification.labels}")
        for name, delay in self.delays.items():
            if delay is None or delay > NOTIFIED_WITHIN:
                wrong.append(f"not notified within {NOTIFIED_WITHIN:.0f} s: {name}")
        return wrong

    def _wait_until_training(self) -> None:
        def trains() -> bool:
            if not self.job.is_running():
                raise RuntimeError(f"the training job did not start:\n{self.job.output.read_text(errors='replace')}")
            return len(self.stack.prometheus.query("rankscope_rank_steps_total > 1")) == GPUS

        if not wait_for(trains, JOB_STARTS_WITHIN):
            raise RuntimeError(f"the training job made no step within {JOB_STARTS_WITHIN:.0f} s")

    def _hold_memory(self) -> None:
        command = [sys.executable, "-m", "rankscope_exporter.simulation.hold", f"--dir={self._holders}"]
        command += [f"--gpu={HELD_GPU}", f"--memory={HELD_MEMORY}"]
        holder = subprocess.Popen(command)  # noqa: S603 - our own module
        self._started.callback(holder.wait)
        self._started.callback(holder.terminate)

    def _await(self, name: str) -> None:
        began = time.time()
        notification = self.stack.notified(name, NOTIFIED_WITHIN + 5, since=began)
        self.delays[name] = notification.received - began if notification else None


def _say_notification(notification: Notification) -> None:
    say(f"    >>> {notification.line()}")


def _say_started(server: servers.Server) -> None:
    say(f"{server.name:12}  {server.url}")


def say(text: str) -> None:
    """Print a line with the time, unbuffered."""
    print(f"{time.strftime('%H:%M:%S')}  {text}" if not text.startswith(" ") else text, flush=True)
