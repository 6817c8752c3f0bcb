"""The journal in the state directory: findings and runs that have ended, as lines of JSON.

Each owner has a file, so that no user's runs displace another's. A full file replaces the previous one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rankscope_exporter.ledger.owner_files import FILE_LIMIT, OwnerFiles, read_lines

PREVIOUS = ".old"
FINISHED, FOUND, CAPTURED = "run", "finding", "capture"
"""The kinds of entries: an ended run with its account, an ended finding, or the path of a capture."""

logger = logging.getLogger(__name__)


class Journal:
    """The journal. A write error is logged once and otherwise ignored."""

    def __init__(self, files: OwnerFiles) -> None:
        self._files = files
        self._has_failed = False

    def append(self, owner: str, entry: Mapping[str, Any]) -> None:
        """Append an entry to the owner's file. Start a new file if it would be too long."""
        path = self._files.path("journal", owner)
        try:
            if not self._files.admits(path):
                return
            if not self._files.is_due(path):
                self._files.log_once("dropping entries of the journal: its owner adds too many", path)
                return
            line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
            self._files.count(path, len(line), burst=FILE_LIMIT)
            if len(line) > FILE_LIMIT:
                self._files.log_once("dropping an entry of the journal: it is too large", path)
                return
            if path.exists() and path.stat().st_size + len(line) > FILE_LIMIT:
                path.replace(path.with_name(path.name + PREVIOUS))
            with path.open("ab") as file:
                file.write(line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot write the journal; dropping entries file=%s error=%s", path, error)
            self._has_failed = True


def read(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of all owners, each owner's oldest first. Raise OSError."""
    for pattern in (f"journal-*.jsonl{PREVIOUS}", "journal-*.jsonl"):
        for path in sorted(directory.glob(pattern)):
            yield from read_lines(path, FILE_LIMIT)
