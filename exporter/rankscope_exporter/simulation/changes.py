"""Changes to simulated GPUs at run time: one file `<index>.yml` per GPU in the scenario's `changes_dir`.

    {busy: 0.3, throttle: [sw_thermal_slowdown], xid: 79}

The file contains a timeline entry without a time. It replaces the timeline until the file is changed or removed;
omitted keys have their defaults. An XID occurs once per write. Write to another name and rename the file, so that it is
never read half-written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import yaml

from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.simulation.scenario import parse_change
from rankscope_exporter.simulation.timeline import State, Timeline
from rankscope_exporter.worker import Worker

POLL_INTERVAL = 0.1  # seconds

logger = logging.getLogger(__name__)


class Changes(Worker):
    """A thread that polls the files and changes the timelines. The directory may be missing."""

    def __init__(self, directory: Path, timelines: Sequence[Timeline], now: Callable[[], float]) -> None:
        super().__init__("simulated-changes", POLL_INTERVAL, self.poll, "changing the simulated GPUs failed")
        self._paths = [directory / f"{index}.yml" for index in range(len(timelines))]
        self._timelines = timelines
        self._now = now
        self._seen: dict[Path, int | None] = {}

    def poll(self) -> None:
        """Check all files once. An invalid file is logged once and ignored."""
        for path, timeline in zip(self._paths, self._timelines, strict=True):
            written = _write_time(path)
            if written == self._seen.get(path):
                continue
            self._seen[path] = written
            try:
                state, xid = _read(path) if written is not None else (State(), None)
            except DocumentError as error:
                logger.warning("ignored %s", error)
            else:
                timeline.change(self._now(), state, xid)


def _write_time(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return None


def _read(path: Path) -> tuple[State, int | None]:
    return read_document(path, "YAML", yaml.safe_load, partial(parse_change, path.name))
