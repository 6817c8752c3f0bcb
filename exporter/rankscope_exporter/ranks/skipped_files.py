"""Files that a scan of the run directories has skipped, and their rate-limited log: each file is logged once."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from rankscope.record.reader import UnreadableRecordError

LINES_LIMIT = 10  # per minute
FILES_REMEMBERED = 4096

logger = logging.getLogger(__name__)


class Skipped:
    """The files that one scan has skipped, and the reasons."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.errors: list[UnreadableRecordError] = []
        self.stamps: set[tuple[int, int, int]] = set()

    def add(self, error: UnreadableRecordError, files: int = 1) -> None:
        """Add a number of files with the reason and message of the error."""
        self.count[error.reason] += files
        # Drop the tracebacks, which refer to this frame: otherwise only the garbage collector could free hundreds of
        # errors per second, and it would delay every scrape.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.errors.append(error)


class FileLog:
    """Log lines about files: each file once, and a few per minute, so that changing names do not fill the log."""

    def __init__(self) -> None:
        self._logged: dict[Path, None] = {}
        self._began = time.monotonic()
        self._left = LINES_LIMIT

    def log(self, event: str, errors: Iterable[UnreadableRecordError]) -> None:
        """Log the errors whose files were not logged yet."""
        if time.monotonic() - self._began > 60:
            self._began, self._left = time.monotonic(), LINES_LIMIT
        for error in islice([error for error in errors if error.path not in self._logged], self._left):
            logger.warning("%s: %s", event, error)
            self._left -= 1
            self._logged[error.path] = None
        while len(self._logged) > FILES_REMEMBERED:
            del self._logged[next(iter(self._logged))]
