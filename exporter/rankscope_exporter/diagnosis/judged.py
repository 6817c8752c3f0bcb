"""The runs that an exporter diagnoses, and why it does not diagnose the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from math import inf
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.history import UNREADABLE
from rankscope_exporter.diagnosis.judge import RunJudge, Verdict
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.thresholds import Thresholds

RUNS_LIMIT, RANKS_LIMIT = 16, 64
"""The most runs, and ranks of them, that are diagnosed per owner. A node has one or two runs and at most 16 GPUs."""
REMEMBERED_LIMIT = 2 * RUNS_LIMIT
"""The most runs that are remembered per owner: an owner can start a run with a new name each second."""
FORGET_AFTER = 900.0
"""Seconds after which a run that is not seen is forgotten. Ended ranks are shown for ten minutes."""


class Judged(NamedTuple):
    """The verdicts of the runs that are diagnosed now, and the reasons why others are not."""

    verdicts: tuple[Verdict, ...]
    not_judged: Mapping[Run, str]
    """`ranks_elsewhere`, `world_sizes_differ`, `world_size_unknown`, `gpus_unknown`, `too_many_runs`, or
    `impossible_values`."""


class Judges:
    """Diagnoses all runs, with a RunJudge for each. Not thread-safe."""

    def __init__(self, thresholds: Thresholds | None = None) -> None:
        self._thresholds = thresholds or Thresholds()
        self.judges: dict[Run, RunJudge] = {}
        self._seen: dict[Run, float] = {}
        self._saved: dict[Run, tuple[Mapping[str, Any], float]] = {}
        """The saved state of runs that were not seen yet, and how old it was at the start."""
        self._started: float | None = None
        """The time of the first readings."""

    def state(self, at: float, *, is_last: bool = False) -> list[Any]:
        """Return the state that a restart of the exporter needs, as JSON values."""
        return [[*run, judge.state(at, is_last=is_last)] for run, judge in self.judges.items()]

    def restore(self, run: Run, state: Mapping[str, Any], downtime: float) -> None:
        """Restore what `state` returned of a run, `downtime` seconds later, when the run is seen again."""
        self._saved[run] = state, downtime

    def _judge(self, run: Run) -> RunJudge:
        if run not in self.judges:
            self.judges[run] = judge = RunJudge(run, self._thresholds)
            saved = self._saved.pop(run, None)
            if saved and self._started is not None:
                state, downtime = saved
                with suppress(*UNREADABLE):  # without a readable state the run has no history
                    judge.restore(state, self._started - downtime)
        return self.judges[run]

    def update(self, at: float, readings: Mapping[Run, Iterable[RankReading]], known_gpus: Iterable[str]) -> Judged:
        """Add the readings of one moment, by run. `known_gpus` are the UUIDs of the GPUs that are read."""
        gpus = frozenset(known_gpus)
        self._started = at if self._started is None else self._started
        by_rank = {run: {one.rank: one for one in of_newest_start(ranks)} for run, ranks in readings.items()}
        not_judged = {run: reason for run, ranks in by_rank.items() if (reason := reason_not_judged(ranks, gpus))}
        for run in _too_many(by_rank, not_judged):
            not_judged[run] = "too_many_runs"
        verdicts = []
        for run, ranks in by_rank.items():
            if run not in not_judged:
                self._seen[run] = at
                try:
                    verdicts.append(self._judge(run).update(at, ranks))
                except (ArithmeticError, ValueError):  # of a forged record; other runs must not be affected
                    not_judged[run] = "impossible_values"
        self._forget(at)
        return Judged(tuple(verdicts), not_judged)

    def _forget(self, at: float) -> None:
        """Forget runs that were not seen for a long time, and the oldest runs of an owner who has too many."""
        kept: dict[str, int] = defaultdict(int)
        for run, seen in sorted(self._seen.items(), key=lambda item: item[1], reverse=True):
            kept[run[1]] += 1
            if at - seen > FORGET_AFTER or kept[run[1]] > REMEMBERED_LIMIT:
                del self.judges[run], self._seen[run]


def of_newest_start(ranks: Iterable[RankReading]) -> Sequence[RankReading]:
    """Return the ranks without those that had ended before the living ones began: they belong to an earlier start.

    After it, the same numbers may be on another node, or the run may have fewer ranks.
    """
    ranks = tuple(ranks)
    began = min((one.began for one in ranks if one.ended is None), default=-inf)
    return [one for one in ranks if one.ended is None or one.ended.at >= began]


def reason_not_judged(ranks: Mapping[int, RankReading], gpus: frozenset[str]) -> str:
    """Return the reason why this node cannot judge a run; empty if it can."""
    living = [one for one in ranks.values() if one.ended is None]
    sizes = {one.world_size for one in living or ranks.values()}
    if len(sizes) != 1:
        return "world_sizes_differ"
    size = sizes.pop()
    if not size:
        return "world_size_unknown"
    # Compare the size first: a forged world size may be too large for the set. A run of one may have any number.
    if size > len(ranks) or not (size == 1 or ranks.keys() >= set(range(size))):
        return "ranks_elsewhere"
    return "gpus_unknown" if any(one.uuid and one.uuid not in gpus for one in living) else ""


def _too_many(by_rank: Mapping[Run, Mapping[int, RankReading]], not_judged: Mapping[Run, str]) -> list[Run]:
    """Return the runs beyond each owner's limits: the ended ones first, then the youngest."""
    by_owner: dict[str, list[Run]] = defaultdict(list)
    for run in by_rank.keys() - not_judged.keys():
        by_owner[run[1]].append(run)
    return [run for runs in by_owner.values() for run in _beyond_the_limits(by_rank, runs)]


def _age(ranks: Collection[RankReading]) -> tuple[bool, float]:
    """Return a key that sorts ended runs after living ones, and young runs after old ones."""
    return all(one.ended for one in ranks), min(one.began for one in ranks)


def _beyond_the_limits(by_rank: Mapping[Run, Mapping[int, RankReading]], runs: Iterable[Run]) -> Iterator[Run]:
    judged = ranks = 0
    for run in sorted(runs, key=lambda run: _age(by_rank[run].values())):
        if judged >= RUNS_LIMIT or ranks + len(by_rank[run]) > RANKS_LIMIT:
            yield run
        else:
            judged, ranks = judged + 1, ranks + len(by_rank[run])
