"""The files in the state directory: which owners have some, and how often they may be written.

An owner has OWNER_LIMIT bytes, and all owners together have DIRECTORY_LIMIT. A user may have many uids, so a new owner
removes no files that were written in the last days: in a full directory, nothing is saved of new owners. Only a new one
whose process is on a GPU, by the driver, replaces another: the last that came of those who have never had one.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from math import inf
from pathlib import Path
from typing import Any

from rankscope.record.directory import open_untrusted
from rankscope_exporter.ranks.principals import principal_of

FILE_LIMIT = 256 * 1024
"""Bytes of a journal: about a hundred runs with their findings."""
STATE_LIMIT = 512 * 1024
"""Bytes of the state of an owner's present runs: ten runs with baselines of an hour."""
ANALYZER_SCALE = 8
"""How many times as much state an owner may have at the analyzer, whose runs have more ranks, and how much faster."""
OWNER_LIMIT = 2 * FILE_LIMIT + STATE_LIMIT
"""Bytes of an owner: the journal, the previous one, and the state."""
OWNERS_LIMIT = 128
GPU_OWNERS, GPU_OWNERS_LIMIT = "gpu_owners.jsonl", 64 * OWNERS_LIMIT
"""The file of the owners that have had a GPU, and its bytes."""
HISTORY_LIMIT, PARTS_LIMIT = 1024 * 1024, 128
"""Bytes of the history of the node's GPUs, ports and nodes, and the most of these."""
DIRECTORY_LIMIT = OWNERS_LIMIT * OWNER_LIMIT + 2 * HISTORY_LIMIT + GPU_OWNERS_LIMIT
"""Bytes of all files: those of each owner, the history, a draft, and GPU_OWNERS."""
ANALYZER_DIRECTORY_LIMIT = DIRECTORY_LIMIT + (ANALYZER_SCALE - 1) * (OWNERS_LIMIT * STATE_LIMIT + 2 * HISTORY_LIMIT)
"""The same of the analyzer."""
KEPT_SECONDS = 7 * 86_400.0
"""Seconds after which a new owner may replace one whose files were not written."""
BYTES_PER_SECOND = 4096
"""What is written of an owner on average to the journal, and as much to the state."""
DRAFT = "state.draft"
NO_OWNER = "none"
"""The owner of all runs with `--collector.ranks.owner=none`."""

logger = logging.getLogger(__name__)


class OwnerFiles:
    """The owners with files in a directory. A limit that is reached is logged once per owner."""

    def __init__(
        self,
        directory: Path,
        clock: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
        scale: int = 1,
    ) -> None:
        """Set the directory, and the factor of the limits of an owner's state."""
        self.directory, self.scale = directory, scale
        self.state_limit, self._rate = scale * STATE_LIMIT, scale * BYTES_PER_SECOND
        self._clock = clock
        self._monotonic = monotonic
        self._written: dict[str, float] = {}
        """Unix times at which each owner's files were last written, in the order in which the owners came."""
        self._on_gpu: Collection[str] = ()
        """The owners with a process on a GPU now."""
        self._next: dict[Path, float] = {}
        """Times after which each file may be written again."""
        self._logged: set[tuple[str, str]] = set()
        for path in directory.glob("*-*.jsonl*"):
            self._written[_owner(path)] = max(path.stat().st_mtime, self._written.get(_owner(path), -inf))
        self._written = dict(sorted(self._written.items(), key=lambda item: item[1]))
        self._had_gpu: set[str] = set()
        with suppress(OSError):
            self._had_gpu.update(str(one.get("owner")) for one in read_lines(directory / GPU_OWNERS, GPU_OWNERS_LIMIT))

    def path(self, kind: str, owner: str) -> Path:
        """Return an owner's file. A range of subordinate uids has the files of its user."""
        return self.directory / f"{kind}-{_name(owner)}.jsonl"

    def set_on_gpu(self, owners: Iterable[str]) -> None:
        """Set the owners with a process on a GPU now."""
        self._on_gpu = {*map(_name, owners)}

    def is_due(self, path: Path) -> bool:
        """Return whether the file may be written now, after what was written of it before."""
        return self._next.get(path, -inf) <= self._monotonic()

    def count(self, path: Path, size: int, burst: int = 0) -> None:
        """Count bytes as written: after a burst, the file may be written again when the rate permits them."""
        now = self._monotonic()
        if len(self._next) > 4 * OWNERS_LIMIT:
            self._next = {path: at for path, at in self._next.items() if at > now - FILE_LIMIT / self._rate}
        self._next[path] = max(self._next.get(path, -inf), now - burst / self._rate) + size / self._rate

    def remove_state(self, path: Path) -> None:
        """Remove an owner's state. Without a journal, the owner leaves room for another one."""
        path.unlink(missing_ok=True)
        if not any(self.directory.glob(f"*-{_owner(path)}.*")):
            self._written.pop(_owner(path), None)

    def log_once(self, event: str, path: Path) -> None:
        """Log an event of an owner's file, unless it was logged."""
        if (event, path.name) not in self._logged:
            logger.warning("%s file=%s", event, path)
        self._logged.add((event, path.name))

    def admits(self, path: Path) -> bool:
        """Return whether there is room for the files of this file's owner."""
        owner, now = _owner(path), self._clock()
        while owner not in self._written and len(self._written) >= OWNERS_LIMIT:
            replaced = self._replaced_by(owner, now)
            if replaced is None:
                self.log_once("the state directory is full; saving nothing of new owners", self.directory)
                return False
            for path in self.directory.glob(f"*-{replaced}.*"):
                path.unlink()
            del self._written[replaced]
        self._written[owner] = now
        if owner in self._on_gpu and owner not in self._had_gpu:
            self._had_gpu = (self._had_gpu & self._written.keys()) | {owner}
            lines = [json.dumps({"owner": one}) + "\n" for one in self._had_gpu]
            (self.directory / GPU_OWNERS).write_text("".join(lines), encoding="utf-8")
        return True

    def _replaced_by(self, owner: str, now: float) -> str | None:
        """Return the owner that a new one replaces in a full directory; None if there is none."""
        oldest = min(self._written, key=self._written.__getitem__)
        if now - self._written[oldest] >= KEPT_SECONDS:
            return oldest
        without = (one for one in reversed(self._written) if one not in self._had_gpu)
        return next(without, None) if owner in self._on_gpu else None


def replace_file(path: Path, text: bytes) -> None:
    """Replace a file in one step, so that it is never half-written. Raise OSError."""
    draft = path.with_name(DRAFT)
    with draft.open("wb") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)


def _name(owner: str) -> str:
    return principal_of(owner) or NO_OWNER


def _owner(path: Path) -> str:
    return path.name.partition("-")[2].partition(".")[0]


def read_lines(path: Path, limit: int) -> Iterator[dict[str, Any]]:
    """Yield the JSON objects in the first bytes of a file, one a line. Raise OSError.

    Skip damaged lines: the exporter may have been killed while it wrote.
    """
    with open(open_untrusted(path), "rb") as file:  # noqa: PTH123 - a descriptor
        lines = (file.read(limit) or b"").splitlines()  # a pipe without data returns None
    for line in lines:
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict):
            yield value
