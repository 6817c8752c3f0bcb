"""What a scan of the run directories did not show, and what the log says of it: each file once, and not too much."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

from rankscope.record.reader import UnreadableRecordError

COMPLAINTS_LIMIT = 10  # log lines a minute
COMPLAINTS_REMEMBERED = 4096

logger = logging.getLogger(__name__)


class Skipped:
    """What one scan did not show, and why."""

    def __init__(self) -> None:
        self.count: Counter[str] = Counter()
        self.errors: list[UnreadableRecordError] = []
        self.stamps: set[tuple[int, int, int]] = set()

    def add(self, error: UnreadableRecordError, files: int = 1) -> None:
        """So many files, for the reason and with the words of the error."""
        self.count[error.reason] += files
        # Without its tracebacks, which lead back to here: hundreds of bad files each second would be for the garbage
        # collector alone to free, and it holds up every scrape meanwhile.
        error.__cause__ = error.__context__ = error.__traceback__ = None
        self.errors.append(error)


class Complaints:
    """Log lines about files: each once, and some a minute, as names that change all the time shall not fill the log."""

    def __init__(self) -> None:
        self._made: dict[Path, None] = {}
        self._began = time.monotonic()
        self._left = COMPLAINTS_LIMIT

    def log(self, what: str, errors: Iterable[UnreadableRecordError]) -> None:
        """Say what is new."""
        if time.monotonic() - self._began > 60:
            self._began, self._left = time.monotonic(), COMPLAINTS_LIMIT
        for error in islice([error for error in errors if error.path not in self._made], self._left):
            logger.warning("%s: %s", what, error)
            self._left -= 1
            self._made[error.path] = None
        while len(self._made) > COMPLAINTS_REMEMBERED:
            del self._made[next(iter(self._made))]
