"""Short texts about runs and ranks, the same on the status page and in the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from rankscope_exporter.diagnosis.detectors.hang import INSIDE
from rankscope_exporter.diagnosis.words import duration, percent
from rankscope_exporter.report.findings import PendingReport, why_not
from rankscope_exporter.report.ranks import RankReport
from rankscope_exporter.report.runs import RunReport

CAUSES_SHOWN = 3
SHOWN_FROM = 0.005
PENDING_SHOWN = 4
"""Of one run: in a run of many ranks each may have one."""
FAILED = ("exception", "killed")
GOES_ON = ("time", "steps")
"""What something lacks that will be a finding if it goes on."""
Mark = Literal["bad", "warn", "good", ""]


def owner(run: RunReport) -> str:
    """Return whose run it is, as ` of alice`; empty if that is not known."""
    return f" of {run.user or run.owner}" if run.user or run.owner else ""


def summary(run: RunReport) -> Iterator[str]:
    """Yield the run's ranks, its step time, how much of its GPU time is useful, and what the rest is lost to."""
    if not run.living:
        yield "ended"
        return
    yield f"{run.living} of {run.world_size} ranks"
    if run.step_seconds is not None:
        yield (
            f"{1000 * run.step_seconds:.0f} ms a step" if run.step_seconds < 1.0 else f"{run.step_seconds:.2g} s a step"
        )
    if run.useful_ratio is not None:
        yield f"{percent(run.useful_ratio)} of the GPU time is useful"
    if lost := [f"{cause} {percent(ratio)}" for cause, ratio in run.lost.items() if ratio >= SHOWN_FROM]:
        yield f"lost: {', '.join(lost[:CAUSES_SHOWN])}"


def notes(run: RunReport) -> Iterator[str]:
    """Yield what is not an alert yet, and why the run is not judged."""
    for one in run.pending[:PENDING_SHOWN]:
        yield f"Not yet an alert: {one.sentence} ({why_not(one)})"
    if run.not_judged_reason and run.living:
        yield f"Run {run.run} is not judged here: {run.not_judged_reason}."


def is_growing(one: PendingReport) -> bool:
    """Return whether it will be a finding if it goes on."""
    return one.lacks in GOES_ON


def mark(run: RunReport, rank: RankReport) -> Mark:
    """Return `bad` for a rank that a finding names, `warn` for one that something names that may become a finding."""
    if any(one.rank == rank.rank and one.cause != INSIDE for one in run.findings):
        return "bad"
    return "warn" if any(one.rank == rank.rank and one.cause != INSIDE for one in run.pending) else ""


def now(rank: RankReport) -> str:
    """Return what a rank does now and for how long, or how it ended and when."""
    if not rank.is_alive:
        ago = "" if rank.ended_seconds is None else f", {duration(rank.ended_seconds)} ago"
        return f"{rank.ended or 'ended'}{ago}"
    seconds = rank.phase_seconds or 0.0
    return f"{rank.phase} for {duration(seconds)}" if seconds >= 1.0 else rank.phase or ""


def now_mark(run: RunReport, rank: RankReport) -> Mark:
    """Return `bad` for a rank that hangs or has failed."""
    if not rank.is_alive:
        return "bad" if rank.ended in FAILED else ""
    return "bad" if any(one.kind == "hang" for one in run.findings) else ""


def wait(rank: RankReport) -> str:
    """Return what it waits for others."""
    return "" if rank.wait_ratio is None or not rank.is_alive else f"{rank.wait_ratio:.0%}"


def lag(rank: RankReport) -> str:
    """Return its lag; one that waits longer than the others has none."""
    return "" if rank.lag_ratio is None or not rank.is_alive else f"{max(rank.lag_ratio, 0.0):.0%}"


def steps(rank: RankReport) -> str:
    """Return how many steps it has made; of a loop whose steps nothing marks, its backward passes."""
    if rank.step_marker == "backward_pass":
        return f"{rank.steps} (backward passes)"
    return str(rank.steps) if rank.steps or not rank.backward_passes else f"0 in {rank.backward_passes} backward passes"
