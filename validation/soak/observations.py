"""What a soak has seen: a line of JSON for each thing, written at once, and read again for the report."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Observation = dict[str, Any]


class Observations:
    """A file that only grows; several threads write."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()

    def add(self, kind: str, **what: Any) -> None:
        """One more, with the time."""
        line = json.dumps({"kind": kind, "time": round(time.time(), 3), **what})
        with self._lock, self._path.open("a") as file:
            file.write(line + "\n")


def read(path: Path) -> dict[str, list[Observation]]:
    """All of them by kind, in their order."""
    found: dict[str, list[Observation]] = {}
    for line in _lines(path):
        found.setdefault(line["kind"], []).append(line)
    return found


def _lines(path: Path) -> Iterator[Observation]:
    for line in path.read_text().splitlines():
        yield json.loads(line)
