"""Lines that rank 0 prints on standard error: one at its start, one at its end. RANKSCOPE_QUIET=1 turns them off.

A rank knows only where its own time went, not whether it is the straggler.
"""

from __future__ import annotations

import io
import logging
import os
import select
import shlex
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankscope.process.switches import is_on
from rankscope.record.layout import PASSES_WITHOUT_STEP
from rankscope.record.own_descriptor import File, file_of
from rankscope.record.phases import COMPUTING, PHASES, PLANNED
from rankscope.record.quantities import duration, percent
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR
from rankscope.timeline.steps import BACKWARD_PASS
from rankscope.timeline.timeline import Timeline

logger = logging.getLogger("rankscope")

MAX_LINE_BYTES = select.PIPE_BUF  # written atomically: without blocking, and not mixed with other processes' lines
BUFFERS = (io.BufferedWriter, io.FileIO)  # FileIO if Python runs with -u
MAX_NAMED_PHASES = 3
MIN_NAMED_RATIO = 0.01  # of the time
LARGE_RATIO = 0.1  # of the time, in one phase that is not computing
RATIO_DIGITS = 4
MEANINGS = {phase.name: phase.meaning for phase in PHASES}


class Announcer:
    """Prints the lines of one record, if it is published and rank 0's. `info` returns the record's info."""

    def __init__(self, timeline: Timeline, info: Callable[[], dict[str, Any]]) -> None:
        self._timeline = timeline
        self._info = info
        self._has_warned = False
        self._stderr: File | None = standard_error()  # a job may replace it later

    def begin(self) -> None:
        """Print where the record is, and how to look at it."""
        if path := self._record():
            print_line(first_line(self._info()["run"], path))

    def poll(self) -> None:
        """Warn once when backward passes start to count as steps."""
        if self._timeline.steps.marker == BACKWARD_PASS and not self._has_warned:
            self._has_warned = True
            if self._info().get("rank") == "0":
                logger.warning(
                    "rankscope: %d backward passes without an optimizer step; counting each backward pass as a step. "
                    "If a step has more than one, call rankscope.step() at its end",
                    PASSES_WITHOUT_STEP,
                )

    def end(self) -> None:
        """Print where the time of the record went."""
        if self._record():
            print_line(summary(own_snapshot(self._timeline, self._info()), self._timeline.steps.marker))

    def _record(self) -> Path | None:
        """Return the record's path if lines are printed about it: not if standard error has become another file."""
        path = self._timeline.writer.path
        is_same = self._stderr is not None and self._stderr == standard_error()
        return path if path and is_same and self._info()["rank"] == "0" and not is_on("RANKSCOPE_QUIET") else None


def standard_error() -> File | None:
    """Return the file that standard error writes to, or None if it is not known."""
    descriptor = stderr_descriptor()
    return None if descriptor is None else file_of(descriptor)


def stderr_descriptor() -> int | None:
    """Return the descriptor of standard error; None without one. An object of the job's own type is not asked."""
    stream = sys.stderr
    if type(stream) is not io.TextIOWrapper:
        return None
    try:
        return stream.fileno() if type(stream.buffer) in BUFFERS else None
    except ValueError:  # it is closed, or its buffer is detached
        return None


def print_line(text: str) -> None:
    """Print a line on standard error if that does not block. Never raises.

    It bypasses Python's buffer: a thread that blocks in a write would hold the buffer's lock until the process ends.
    """
    line = replace_unprintable(f"rankscope: {text}")
    try:
        descriptor = stderr_descriptor()
        if descriptor is None:
            return
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0) == [(descriptor, select.POLLOUT)]:  # POLLERR too: the reader is gone
            os.write(descriptor, line.encode(errors="replace")[: MAX_LINE_BYTES - 1] + b"\n")
    except OSError:  # it is broken
        logger.debug("rankscope: cannot write to standard error", exc_info=True)


def first_line(run: str, path: Path) -> str:
    """Return the line at the start: the run, the path of its record, and how to look at it."""
    is_default = path.parent in (SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR)
    top = "rankscope top" if is_default else f"rankscope top --run-dir {shlex.quote(str(path.parent))}"
    return (
        f"recording run {run} to {path}. On this node: {top}. "
        f"With Prometheus: rankscope explain {shlex.join(run_option(run))}"
    )


