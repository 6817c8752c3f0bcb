"""The exporter's captures: chooses which run is captured next, and starts the process that does it.

One run at a time, users in turn, and at most CPU_RATIO of a core on average. The process has idle priority and a
deadline; the diagnosis never waits for it.
"""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from threading import Lock
from typing import Any

from prometheus_client.core import Metric

from rankscope.cli.printable import printable
from rankscope_exporter.capture.gpu_state import Gpus, describe_gpus
from rankscope_exporter.capture.metrics import FAILED, FAILURES, LATEST, REASONS, WRITTEN
from rankscope_exporter.capture.request import Request, request_of
from rankscope_exporter.capture.settings import CaptureFlags
from rankscope_exporter.capture.source import UnavailableError
from rankscope_exporter.capture.stalls import Stalls
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.ranks.look import Look
from rankscope_exporter.ranks.principals import principal
from rankscope_exporter.report.runs import CaptureReport, Captures
from rankscope_exporter.worker import Worker

PROGRAM = (sys.executable, "-m", "rankscope_exporter.capture")
WITHIN = 180.0
"""Seconds after which a capture is given up."""
CPU_RATIO, BURST_SECONDS = 0.02, 6.0
"""The ratio of a core that captures may use on average, and the CPU seconds at once: those of five minutes."""
INTERVAL = 1.0
PRUNE_INTERVAL = 3600.0
"""Seconds after which captures that are too old are removed, also if there is no new one."""
USERS_LIMIT, ERROR_LIMIT = 256, 500
logger = logging.getLogger(__name__)


def _children_cpu() -> float:
    """Return the CPU seconds of child processes that have ended. The exporter has no others."""
    times = os.times()
    return times.children_user + times.children_system


class CaptureService:
    """The captures of one exporter."""

    name = "captures"

    def __init__(
        self,
        settings: CaptureFlags,
        node: str,
        monotonic: Callable[[], float] = time.monotonic,
        cpu_clock: Callable[[], float] = _children_cpu,
    ) -> None:
        """Set the flags, and the clocks. `cpu_clock` returns the CPU seconds of all child processes so far."""
        assert settings.capture_dir is not None
        self._settings, self._directory, self._node = settings, settings.capture_dir, node
        self._monotonic, self._cpu_clock = monotonic, cpu_clock
        self.on_capture: Callable[[Run, str], None] = lambda _run, _path: None
        """Called with the path of each capture, on the thread that captures."""
        self.gpus: Gpus | None = None
        """The node's GPUs, assigned after construction."""
        self.hanging: Callable[[], Collection[Run]] = tuple
        """Returns the runs that hang by the analyzer's verdict, assigned after construction."""
        self._stalls = Stalls()
        self._paid_at = monotonic() - BURST_SECONDS / CPU_RATIO
        """When CPU_RATIO of a core has earned what captures have used: none starts before."""
        self._lock = Lock()
        self._look: Look | None = None
        self._waiting: dict[Run, tuple[str, int]] = {}
        """The reason and the owner of each run that should be captured."""
        self._present: Mapping[tuple[str, str], tuple[str, float]] = {}
        """The label `owner` and the start of the runs that are shown now, by name and user ID."""
        self._served: dict[int, float] = {}
        """When a run of each user was last captured."""
        self._latest: dict[tuple[str, str], tuple[float, str]] = {}
        """The time and the path of the latest capture of each run, by name and user ID."""
        self._dumps: dict[Run, Sequence[Mapping[str, Any]]] = {}
        """The places of torch's dumps of captured runs."""
        self._written, self._failed = Counter[str](), Counter[str]()
        self._logged = ""
        self._process: subprocess.Popen[str] | None = None
        """The last process. It may wait for a file system without end, and then cannot be killed."""
        self._prune_at = monotonic()
        self.worker = Worker("capture", INTERVAL, self.capture_next, "cannot capture")

    def on_look(self, look: Look) -> None:
        """Take the runs that should be captured now, on the thread of the diagnosis."""
        owners = {rank.run: rank.owner for rank in look.scan.ranks}
        stalled = self._stalls.update(look, self.hanging())
        wanted = {run: (reason, owners[run]) for run, reason in stalled if run in owners}
        with self._lock:
            self._look, waiting = look, self._waiting | wanted
            self._waiting = {run: one for run, one in waiting.items() if self._stalls.is_wanted(run, one[0])}
            self._dumps = {run: places for run, places in self._dumps.items() if run in look.readings}
        present: dict[tuple[str, str], tuple[str, float]] = {}
        for rank in look.scan.ranks:
            began = rank.snapshot.unix(rank.snapshot["started_monotonic"])
            label, earliest = present.get((rank.run[0], str(rank.owner)), (rank.run[1], began))
            present[rank.run[0], str(rank.owner)] = label, min(began, earliest)
        self._present = present

    def capture_next(self) -> None:
        """Capture a run of the user who has waited for the longest time, if one waits and the budget permits it."""
        if self._monotonic() >= self._prune_at:
            self._prune_at = self._monotonic() + PRUNE_INTERVAL
            self._run(None)
        if self._monotonic() <= self._paid_at:
            return
        with self._lock:
            if not self._waiting or self._look is None:
                return
            run = min(self._waiting, key=lambda one: self._served.get(principal(self._waiting[one][1]), 0.0))
            reason, owner = self._waiting.pop(run)
            look, dumps = self._look, self._dumps.get(run, ())
        request = request_of(look, run, reason, self._node)
        self._served[principal(owner)] = self._monotonic()
        self._served = dict(sorted(self._served.items(), key=lambda item: -item[1])[:USERS_LIMIT])
        if request is None:
            return
        answer = self._run(replace(self._with_gpus(request), dumps=dumps))
        if answer is None:
            self._stalls.give_up(run)
            return
        with self._lock:
            self._dumps[run] = answer["dumps"]
        path = self._directory / str(answer["name"])
        self._written[request.reason] += 1
        logger.info("captured run=%s reason=%s path=%s seconds=%s bytes=%s",
                    request.title, request.reason, path, answer["seconds"], answer["bytes"])  # fmt: skip
        self.on_capture(run, str(path))

    def _with_gpus(self, request: Request) -> Request:
        """Add the state of the GPUs, which only the exporter reads."""
        if self.gpus is None:
            return request
        try:
            pids = [one.pid for one in request.ranks if one.pid]
            return replace(request, gpus=describe_gpus(self.gpus, {one.gpu for one in request.ranks}, pids))
        except UnavailableError as error:
            return replace(request, no_gpus=str(error))

    def _run(self, request: Request | None) -> Mapping[str, Any] | None:
        """Let the process capture, or without a request only prune and list. Return the figures; None if it fails."""
        job = {
            "request": request.as_json() if request else "",
            "directory": str(self._directory),
            "stacks": self._settings.capture_stacks,
            "bytes": self._settings.capture_mebibytes * 2**20,
            "days": self._settings.capture_days,
        }
        before = self._cpu_clock()
        try:
            answer: dict[str, Any] = json.loads(self._output(json.dumps(job)))
        except TimeoutError as error:
            answer = {"reason": "timeout", "error": str(error)}
        except (OSError, ValueError) as error:
            answer = {"reason": "error", "error": printable(str(error)[-ERROR_LIMIT:])}
        earliest = self._monotonic() - BURST_SECONDS / CPU_RATIO
        self._paid_at = max(self._paid_at, earliest) + (self._cpu_clock() - before) / CPU_RATIO
        if "reason" in answer and "name" not in answer:
            self._fail(answer["reason"], answer["error"])
            return None
        self._logged = ""
        self._show(answer["kept"])
        return answer if request else None

    def _output(self, job: str) -> str:
        """Return what the process prints. Raise ValueError with what it complains about, or TimeoutError."""
        if self._process and self._process.poll() is None:
            raise TimeoutError("the process of the last capture does not end")
        pipe = subprocess.PIPE
        process = subprocess.Popen(PROGRAM, stdin=pipe, stdout=pipe, stderr=pipe, text=True, cwd="/")  # noqa: S603 - ours
        self._process = process
        try:
            output, errors = process.communicate(job, WITHIN)
        except subprocess.TimeoutExpired as error:
            process.kill()  # not waited for
            raise TimeoutError(f"not ready after {WITHIN:.0f} s") from error
        if process.returncode:
            raise ValueError(errors or f"status {process.returncode}")
        return output

    def _fail(self, reason: str, error: str) -> None:
        self._failed[reason] += 1
        if reason != self._logged:
            logger.warning("cannot capture; retrying at the next standstill dir=%s error=%s", self._directory, error)
        self._logged = reason

    def _show(self, kept: Iterable[tuple[Any, ...]]) -> None:
        """Set the latest capture of each run from all of them, the newest first."""
        oldest_first = reversed([*kept])
        self._latest = {(run, owner): (at, str(self._directory / name)) for name, at, run, owner, *_ in oldest_first}

    def reports(self) -> Captures:
        """Return the latest capture of each run that is shown now, by its name and the label `owner`."""
        latest = self._latest
        return {
            (run[0], label): [CaptureReport(self._node, path=latest[run][1], at=latest[run][0])]
            for run, (label, began) in self._present.items()
            if run in latest and latest[run][0] >= began  # else it is of an earlier run of this name
        }

    def collect(self) -> Iterable[Metric]:
        """Return the captures that were written and failed, and the latest one of each run."""
        yield WRITTEN.family({(reason,): float(self._written[reason]) for reason in REASONS})
        yield FAILED.family({(reason,): float(self._failed[reason]) for reason in FAILURES})
        yield LATEST.family({(*run, one.node, one.path): one.at for run, (one,) in self.reports().items()})
