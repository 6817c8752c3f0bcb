"""What has ended, as lines of JSON in the state directory: findings with their times, and runs with their accounts.

A file for each owner, so that no user's runs displace another's. When it is full, it replaces the one before.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

FILE_LIMIT = 256 * 1024
"""Bytes: some hundred runs with their findings."""
OWNERS_LIMIT = 128
"""Files: 64 MiB with those before."""
PREFIX, SUFFIX, BEFORE = "journal-", ".jsonl", ".old"
NOBODY = "none"
"""Where runs have no owners (`--collector.ranks.owner=none`)."""

FINISHED, FOUND = "run", "finding"
"""What an entry is about: a run that has ended, with its account, or a finding that has."""

logger = logging.getLogger(__name__)


class Journal:
    """Appends entries. What cannot be written costs one line in the log."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._has_failed = False

    def append(self, owner: str, entry: Mapping[str, Any]) -> None:
        """Append an entry to the owner's file, and begin a new one where that would be too long."""
        path = self._directory / f"{PREFIX}{owner or NOBODY}{SUFFIX}"
        line = json.dumps(entry, separators=(",", ":")) + "\n"
        try:
            self._make_room(path, len(line))
            with path.open("a") as file:
                file.write(line)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("the journal cannot be written file=%s error=%s", path, error)
            self._has_failed = True

    def _make_room(self, path: Path, size: int) -> None:
        if path.exists():
            if path.stat().st_size + size > FILE_LIMIT:
                path.replace(path.with_name(path.name + BEFORE))
            return
        others = sorted(self._directory.glob(f"{PREFIX}*{SUFFIX}"), key=lambda one: one.stat().st_mtime)
        for oldest in others[: max(len(others) + 1 - OWNERS_LIMIT, 0)]:
            oldest.unlink()
            oldest.with_name(oldest.name + BEFORE).unlink(missing_ok=True)


def read(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield the entries of all owners, of each owner the oldest first. Raises OSError.

    A line that is no entry is left out: the exporter may have been killed while it wrote.
    """
    for path in sorted(directory.glob(f"{PREFIX}*{SUFFIX}{BEFORE}")) + sorted(directory.glob(f"{PREFIX}*{SUFFIX}")):
        for line in path.read_text(errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(entry, dict):
                yield entry
