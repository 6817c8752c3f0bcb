"""The saved state of the findings for a restart of the exporter, in one JSON file."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAME = "findings.json"
VERSION = 1
SIZE_LIMIT = 16 * 2**20  # bytes: a hundred runs take a tenth of it

logger = logging.getLogger(__name__)


class StateFile:
    """The file in the state directory. Read and write errors are logged once."""

    def __init__(self, directory: Path | None) -> None:
        """Set the directory of the file; None to save nothing."""
        self._path = directory / NAME if directory else None
        self._has_failed = False

    def load(self) -> Mapping[str, Any]:
        """Return the last saved state; empty if there is none that this version can read."""
        if self._path is None:
            return {}
        try:
            if self._path.stat().st_size > SIZE_LIMIT:
                raise ValueError("the file is too large")
            state = json.loads(self._path.read_text())
            if not isinstance(state, dict) or state.get("version") != VERSION:
                raise ValueError("the file is from another version")
        except FileNotFoundError:
            return {}
        except (OSError, ValueError, RecursionError) as error:
            logger.warning("ignoring the saved state file=%s error=%s", self._path, error)
            return {}
        return state

    def save(self, state: Mapping[str, Any]) -> None:
        """Replace the file, so that it is never half-written."""
        if self._path is None:
            return
        draft = self._path.with_suffix(".draft")
        try:
            with draft.open("w") as file:
                json.dump({"version": VERSION, **state}, file, separators=(",", ":"))
                file.flush()
                os.fsync(file.fileno())
            draft.replace(self._path)
            self._has_failed = False
        except OSError as error:
            if not self._has_failed:
                logger.warning("cannot save the state file=%s error=%s", self._path, error)
            self._has_failed = True
