"""A soak: two jobs with faults, one stack that is disturbed, and a ledger of all observations."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from deploy.prometheus import shipped
from testing.job.launch import JobError
from testing.processes import resident_bytes
from testing.report import Ledger
from testing.servers import Server
from testing.stack import Stack
from testing.webhook import Notification
from validation.soak import plan
from validation.soak.history import history
from validation.soak.node import CAN_MOUNT, Node
from validation.soak.plan import Disturbance, Slot

LOOKS_EVERY = 60.0  # seconds
ENDS_WITHIN = 120.0  # enough to start a job again
NEEDS_ROOT = "mounting a file system needs root"


class Soak:
    """The jobs and servers of a soak, as a context manager."""

    def __init__(self, directory: Path, memory: Path, ledger: Ledger) -> None:
        self._ledger = ledger
        self._memory = memory
        self._nodes = {run: Node(_mkdir(directory / run), _mkdir(memory / run), run) for run in plan.RUNS}
        targets = [node.proxy.address for node in self._nodes.values()]
        exporters = [node.exporter for node in self._nodes.values()]
        self._stack = Stack(directory, exporters, self._record, speed=shipped, targets=targets)
        self._over = threading.Event()
        self._threads: list[threading.Thread] = []
        self._began = 0.0

    def __enter__(self) -> Soak:
        with ExitStack() as started:
            for node in self._nodes.values():
                node.mount(started)
                started.enter_context(node.proxy)
            started.enter_context(self._stack)
            for node in self._nodes.values():
                node.stack = self._stack
                started.enter_context(node)
            started.callback(self._finish)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()

    def run(self, faults: Sequence[Slot], chaos: Sequence[Disturbance], seconds: float) -> None:
        """Carry out the plan, then record Prometheus' history."""
        self._began = time.time()
        instances = {run: node.proxy.address for run, node in self._nodes.items()}
        self._ledger.observe("begin", instances=instances, load=os.getloadavg()[0])
        for run in plan.RUNS:
            self._start_thread(self._go_through, [slot for slot in faults if slot.run == run], self._inject)
        self._start_thread(self._go_through, chaos, self._disturb)
        self._start_thread(self._look)
        self._sleep_until(seconds)
        self._finish()
        self._ledger.observe("end", load=os.getloadavg()[0])
        self._ledger.observe("history", **history(self._stack.prometheus, time.time() - self._began))

    def _start_thread(self, do: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=do, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _finish(self) -> None:
        """End all waits at once: start servers that are down, and heal faults."""
        self._over.set()
        for thread in self._threads:
            thread.join(ENDS_WITHIN)

    def _go_through(self, planned: Iterable[Slot | Disturbance], do: Callable[[Any], None]) -> None:
        for item in planned:
            if self._sleep_until(item.at):
                return
            try:
                do(item)
            except Exception as error:  # the plan goes on, and the report has the error
                self._ledger.observe("error", what=asdict(item), error=f"{type(error).__name__}: {error}")

    def _inject(self, slot: Slot) -> None:
        node = self._nodes[slot.run]
        if slot.case is None:
            self._start_in_a_full_directory(node, slot)
            return
        try:
            slot.case.inject(node, slot.target)
        except JobError:
            node.heal()
            raise
        onset = node.onset
        self._ledger.observe("fault", **self._names(slot), onset=onset, place=slot.case.place(slot.target))
        self._sleep_until(slot.until)
        node.heal()
        self._ledger.observe("healed", **self._names(slot), onset=onset)

    def _start_in_a_full_directory(self, node: Node, slot: Slot) -> None:
        if not CAN_MOUNT:
            self._ledger.observe("left out", what=slot.name, reason=NEEDS_ROOT)
            return
        free = node.fill(slot.name)
        began = time.time()
        node.start_job()
        node.job.wait_until_training()
        step = node.job.step()
        self._sleep_until(slot.until)
        trained = node.job.is_running() and node.job.step() > step
        node.empty(slot.name)
        node.start_job()
        node.job.wait_until_training()
        self._ledger.observe("full at start", run=slot.run, began=began, bytes=free, trained=trained)

    def _disturb(self, item: Disturbance) -> None:
        if item.act == plan.FULL and not CAN_MOUNT:
            self._ledger.observe("left out", what=item.act, reason=NEEDS_ROOT)
            return
        firing = self._firing()
        began = time.time()
        self._do(item)
        self._ledger.observe("chaos", **asdict(item), began=began, ended=time.time(), firing=firing)

    def _do(self, what: Disturbance) -> None:
        server = self._server(what)
        node = self._nodes.get(what.run)
        until = what.at + what.seconds
        if what.act in (plan.KILL, plan.RESTART):
            server.kill() if what.act == plan.KILL else server.stop()
            self._sleep_until(until)
            server.start()
        elif what.act == plan.STOP:
            server.signal(signal.SIGSTOP)
            self._sleep_until(until)
            server.signal(signal.SIGCONT)
        elif node and what.act == plan.SLOW:
            node.proxy.delay = what.amount
            self._sleep_until(until)
            node.proxy.delay = 0.0
        elif node and what.act == plan.FULL:
            node.fill(what.act)
            self._sleep_until(until)
            node.empty(what.act)
        elif node and what.act == plan.CLOCK:
            node.set_clock(what.amount)
            self._sleep_until(until)
            node.set_clock(0.0)

    def _server(self, what: Disturbance) -> Server:
        if what.run:
            return self._nodes[what.run].exporter
        return self._stack.prometheus if what.target == plan.PROMETHEUS else self._stack.alertmanager

    def _look(self) -> None:
        while not self._over.wait(LOOKS_EVERY):
            for server in (*self._stack.exporters, self._stack.prometheus, self._stack.alertmanager):
                pid = server.pid
                with suppress(OSError):  # it is being killed
                    if pid:
                        self._ledger.observe("memory", server=server.name, pid=pid, bytes=resident_bytes(pid))
            self._ledger.observe("load", load=os.getloadavg(), pressure=cpu_pressure())

    def _record(self, notification: Notification) -> None:
        self._ledger.observe("notification", **asdict(notification))

    def _firing(self) -> list[dict[str, str]]:
        found = self._stack.prometheus.query('ALERTS{alertstate="firing"}')
        return [series["metric"] for series in found]

    def _names(self, slot: Slot) -> dict[str, Any]:
        title = slot.case.title if slot.case else slot.name
        return {"run": slot.run, "name": slot.name, "title": title}

    def _sleep_until(self, at: float) -> bool:
        """Wait until `at` seconds after the start. Return whether the soak is over."""
        return self._over.wait(max(0.0, self._began + at - time.time()))


def cpu_pressure() -> float | None:
    """Return the ratio of the last minute in which a task waited for a CPU; None if the kernel does not report it."""
    path = Path("/proc/pressure/cpu")
    if not path.exists():
        return None
    return float(path.read_text().split("avg60=")[1].split()[0]) / 100


def _mkdir(directory: Path) -> Path:
    directory.mkdir()
    return directory
