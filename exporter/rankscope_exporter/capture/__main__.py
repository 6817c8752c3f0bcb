"""The process that captures for the exporter: it reads a request from standard input, and prints the figures as JSON.

A process of its own, because it runs at idle priority: a thread that holds the interpreter's lock while it waits for
CPU time would delay the diagnosis. It also ends if a source hangs.
"""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

from rankscope_exporter.capture import folder
from rankscope_exporter.capture.capturing import capture
from rankscope_exporter.capture.child import limit_memory
from rankscope_exporter.capture.folder import FolderError
from rankscope_exporter.capture.request import parse
from rankscope_exporter.capture.settings import PY_SPY
from rankscope_exporter.ranks.principals import SUBORDINATE_IDS

DAY = 86_400.0
MEMORY = 512 * 2**20
"""Bytes of address space."""


def run_idle() -> None:
    """Use only CPU time that no other process wants."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def main() -> None:
    """Capture, after the removal of captures beyond the limits."""
    limit_memory(MEMORY)
    job = json.load(sys.stdin)
    if job["stacks"] != PY_SPY:  # it pauses the ranks, and must not wait for CPU time meanwhile
        run_idle()
    os.umask(0o077)
    try:
        directory = folder.open_captures(Path(job["directory"]))
        SUBORDINATE_IDS.refresh()
        folder.prune(directory, job["bytes"], job["days"] * DAY, SUBORDINATE_IDS.principal)
        answer = capture(parse(job["request"]), directory, job["stacks"], run_idle) if job["request"] else {}
        answer["kept"] = list(folder.kept(directory))
    except FolderError as error:
        answer = {"reason": error.reason, "error": str(error)}
    sys.stdout.write(json.dumps(answer))
    sys.stdout.flush()
    os._exit(0)  # a source that hangs has a thread


if __name__ == "__main__":
    main()
