"""Processes that hold a simulated GPU's memory: each announces itself with a file `<pid>.yml` in a directory.

    gpu: 2
    memory: 20 GiB

The simulated driver lists it on that GPU while the process lives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from rankscope_exporter.simulation.scenario import parse_process
from rankscope_exporter.simulation.timeline import SimulatedProcess
from rankscope_exporter.simulation.values import ScenarioError

SUFFIX = ".yml"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Holder:
    """A process that announced itself, and on which GPU."""

    gpu: int
    process: SimulatedProcess


class HolderDirectory:
    """The announcements in a directory, which need not exist."""

    def __init__(self, directory: Path | None) -> None:
        self._directory = directory
        # A file is written once, under another name first: what it says is read once for each time of writing.
        self._read: dict[tuple[str, int], Holder | None] = {}

    def on(self, gpu: int) -> list[SimulatedProcess]:
        """Processes alive now that hold memory of this GPU."""
        holders = {key: self._holder(key) for key in self._announcements()}
        self._read = holders
        present = [holder.process for holder in holders.values() if holder and holder.gpu == gpu]
        return [process for process in present if is_alive(process.pid)]

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
        except FileNotFoundError:
            return None
        except (OSError, ValueError, yaml.YAMLError) as error:
            logger.warning("%s announces no process: %s", path, error)
            return None


@contextmanager
def announced(directory: Path, gpu: int, memory: str) -> Iterator[Path]:
    """This process holds so much memory (such as "20 GiB") of that GPU, until the context is left."""
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
    """What a process announced. Raises ScenarioError, YAMLError, OSError."""
    values = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict) or not isinstance(values.get("gpu"), int):
        raise ScenarioError("gpu: expected the index of a GPU")
    rest = {key: value for key, value in values.items() if key != "gpu"}
    return Holder(values["gpu"], parse_process(path.name, {**rest, "pid": int(path.stem)}))


def is_alive(pid: int) -> bool:
    """Whether a process has this id, anybody's."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
