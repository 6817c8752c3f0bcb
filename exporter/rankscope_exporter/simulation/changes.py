"""What simulated GPUs are told while they run: a file `<index>.yml` a GPU in the scenario's `changes_dir`.

    {busy: 0.3, throttle: [sw_thermal_slowdown], xid: 79}

That is an entry of a timeline without its time. It holds instead of the timeline from when it is seen until the file is
changed or removed; what it does not say is as in a scenario that says nothing. An XID happens once for each writing.
Write under another name and rename, so that no half is read.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import yaml

from rankscope_exporter.simulation.scenario import parse_change
from rankscope_exporter.simulation.timeline import State, Timeline
from rankscope_exporter.worker import Worker

POLLED_EVERY = 0.1  # seconds

logger = logging.getLogger(__name__)


class Changes(Worker):
    """A thread that looks at the files and changes the timelines. The directory need not exist."""

    def __init__(self, directory: Path, timelines: Sequence[Timeline], now: Callable[[], float]) -> None:
        super().__init__("simulated-changes", POLLED_EVERY, self.poll, "the simulated GPUs cannot be changed")
        self._paths = [directory / f"{index}.yml" for index in range(len(timelines))]
        self._timelines = timelines
        self._now = now
        self._seen: dict[Path, int | None] = {}

    def poll(self) -> None:
        """One look at all files. A bad one is reported once, and changes nothing."""
        for path, timeline in zip(self._paths, self._timelines, strict=True):
            written = _written(path)
            if written == self._seen.get(path):
                continue
            self._seen[path] = written
            try:
                state, xid = _read(path) if written is not None else (State(), None)
            except (OSError, ValueError, yaml.YAMLError) as error:
                logger.warning("%s changes nothing: %s", path, error)
            else:
                timeline.change(self._now(), state, xid)


def _written(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> tuple[State, int | None]:
    return parse_change(path.name, yaml.safe_load(path.read_text(encoding="utf-8")))
