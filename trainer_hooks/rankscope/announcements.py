"""What rank 0 says on standard error: one line when its record begins, one when it ends. RANKSCOPE_QUIET=1: neither.

A rank knows only itself: where its own time went, and not whether it is the one that the others wait for.
"""

from __future__ import annotations

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
from rankscope.record.snapshot import RankSnapshot
from rankscope.record.text import replace_unprintable
from rankscope.record.writer import SHARED_MEMORY_RUN_DIR, SYSTEM_RUN_DIR
from rankscope.timeline.steps import BACKWARD_PASS
from rankscope.timeline.timeline import Timeline

logger = logging.getLogger("rankscope")

LONGEST = select.PIPE_BUF  # bytes: so much is written at once, without a wait and unmixed with others' lines
NAMED = 3  # phases
WORTH_NAMING = 0.01  # of the time
HOLDS_UP = 0.1  # as much of the time in one phase that is no computing
RATIO_DIGITS = 4
MEANINGS = {phase.name: phase.meaning for phase in PHASES}


class Announcer:
    """Speaks for one record, if it is rank 0's and others can read it. `info` gives the record's."""

    def __init__(self, timeline: Timeline, info: Callable[[], dict[str, Any]]) -> None:
        self._timeline = timeline
        self._info = info
        self._has_warned = False
        self._stderr: File | None = standard_error()  # a job may put a file of its own there later

    def begin(self) -> None:
        """The record has been made: say where, and how to look at it."""
        if path := self._record():
            say(beginning(self._info()["run"], path))

    def poll(self) -> None:
        """Warn once if backward passes have come to count as steps."""
        if self._timeline.steps.marker == BACKWARD_PASS and not self._has_warned:
            self._has_warned = True
            if self._info().get("rank") == "0":
                logger.warning(
                    "rankscope: %d backward passes and no step of an optimizer: from now on each counts as a step; "
                    "where a step is more than that, call rankscope.step() at its end",
                    PASSES_WITHOUT_STEP,
                )

    def end(self) -> None:
        """The record has ended: say where its time went."""
        if self._record():
            say(summary(own_snapshot(self._timeline, self._info()), self._timeline.steps.marker))

    def _record(self) -> Path | None:
        """Return the record's path if anything is said about it: not where standard error is another file by now."""
        path = self._timeline.writer.path
        is_ours = self._stderr is not None and self._stderr == standard_error()
        return path if path and is_ours and self._info()["rank"] == "0" and not is_quiet() else None


def is_quiet() -> bool:
    """Whether nothing is to be said, by the environment."""
    return is_on("RANKSCOPE_QUIET")


def standard_error() -> File | None:
    """Return the file that standard error writes to; None if that is not known."""
    try:
        return file_of(sys.stderr.fileno())
    except Exception:  # there is none, it is closed, or it is the job's own, which may raise anything
        return None


def say(text: str) -> None:
    """One line on standard error, if that takes it at once: never an error, never a wait for who reads it.

    Past Python's buffer, as a thread that waits to write holds its lock until the process has ended.
    """
    line = replace_unprintable(f"rankscope: {text}")
    try:
        descriptor = sys.stderr.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLOUT)
        if poll.poll(0) == [(descriptor, select.POLLOUT)]:  # with an error beside it, nobody reads any more
            os.write(descriptor, line.encode(errors="replace")[: LONGEST - 1] + b"\n")
    except Exception:  # there is none, it is broken or closed, or it is the job's own, which may raise anything
        logger.debug("rankscope: nothing can be said on standard error", exc_info=True)


def beginning(run: str, path: Path) -> str:
    """That the hook is on: which run, where its record is, and how to look at it."""
    is_usual = path.parent in (SYSTEM_RUN_DIR, SHARED_MEMORY_RUN_DIR)
    exporter = "rankscope-exporter" if is_usual else f"rankscope-exporter --run-dir {shlex.quote(str(path.parent))}"
    return (
        f"run {run}, recorded in {path}. Its page: {exporter}. "
        f"With Prometheus: rankscope explain {shlex.join(run_option(run))}"
    )


def run_option(run: str) -> list[str]:
    """Return the arguments that choose a run. A name with a dash first, as of `python -c`, would be an option alone."""
    return [f"--run={run}"] if run.startswith("-") else ["--run", run]


def own_snapshot(timeline: Timeline, info: dict[str, Any]) -> RankSnapshot:
    """Return the snapshot of this process's record, as of now."""
    slots, now, path = tuple(timeline.writer.slots), time.monotonic(), timeline.writer.path or Path()
    # As what has ended: the time since the last event belongs to no phase, as in the record.
    return RankSnapshot(path, False, slots, info, last_words_at=None, read_monotonic=now)


def figures(snapshot: RankSnapshot, step_marker: int) -> dict[str, str | float]:
    """Return the closing line and what it is made of, for the run of an experiment tracker; nothing without a step."""
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
    """How many steps, where the time went, and what this rank can say of it alone."""
    startup = snapshot.phase_seconds["startup"]
    if not snapshot["steps"]:
        passes = f"{snapshot['micro_steps']:.0f} backward passes and " if snapshot["micro_steps"] else ""
        return f"{passes}no step in {duration(startup)}" + ("; call rankscope.step() at a step's end" if passes else "")
    by_phase, clock = shares(snapshot)
    total = sum(snapshot.phase_seconds.values()) - startup
    return (
        f"{snapshot['steps']:.0f} steps{' (backward passes)' if step_marker == BACKWARD_PASS else ''} "
        f"in {duration(total)} after {duration(startup)} of start-up, by the clock of the {clock}: {named(by_phase)}. "
        f"{verdict(by_phase, is_alone=snapshot.info.get('world_size') == '1')}"
    )


def shares(snapshot: RankSnapshot) -> tuple[dict[str, float], str]:
    """Each phase's part of the time after start-up, and by whose clock, as `rank:rankscope_phase:ratio` has it.

    The host's, but for planned phases the device's where that was measured: there the host runs ahead.
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


def named(by_phase: Mapping[str, float]) -> str:
    """The largest phases with their shares, at most NAMED, none below WORTH_NAMING."""
    largest = sorted(by_phase.items(), key=lambda item: -item[1])[:NAMED]
    return ", ".join(f"{percent(share)} {phase}" for phase, share in largest if share >= WORTH_NAMING)


def verdict(by_phase: Mapping[str, float], *, is_alone: bool) -> str:
    """What keeps this rank from computing most; of the others' share in that it knows how long it waited for them."""
    beside = {phase: share for phase, share in by_phase.items() if phase not in COMPUTING}
    largest = max(beside, key=lambda phase: beside[phase])
    if beside[largest] >= HOLDS_UP:
        text = f"Most beside computing: {largest}, {MEANINGS.get(largest, 'a part of its own')}."
    else:
        text = f"{percent(1.0 - sum(beside.values()))} is computing."
    if is_alone:
        return text
    waited = percent(by_phase.get("collective_wait", 0.0))
    return f"{text} It waited for others {waited} of the time; which rank is late, only all of them together tell."


def percent(share: float) -> str:
    """Two digits that mean something: 42 %, 4.2 %."""
    percents = 100 * share
    return f"{percents:.0f} %" if percents >= 9.95 else f"{percents:.1f} %" if percents >= 0.1 else "under 0.1 %"


def duration(seconds: float) -> str:
    """As a person says it: 8.2 s, 34 s, 12 min, 5.4 h."""
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 9.95 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
