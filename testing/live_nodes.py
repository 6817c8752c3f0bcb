"""A simulated run on several nodes in real time, with real exporters, and a proxy that disturbs the answers of each.

The records are those of ranks of this process. The exporters and analyzers are processes.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

from rankscope_exporter.node_facts.wire import Answer
from testing import servers
from testing.analyzed_job import Clock, ahead, on_clock
from testing.http_server import LoopbackServer, answers
from testing.simulated_job import Job, Plan, even
from testing.stack import wait_for

RANKS = 4
RUN = "live"
EXPORTER = ("rankscope_exporter",)
SINCE = "rankscope_finding_since_timestamp_seconds"
LOST = "rankscope_run_lost_gpu_seconds_total"
LAG = "rankscope_analyzer_lag_seconds"
TARGETS = "rankscope_analyzer_targets"
MISSING = "rankscope_analyzer_run_not_judged_info"
LOOK_INTERVAL, LOOK_TIMEOUT, PAUSE = 0.5, 5.0, 0.1
"""Seconds between two looks, of one of them, and of a part of a pause."""
Labels = frozenset[tuple[str, str]]
Change = Callable[[dict[str, Any]], object]
"""A change of an answer's JSON."""


class LiveTraining:
    """A thread that makes the steps of all ranks in real time."""

    def __init__(self, directories: Sequence[Path], ranks: int = RANKS, run: str = RUN) -> None:
        labels = {"run": run, "world_size": str(ranks), "group": f"0-{ranks - 1}", "pid": str(os.getpid())}
        self._job = Job.on_nodes(directories, ranks, time.monotonic(), **labels)
        self.plan: Plan = even
        self._phases: Mapping[int, str] = {}
        """The phases of ranks that hang."""
        self._paused_until = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._train, daemon=True)

    def __enter__(self) -> LiveTraining:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def hang(self, phases: Mapping[int, str]) -> None:
        """Let the ranks stay in these phases from now on."""
        self._phases = phases

    def pause(self, seconds: float) -> None:
        """Let all ranks wait for the last one, in a collective, for so long."""
        self._paused_until = time.monotonic() + seconds

    def _train(self) -> None:
        while not self._over.is_set() and not self._phases:
            if time.monotonic() < self._paused_until:
                for rank in self._job.ranks:
                    rank.spend("collective_wait", PAUSE)
            else:
                self._job.run(1, self.plan)
            self._over.wait(max(0.0, self._job.ranks[0].now - time.monotonic()))
        for number, phase in self._phases.items():
            self._job.ranks[number].enter(phase)


class Disturber(LoopbackServer):
    """A proxy of an exporter. It passes on what it is asked for, unless it is set to do something else."""

    def __init__(self, exporter: servers.Server) -> None:
        super().__init__(self._answer)
        self.address = f"127.0.0.1:{self.port}"
        self.delay = 0.0
        """Seconds of each answer."""
        self.is_gone = False
        """True to close each connection without an answer."""
        self.clock: Clock = ahead(0.0)
        """The node's monotonic clock."""
        self.change: Change | None = None
        self._url = exporter.url
        self._shown: dict[float, float] = {}
        """The true times of moments by those of the node's clock."""

    def _answer(self, request: BaseHTTPRequestHandler) -> None:
        time.sleep(self.delay)
        after = parse_qs(urlsplit(request.path).query).get("after")
        query = f"?after={self._shown.get(float(after[0]), 0.0)!r}" if after else ""
        try:
            with urlopen(f"{self._url}/api/v1/facts{query}", timeout=5) as answer:
                body = answer.read()
        except OSError:
            request.close_connection = True
            return
        if not self.is_gone:
            answers(self._changed(body))(request)

    def _changed(self, body: bytes) -> bytes:
        """Return the answer with the node's own boot and clock, and with the change."""
        true = Answer.model_validate_json(body)
        shown = on_clock(true, self.clock).model_copy(update={"boot": f"boot of {self.address}"})
        self._shown.update(zip((one.at for one in shown.moments), (one.at for one in true.moments), strict=True))
        document = shown.model_dump(mode="json", exclude_defaults=True)
        if self.change:
            self.change(document)
        return json.dumps(document).encode()


