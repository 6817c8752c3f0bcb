"""The journal in the state directory: findings and runs that have ended, as lines of JSON.

Each owner has a file, so that no user's runs displace another's. A full file replaces the previous one.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_LIMIT = 256 * 1024
"""Bytes of a file: about a hundred runs with their findings."""
OWNERS_LIMIT = 128
"""Files: 64 MiB, including the previous ones."""
PREFIX, SUFFIX, PREVIOUS = "journal-", ".jsonl", ".old"
NO_OWNER = "none"
"""The owner of all runs with `--collector.ranks.owner=none`."""

FINISHED, FOUND = "run", "finding"
"""The kinds of entries: an ended run with its account, or an ended finding."""

logger = logging.getLogger(__name__)


class Journal:
    """The journal. A write error is logged once and otherwise ignored."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_failed = False

    def append(self, owner: str, entry: Mapping[str, Any]) -> None:
        """Append an entry to the owner's file. Start a new file if it would be too long."""
        path = self._directory / f"{PREFIX}{owner or NO_OWNER}{SUFFIX}"
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        try:
            self._make_room(path, len(line))
            with path.open("a") as file:
                file.write(line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot write the journal; dropping entries file=%s error=%s", path, error)
            self._has_failed = True

    def _make_room(self, path: Path, size: int) -> None:
        if path.exists():
            if path.stat().st_size + size > FILE_LIMIT:
                path.replace(path.with_name(path.name + PREVIOUS))
            return
        others = sorted(self._directory.glob(f"{PREFIX}*{SUFFIX}"), key=lambda one: one.stat().st_mtime)
        for oldest in others[: max(len(others) + 1 - OWNERS_LIMIT, 0)]:
            oldest.unlink()
            oldest.with_name(oldest.name + PREVIOUS).unlink(missing_ok=True)


def read(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of all owners, each owner's oldest first. Raise OSError.

    Skip damaged lines: the exporter may have been killed while it wrote.
    """
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}{PREVIOUS}")) + sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                yield entry
