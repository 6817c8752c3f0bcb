"""Feed simulated runs to the diagnosis, poll by poll; where nothing changes, only one a minute."""

from __future__ import annotations

from collections.abc import Iterator
from math import ceil

from testing.split_training import SplitJudge
from validation.month.run import Readings, SimulatedRun
from validation.month.scene import Scene

from rankscope_exporter.diagnosis.detectors import key_of
from rankscope_exporter.diagnosis.judge import RunJudge, Verdict
from rankscope_exporter.diagnosis.readings import Run
from rankscope_exporter.diagnosis.thresholds import Thresholds

QUIET = (60, 30, 15)
"""Seconds between two polls where nothing changes: as many as nothing changes for."""
SLOW = 5
"""Seconds between two polls while something is found, or in a pause."""
LONG_STEP = 10.0
"""Seconds of a step from which polls follow its end."""
OPEN_SECONDS = 120.0
"""Seconds after which what is found, or may soon be, counts as unchanged."""


def verdicts(scene: Scene, *, is_whole: bool, nodes: int = 1) -> Iterator[Verdict]:
    """Yield the verdicts of a run; if not whole, without most polls while nothing changes and nothing is found.

    On several nodes, an analyzer judges it.
    """
    run, name = SimulatedRun(scene), (scene.plan.name, "0")
    judge = _Nodes(run, name, nodes) if nodes > 1 else RunJudge(name)
    at, found, since = 0, frozenset[object](), 0
    while at < scene.plan.seconds:
        if (readings := run.readings(float(at))) is None:
            at += 1
            continue
        verdict = judge.update(float(at), readings)
        yield verdict
        now = _found(verdict)
        since = at if now != found else since
        found = now
        at += 1 if is_whole else _pause(run, verdict, at, is_new=bool(found) and at - since < OPEN_SECONDS)


class _Nodes:
    """The nodes of a run, and the analyzer that judges it. Between two polls it judges nothing."""

    def __init__(self, run: SimulatedRun, name: Run, nodes: int) -> None:
        self._run, self._at, self._nodes = run, 0.0, SplitJudge(nodes, Thresholds(), name)

    def update(self, at: float, readings: Readings) -> Verdict:
        self._nodes.add(at, readings, self._run.plan.clock, self._run.new_steps(self._at, at))
        self._at = at
        (verdict,) = self._nodes.pull(at, is_next=True)
        return verdict


def _found(verdict: Verdict) -> frozenset[object]:
    """Return what is found, or will be if it lasts."""
    pending = (one for one in verdict.pending if one.lacks in ("time", "steps", "startup"))
    return frozenset(
        [*(key_of(one.candidate) for one in verdict.findings), *(("", *key_of(one.candidate)) for one in pending)]
    )


def _pause(run: SimulatedRun, verdict: Verdict, at: int, *, is_new: bool) -> int:
    """Return the seconds until the next poll."""
    if is_new or run.is_changing(at, run.pace):
        return run.pace
    remaining = [one.remaining for one in verdict.pending if one.remaining is not None]
    slow = max(1, min(SLOW, int(min(remaining, default=SLOW))))
    quiet = (_until_step_end(run, at, pause) for pause in QUIET)
    return next((pause for pause in quiet if not (_found(verdict) or run.is_changing(at, pause))), slow)


def _until_step_end(run: SimulatedRun, at: int, pause: int) -> int:
    """Return the seconds until the last end of a long step in the pause, or the pause.

    An exporter reads each second, so what it compares are whole steps but for a second. Many short ones are as well.
    """
    last, end = at, ceil(run.step_end(float(at)))
    while run.plan.step >= LONG_STEP and last < end <= at + pause:
        last, end = end, ceil(run.step_end(float(end)))
    return last - at or pause