class Look(NamedTuple):
    """The metrics of an analyzer at one time. Times are unix seconds."""

    at: float
    since: Mapping[Labels, float]
    """The begin of each open finding."""
    lost: Mapping[Labels, float]
    """The counters of lost GPU seconds."""
    missing: frozenset[str]
    """The nodes that do not answer."""
    lag: float
    up: float
    """The number of targets that answer."""


class Watch:
    """A thread that reads an analyzer's metrics twice a second."""

    def __init__(self, analyzer: servers.Server) -> None:
        self._analyzer = analyzer
        self.looks: list[Look] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def since(self, at: float) -> Sequence[Look]:
        """Return what was seen after that time."""
        return [look for look in self.looks if look.at > at]

    def found(self, kind: str, within: float, at: float = 0.0) -> float | None:
        """Wait for a look after a time with a finding of this kind. Return its time; None without one."""
        wait_for(lambda: self._first(kind, at), within)
        return self._first(kind, at)

    def _first(self, kind: str, at: float) -> float | None:
        return next((look.at for look in self.since(at) if any(("kind", kind) in one for one in look.since)), None)

    def _look(self) -> None:
        while not self._over.wait(LOOK_INTERVAL):
            with suppress(OSError, HTTPException):  # it is stopped or down
                self.looks.append(look(self._analyzer.url))


def look(url: str) -> Look:
    """Read an analyzer's metrics. Raise OSError or HTTPException without an answer."""
    with urlopen(f"{url}/metrics", timeout=LOOK_TIMEOUT) as answer:
        text = answer.read().decode()
    values: dict[str, dict[Labels, float]] = defaultdict(dict)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name][frozenset(sample.labels.items())] = sample.value
    missing = [dict(labels) for labels in values[MISSING]]
    nodes = frozenset(labels["node"] for labels in missing if labels["reason"] == "node_missing")
    up = sum(value for labels, value in values[TARGETS].items() if ("state", "up") in labels)
    return Look(time.time(), values[SINCE], values[LOST], nodes, max(values[LAG].values(), default=0.0), up)


class LiveNodes:
    """The run, its nodes, and analyzers that ask them. Stops all of it at the end of the `with` statement."""

    def __init__(
        self,
        directory: Path,
        memory: Path,
        *,
        nodes: int = 2,
        analyzers: int = 1,
        has_state: bool = True,
        last: Sequence[str] = EXPORTER,
    ) -> None:
        """Set a directory for logs and states, and one on tmpfs for the records.

        `last` is the module that runs the last node's exporter, with its own arguments.
        """
        run_dirs = [_made(memory / f"node-{number}") for number in range(nodes)]
        self.training = LiveTraining(run_dirs)
        self.exporters = [
            servers.exporter(
                directory, "1", path, path.name, [f"--node={path.name}"], last if path == run_dirs[-1] else EXPORTER
            )
            for path in run_dirs
        ]
        self.disturbers = [Disturber(exporter) for exporter in self.exporters]
        targets = [one.address for one in self.disturbers]
        self.analyzers: list[servers.Server] = []
        for number in range(analyzers):
            flags = [f"--state-dir={_made(directory / f'state-{number}')}"] if has_state else []
            self.analyzers.append(servers.analyzer(directory, targets, flags, f"analyzer-{number}"))
        self.watches = [Watch(analyzer) for analyzer in self.analyzers]

    def __enter__(self) -> LiveNodes:
        with ExitStack() as started:
            started.enter_context(self.training)
            every: list[AbstractContextManager[object]] = [*self.disturbers, *self.exporters, *self.analyzers]
            for each in (*every, *self.watches):
                started.enter_context(each)
            self._started = started.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._started.close()


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory
