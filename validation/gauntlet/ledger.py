"""The ledger: a line of JSON a run, so that a gauntlet that was interrupted goes on where it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from testing.job.device import GLOO

Line = dict[str, Any]


class Ledger:
    """A file that only grows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path.exists() else []
        # The first lines were written when there was one kind of device.
        self.lines: list[Line] = [{"device": GLOO, **json.loads(line)} for line in lines]

    def has(self, run_id: str) -> bool:
        """Whether that run is done."""
        return any(line["id"] == run_id for line in self.lines)

    def add(self, line: Line) -> None:
        """One more, at once."""
        self.lines.append(line)
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
