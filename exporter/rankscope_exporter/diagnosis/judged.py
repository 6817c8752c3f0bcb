"""The runs that an exporter diagnoses, and why it does not diagnose the others."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from math import inf
from typing import Any, NamedTuple

from rankscope_exporter.diagnosis.judge import Readings, RunJudge, Verdict
from rankscope_exporter.diagnosis.limits import CPU_SECONDS, CpuTime, fair_shares
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.diagnosis.saved import UNREADABLE
from rankscope_exporter.diagnosis.thresholds import Thresholds

RUNS_LIMIT, RANKS_LIMIT = 16, 64
"""The most runs, and ranks of them, that are diagnosed per owner. A node has one or two runs and at most 16 GPUs."""
RUNS_OF_ALL_OWNERS = 64
REMEMBERED_LIMIT = 2 * RUNS_LIMIT
"""The most runs that are remembered per owner: an owner can start a run with a new name each second."""
REMEMBERED_BYTES = 8 * 2**20
"""The most memory of all runs, by `RunJudge.kept_bytes`. A run of 16 ranks takes a third of it."""
FORGET_AFTER = 900.0
"""Seconds after which a run that is not seen is forgotten. Ended ranks are shown for ten minutes."""
LIMITS = ("too_many_runs", "too_much_cpu_time")
"""Reasons why a run is not diagnosed that are limits of its owner."""


class Limits(NamedTuple):
    """The most that is diagnosed, so that no owner's runs delay those of others."""

    runs: int = RUNS_LIMIT
    ranks: int = RANKS_LIMIT
    """Per owner."""
    remembered_bytes: float = REMEMBERED_BYTES
    cpu_seconds: float = CPU_SECONDS
    """Of an update of all runs."""


class Judged(NamedTuple):
    """The verdicts of the runs that are diagnosed now, and the reasons why others are not."""

    verdicts: tuple[Verdict, ...]
    not_judged: Mapping[Run, str]
    """`ranks_elsewhere`, `world_sizes_differ`, `world_size_unknown`, `gpus_unknown`, `impossible_values`,
    or one of LIMITS."""


