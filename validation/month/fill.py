"""Judge a run, with the quiet stretches filled in instead of polled.

In a quiet stretch no loss is near a limit (losses.py), no rank stands still for long and no checkpoint is overdue. The
diagnosis then gets the losses of the same parts at once, instead of measuring them poll by poll. Its history observes
the ranks once a minute, and before and after each long pause. So its windows, baselines and history are as if it had
polled each second, as the control shows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isnan

import numpy as np
from validation.month.losses import measure, near_ends, next_ends
from validation.month.plan import Plan
from validation.month.polls import PLANNED_NUMBERS, Polls, Readings
from validation.month.steps import Array

from rankscope_exporter.diagnosis.history import MINUTE
from rankscope_exporter.diagnosis.judge import RunJudge, Verdict
from rankscope_exporter.diagnosis.persistence import STEPS_RATE, USEFUL
from rankscope_exporter.diagnosis.readings import RankReading
from rankscope_exporter.diagnosis.thresholds import Thresholds

AFTER_START = 60  # polls after the first step of a job
STANDSTILL, PLANNED_STANDSTILL = 40.0, 200.0  # seconds: less than the shortest hangs
PAUSE = 8.0  # seconds: shorter ones have no effect on the shortest hang
ENTERS = 5  # polls in which all ranks have entered a pause


def verdicts(plan: Plan, is_whole: bool = True) -> Iterator[Verdict]:
    """Yield the verdicts of all polls; if not whole, without those in quiet stretches."""
    polls, judge = Polls(plan), RunJudge((plan.name, "0"))
    filler = None if is_whole else _Filler(polls, judge)
    poll = 0
    while poll < len(polls):
        if filler and not judge._losses.open and not judge._states.open and (end := filler.fill(poll)) > poll:
            poll = end
            continue
        yield judge.update(float(polls.times[poll]), polls.readings(poll))
        poll += 1


class _Filler:
    """Fills the quiet stretches of a run."""

    def __init__(self, polls: Polls, judge: RunJudge) -> None:
        self._polls, self._judge, self._limits = polls, judge, Thresholds()
        self._following = next_ends(polls)
        self._losses = measure(polls, self._following)
        keys = list(self._losses.values)
        rows = np.column_stack(list(self._losses.values.values())).tolist()
        self._rows = [{key: value for key, value in zip(keys, row, strict=True) if not isnan(value)} for row in rows]
        self._needed = np.append(np.flatnonzero(self._is_near()), len(polls))
        self._observed = np.flatnonzero(_observed(polls) | _is_minute(polls))

    def fill(self, begin: int) -> int:
        """Give the judge what it would have measured from this poll on; return the next poll that it has to judge."""
        end = int(self._needed[np.searchsorted(self._needed, begin)])
        polls, judge = self._polls, self._judge
        observed = self._observed[slice(*np.searchsorted(self._observed, [begin, end]))]
        for poll in observed.tolist():
            judge.history.observe(float(polls.times[poll]), list(polls.readings(poll).values()))
            if judge.history._checkpoint > self._limits.checkpoint:
                end = poll
                break
        if end == begin:
            return end
        at = int(np.searchsorted(polls.times, judge._readings[-1][0]))
        while (after := int(self._following[at])) < end:
            self._add_part(self._losses.beginning[at], after)
            at = after
        judge._last = _LazyReadings(polls, end - 1)
        return end

    def _add_part(self, part: int, end: int) -> None:
        judge, when, losses = self._judge, float(self._polls.times[end]), self._rows[part]
        judge._remember(when, _LazyReadings(self._polls, end))
        of_run = {kind: loss for (kind, rank), loss in losses.items() if rank is None and kind not in _REFERENCES}
        judge.history.add(when, of_run, losses[USEFUL], losses[STEPS_RATE])
        judge._losses._parts.add(when, float(self._losses.seconds[part]), float(self._losses.steps[part]), losses)

    def _is_near(self) -> Array:
        """Return the polls in which a job starts, a part ends with a loss near its limit, or a hang is near."""
        polls = self._polls
        is_near = np.zeros(len(polls), bool)
        is_near[self._losses.ends[near_ends(polls, self._losses)]] = True
        for job in polls.jobs():
            begun = job.start + int((polls.steps[job] == 0).sum())
            is_near[job.start : begun + AFTER_START] = True
        last = np.fmax(polls.last_checkpoint, polls.began)
        is_near |= polls.times - last > self._limits.checkpoint_overdue - MINUTE
        stalled, is_planned = _stalled(polls)
        return is_near | (stalled > np.where(is_planned, PLANNED_STANDSTILL, STANDSTILL))


_REFERENCES = (USEFUL[0], STEPS_RATE[0])


class _LazyReadings(Mapping[int, RankReading]):
    """The readings of a poll, which are made when they are read."""

    def __init__(self, polls: Polls, poll: int) -> None:
        self._polls, self._poll = polls, poll

    @cached_property
    def _readings(self) -> Readings:
        return self._polls.readings(self._poll)

    def __getitem__(self, rank: int) -> RankReading:
        return self._readings[rank]

    def __iter__(self) -> Iterator[int]:
        return iter(self._readings)

    def __len__(self) -> int:
        return len(self._readings)


def _stalled(polls: Polls) -> tuple[Array, Array]:
    """Return the seconds since any rank made progress, and whether a rank is in a planned phase."""
    return polls.times - polls.since.max(axis=1), np.isin(polls.phase, PLANNED_NUMBERS).any(axis=1)


def _is_minute(polls: Polls) -> Array:
    """Return the polls at which the history adds a minute."""
    found, last = np.zeros(len(polls), bool), -np.inf
    for poll, when in enumerate(polls.times.tolist()):
        if when - last >= MINUTE:
            found[poll], last = True, when
    return found


def _observed(polls: Polls) -> Array:
    """Return the polls in which ranks enter a long pause, and those before and after its end."""
    stalled, _ = _stalled(polls)
    found = np.zeros(len(polls), bool)
    for end in np.flatnonzero((stalled[:-1] > PAUSE) & (stalled[1:] < stalled[:-1])).tolist():
        begin = end - int(stalled[end])
        for first, last in ((begin - ENTERS, begin + ENTERS), (end, end + 2)):
            found[max(first, 0) : last] = True
    return found
