"""The command `rankscope capture`: it captures a run on this machine now, without an exporter."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from rankscope.cli.living_ranks import RecordedRank
from rankscope.cli.printable import printable
from rankscope_exporter.capture import folder
from rankscope_exporter.capture.capturing import capture
from rankscope_exporter.capture.folder import FolderError
from rankscope_exporter.capture.request import RANKS_LIMIT, Request, wanted_rank
from rankscope_exporter.hangs.records import NoRanksError, read_run

MANUAL = "manual"


def show(run: str, directory: Path, run_dirs: Sequence[Path], stacks_by: str) -> int:
    """Capture, and print the sentence and the path. Return the exit status: 2 if nothing was captured."""
    os.umask(0o077)
    try:
        living, _ended = read_run(run, run_dirs)
        opened = folder.open_captures(directory)
        figures = capture(_request(living), opened, stacks_by)
    except (NoRanksError, FolderError) as error:
        where = f"{directory}: " if isinstance(error, FolderError) else ""
        print(f"rankscope capture: {printable(f'{where}{error}')}", file=sys.stderr)  # noqa: T201 - a command
        return 2
    path = directory / str(figures["name"])
    sys.stdout.write(f"{printable(str(figures['sentence']))}\n{printable(str(path / folder.REPORT))}\n")
    sys.stdout.flush()
    return 0


def _request(living: Sequence[RecordedRank]) -> Request:
    """Return the request for the living ranks of one run and owner."""
    first = living[0]
    ranks = [wanted_rank(one.snapshot, int(one.rank)) for one in living[:RANKS_LIMIT]]
    return Request(first.run, first.owner, first.run, first.run, MANUAL, socket.gethostname(), ranks)
