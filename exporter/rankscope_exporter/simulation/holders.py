"""Processes that hold a simulated GPU's memory. Each announces itself with a file `<pid>.yml` in a directory.

    gpu: 2
    memory: 20 GiB

The simulated driver lists the process on that GPU while it is alive.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from rankscope.record.process_stat import exists
from rankscope_exporter.documents import DocumentError, read_document
from rankscope_exporter.simulation.scenario import parse_process
from rankscope_exporter.simulation.timeline import SimulatedProcess
from rankscope_exporter.simulation.values import ScenarioError

SUFFIX = ".yml"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A process that announced itself, and its GPU."""

    gpu: int
    process: SimulatedProcess


class HolderDirectory:
    """Announcements in a directory, which may be missing."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        # Files are replaced atomically, so each version is read only once.
        self._read: dict[tuple[str, int], Holder | None] = {}

    def find(self, gpu: int) -> list[SimulatedProcess]:
        """Return the living processes that hold memory of this GPU."""
        holders = {key: self._holder(key) for key in self._announcements()}
        self._read = holders
        present = [holder.process for holder in holders.values() if holder and holder.gpu == gpu]
        return [process for process in present if exists(process.pid)]

    def _announcements(self) -> Iterator[tuple[str, int]]:
        if self._directory is None or not self._directory.is_dir():
            return
        for entry in os.scandir(self._directory):
            if entry.name.endswith(SUFFIX) and entry.name.removesuffix(SUFFIX).isdecimal():
                try:
                    yield entry.name, entry.stat().st_mtime_ns
                except FileNotFoundError:
                    continue

    def _holder(self, key: tuple[str, int]) -> Holder | None:
        if key in self._read:
            return self._read[key]
        assert self._directory is not None
        path = self._directory / key[0]
        try:
            return read_announcement(path)
        except DocumentError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                logger.warning("ignored %s", error)
            return None


@contextmanager
def announced(directory: Path, gpu: int, memory: str) -> Iterator[Path]:
    """Announce that this process holds this much memory (such as "20 GiB") of a GPU, within the context."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"{os.getpid()}{SUFFIX}"
    draft = path.with_suffix(".draft")
    draft.write_text(f"gpu: {gpu}\nmemory: {memory}\n", encoding="utf-8")
    draft.rename(path)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def read_announcement(path: Path) -> Holder:
    """Read a process's announcement. Raises DocumentError."""
    return read_document(path, "YAML", yaml.safe_load, lambda values: _holder(path, values))


def _holder(path: Path, values: Any) -> Holder:
    if not isinstance(values, dict) or not isinstance(values.get("gpu"), int):
        raise ScenarioError("gpu: expected the index of a GPU")
    rest = {key: value for key, value in values.items() if key != "gpu"}
    return Holder(values["gpu"], parse_process(path.name, {**rest, "pid": int(path.stem)}))