def run_option(run: str) -> list[str]:
    """Return the arguments that select a run. A name may start with a dash, as that of `python -c` does."""
    return [f"--run={run}"] if run.startswith("-") else ["--run", run]


def own_snapshot(timeline: Timeline, info: dict[str, Any]) -> RankSnapshot:
    """Return a snapshot of this process's record."""
    slots, now, path = tuple(timeline.writer.slots), time.monotonic(), timeline.writer.path or Path()
    # As of an ended rank: the time since the last event belongs to no phase, as in the record.
    return RankSnapshot(path, False, slots, info, last_words_at=None, read_monotonic=now)


def figures(snapshot: RankSnapshot, step_marker: int) -> dict[str, str | float]:
    """Return the closing line and its values, for an experiment tracker's run; empty if there was no step."""
    if not snapshot["steps"]:
        return {}
    by_phase, clock = shares(snapshot)
    ratios = {
        "computing_ratio": sum(share for phase, share in by_phase.items() if phase in COMPUTING),
        "data_wait_ratio": by_phase.get("data_wait", 0.0),
        "collective_wait_ratio": by_phase.get("collective_wait", 0.0),
    }
    rounded = {name: round(ratio, RATIO_DIGITS) for name, ratio in ratios.items()}
    return {"summary": summary(snapshot, step_marker), "rank": snapshot.info.get("rank", ""), "clock": clock, **rounded}


def summary(snapshot: RankSnapshot, step_marker: int) -> str:
    """Return the closing line: steps, their time by phase, and the largest phase that is not computing."""
    startup = snapshot.phase_seconds["startup"]
    if not snapshot["steps"]:
        passes = f"{snapshot['micro_steps']:.0f} backward passes but " if snapshot["micro_steps"] else ""
        advice = "; call rankscope.step() at the end of each step" if passes else ""
        return f"{passes}no step in {duration(startup)}{advice}"
    by_phase, clock = shares(snapshot)
    total = sum(snapshot.phase_seconds.values()) - startup
    return (
        f"{snapshot['steps']:.0f} steps{' (backward passes)' if step_marker == BACKWARD_PASS else ''} "
        f"in {duration(total)} after {duration(startup)} of startup ({clock} clock): {largest_phases(by_phase)}. "
        f"{verdict(by_phase, is_alone=snapshot.info.get('world_size') == '1')}"
    )


def shares(snapshot: RankSnapshot) -> tuple[dict[str, float], str]:
    """Return each phase's share of the time after startup, and the clock, as the diagnosis compares them.

    The device's clock is used for all but the planned phases if it was measured, because the host runs ahead.
    """
    host = {phase: seconds for phase, seconds in snapshot.phase_seconds.items() if phase != "startup"}
    total = sum(host.values()) or 1.0
    by_host = {phase: seconds / total for phase, seconds in host.items()}
    device = {phase: seconds for phase, seconds in snapshot.device_seconds.items() if phase not in PLANNED}
    measured = sum(device.values())
    if not measured:
        return by_host, "host"
    planned = {phase: share for phase, share in by_host.items() if phase in PLANNED}
    left = 1.0 - sum(planned.values())
    return {**planned, **{phase: left * seconds / measured for phase, seconds in device.items()}}, "device"


def largest_phases(by_phase: Mapping[str, float]) -> str:
    """Return the largest phases with their shares: at most MAX_NAMED_PHASES, none below MIN_NAMED_RATIO."""
    largest = sorted(by_phase.items(), key=lambda item: -item[1])[:MAX_NAMED_PHASES]
    return ", ".join(f"{percent(share)} {phase}" for phase, share in largest if share >= MIN_NAMED_RATIO)


def verdict(by_phase: Mapping[str, float], *, is_alone: bool) -> str:
    """Return what takes the most time apart from computing; among several ranks also the time waiting for others."""
    other = {phase: share for phase, share in by_phase.items() if phase not in COMPUTING}
    largest = max(other, key=lambda phase: other[phase])
    if other[largest] >= LARGE_RATIO:
        text = f"Largest phase besides computing: {largest} ({MEANINGS.get(largest, 'a phase of the script')})."
    else:
        text = f"{percent(1.0 - sum(other.values()))} is computing."
    if is_alone:
        return text
    waited = percent(by_phase.get("collective_wait", 0.0))
    return f"{text} {waited} is waiting for other ranks; compare all ranks to find the straggler."