class Judges:
    """Diagnoses all runs, with a RunJudge for each. Not thread-safe."""

    def __init__(
        self,
        thresholds: Thresholds | None = None,
        principal: Callable[[str], str] = str,
        cpu_clock: Callable[[], float] = float,
        limits: Limits | None = None,
    ) -> None:
        """Set the function that returns the user an owner counts as, and the clock of the thread's CPU time."""
        self._limits = limits or Limits()
        self._thresholds = thresholds or Thresholds()
        self._principal = principal
        self._cpu_time = CpuTime(cpu_clock, self._limits.cpu_seconds)
        self._owners: list[str] = []
        """The principals of the remembered and present runs, in the order in which they came."""
        self.judges: dict[Run, RunJudge] = {}
        self._seen: dict[Run, float] = {}
        self._gpus: dict[Run, frozenset[str]] = {}
        """The UUIDs of the ranks of each run when it was last judged: a GPU that is lost has been read before."""
        self._saved: dict[Run, tuple[Mapping[str, Any], float]] = {}
        """The saved state of runs that were not seen yet, and how old it was at the start."""
        self.started: float | None = None
        """When the caller started. If it is not set, the time of the first readings."""

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
            if saved and self.started is not None:
                state, downtime = saved
                with suppress(*UNREADABLE):  # without a readable state the run has no history
                    judge.restore(state, self.started - downtime)
        return self.judges[run]

    def update(self, at: float, readings: Mapping[Run, Iterable[RankReading]], known_gpus: Iterable[str]) -> Judged:
        """Add the readings of one moment, by run. `known_gpus` are the UUIDs of the GPUs that are read."""
        gpus = frozenset(known_gpus)
        self.started = at if self.started is None else self.started
        by_rank = {run: {one.rank: one for one in of_newest_start(ranks)} for run, ranks in readings.items()}
        not_judged = {}
        for run, ranks in by_rank.items():
            if reason := reason_not_judged(ranks, gpus | self._gpus.get(run, frozenset())):
                not_judged[run] = reason
        not_judged |= self._beyond_limits(at, by_rank, [run for run in by_rank if run not in not_judged])
        verdicts = []
        for run, ranks in by_rank.items():
            if run not in not_judged:
                self._seen[run] = at
                self._gpus[run] = frozenset(one.uuid for one in ranks.values())
                try:
                    with self._cpu_time.measured(run, len(ranks)):
                        verdicts.append(self._judge(run).update(at, ranks))
                except (
                    ArithmeticError,
                    LookupError,
                    TypeError,
                    ValueError,
                ):  # of a forged record; other runs must not be affected
                    not_judged[run] = "impossible_values"
        self._forget(at)
        self._cpu_time.forget(by_rank.keys() | self.judges.keys())
        return Judged(tuple(verdicts), not_judged)

    def _beyond_limits(self, at: float, by_rank: Mapping[Run, Readings], runs: Iterable[Run]) -> dict[Run, str]:
        """Return the runs beyond the limits and the reason: of each owner the ended ones first, then the youngest."""
        found = self._by_owner(runs)
        within = {owner: [*_within_limits(by_rank, runs, self._limits)] for owner, runs in found.items()}
        shares = fair_shares({owner: len(runs) for owner, runs in within.items()}, RUNS_OF_ALL_OWNERS)
        within = {owner: runs[: int(shares[owner])] for owner, runs in within.items()}
        exceeding = self._cpu_time.exceeding(at, within, by_rank)
        kept = {*chain(*within.values())}
        beyond = dict.fromkeys((run for run in chain(*found.values()) if run not in kept), "too_many_runs")
        return beyond | dict.fromkeys(exceeding, "too_much_cpu_time")

    def _by_owner(self, runs: Iterable[Run]) -> Mapping[str, list[Run]]:
        """Return the runs by principal, in the order in which these came."""
        found: dict[str, list[Run]] = {owner: [] for owner in self._owners}
        for run in runs:
            found.setdefault(self._principal(run[1]), []).append(run)
        self._owners = [*found]
        return found

    def _forget(self, at: float) -> None:
        """Forget runs that were not seen for a long time, and the oldest runs of an owner who has too many.

        If all runs together need too much memory, forget those that are not seen now, and keep fewer readings.
        """
        by_owner = self._by_owner(sorted(self._seen, key=self._seen.__getitem__, reverse=True))
        needed = {run: judge.kept_bytes(is_growing=self._seen[run] == at) for run, judge in self.judges.items()}
        demands = {owner: sum(needed[run] for run in runs) for owner, runs in by_owner.items()}
        for owner, share in fair_shares(demands, self._limits.remembered_bytes).items():
            left = share
            for number, run in enumerate(by_owner[owner]):
                left -= needed[run]
                is_unseen = self._seen[run] < at
                if is_unseen and (left < 0.0 or number >= REMEMBERED_LIMIT or at - self._seen[run] > FORGET_AFTER):
                    del self.judges[run], self._seen[run], needed[run]
                    self._gpus.pop(run, None)
            of_owner = [run for run in by_owner[owner] if run in needed]
            total = sum(needed[run] for run in of_owner)
            for run in of_owner:
                self.judges[run].limit_readings(min(1.0, share / total))
        self._owners = [owner for owner, runs in by_owner.items() if any(run in needed for run in runs)]
        if self.started is not None and at - self.started > FORGET_AFTER:
            self._saved = {}


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


def _age(ranks: Collection[RankReading]) -> tuple[bool, float]:
    """Return a key that sorts ended runs after living ones, and young runs after old ones."""
    return all(one.ended for one in ranks), min(one.began for one in ranks)


def _within_limits(by_rank: Mapping[Run, Readings], runs: Iterable[Run], limits: Limits) -> Iterator[Run]:
    """Yield an owner's runs up to its limits: the living ones first, then the oldest."""
    judged = ranks = 0
    for run in sorted(runs, key=lambda run: _age(by_rank[run].values())):
        if judged < limits.runs and ranks + len(by_rank[run]) <= limits.ranks:
            judged, ranks = judged + 1, ranks + len(by_rank[run])
            yield run
