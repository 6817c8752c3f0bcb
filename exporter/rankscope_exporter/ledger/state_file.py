"""The saved state of the present runs for a restart of the exporter: a file per owner, a line of JSON per run."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankscope_exporter.ledger.owner_files import ANALYZER_SCALE, STATE_LIMIT, OwnerFiles, read_lines, replace_file

STATE_DIR = Path("/var/lib/rankscope")
"""The exporter's --state-dir in deploy/node/rankscope-exporter.service."""
FILES = "state-*.jsonl"
OLD = "findings.json"
"""The file of all owners in earlier versions, which is no longer read."""
VERSION = 2

logger = logging.getLogger(__name__)


class StateFiles:
    """The files in the state directory. Write errors are logged once."""

    def __init__(self, files: OwnerFiles | None) -> None:
        """Set the files; None to save nothing."""
        self._files = files
        self._has_failed = False

    def load(self) -> Iterator[Mapping[str, Any]]:
        """Yield the last saved state of each run that this version can read."""
        if self._files is None:
            return
        with suppress(OSError):
            (self._files.directory / OLD).unlink()
        for path in sorted(self._files.directory.glob(FILES)):
            yield from _read_or_log(path)

    def save(self, at: float, state: Mapping[str, Iterable[Sequence[Any]]], *, is_last: bool) -> None:
        """Replace the owners' files, so that none is half-written; unless `is_last`, those not written too recently.

        `state` has values by their kind, each after its run, the oldest runs first.
        """
        if self._files is None:
            return
        runs: dict[Path, dict[tuple[str, ...], dict[str, Any]]] = {}
        for kind, items in state.items():
            for *run, value in items:
                of_owner = runs.setdefault(self._files.path("state", run[1]), {})
                of_owner.setdefault(tuple(run), {"version": VERSION, "at": at, "run": run})[kind] = value
        path = self._files.directory
        try:
            for path in {*self._files.directory.glob(FILES)} - runs.keys():
                self._files.remove_state(path)
            for path, of_owner in runs.items():
                if (is_last or self._files.is_due(path)) and self._files.admits(path):
                    self._write(self._files, path, of_owner.values())
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot save the state file=%s error=%s", path, error)
            self._has_failed = True

    def _write(self, files: OwnerFiles, path: Path, runs: Iterable[Mapping[str, Any]]) -> None:
        """Write as many runs as fit."""
        lines = b""
        for run in runs:
            line = json.dumps(run, separators=(",", ":")).encode() + b"\n"
            if len(lines) + len(line) > files.state_limit:
                files.log_once("saving only the oldest runs: the owner's state is too large", path)
                break
            lines += line
        files.count(path, len(lines))
        replace_file(path, lines)


def read(directory: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the saved state of each run. Raise OSError."""
    for path in sorted(directory.glob(FILES)):
        yield from _read(path)


def _read_or_log(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        yield from _read(path)
    except OSError as error:
        logger.warning("ignoring the saved state file=%s error=%s", path, error)


def _read(path: Path) -> Iterator[Mapping[str, Any]]:
    return (state for state in read_lines(path, ANALYZER_SCALE * STATE_LIMIT) if state.get("version") == VERSION)
