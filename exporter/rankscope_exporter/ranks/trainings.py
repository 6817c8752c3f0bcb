"""Trainings that share a run's name, distinguished by the process that has started their ranks, such as torchrun.

Two jobs of one Slurm batch script, or of two containers with the same RANKSCOPE_RUN, have the same ranks of one run.
The oldest one keeps the run's name, and the others are the runs `NAME (2)`, `NAME (3)` and so on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path

from rankscope.record.process_stat import read_process_stat
from rankscope_exporter.ranks.lock_processes import UNKNOWN, Process
from rankscope_exporter.ranks.rank import Key, Rank, is_alone

Name = tuple[str, str]
"""A run's name and its owner."""


class Trainings:
    """The launchers of the ranks whose run's name several trainings have had, and their numbers."""

    def __init__(self) -> None:
        self._launchers: dict[Path, Process] = {}
        self._numbers: dict[tuple[Name, Process], int] = {}

    def number(self, ranks: Collection[Rank]) -> Sequence[Rank]:
        """Return the ranks with the numbers of their trainings.

        A launcher's ranks are a training if at least two live, each with another number. Ranks of launchers with one
        rank each, such as pods, could belong to either of two trainings: they keep the name, and compete for it.
        """
        names = {name for name, _ in self._numbers} | set(_contested(ranks))
        for rank in ranks:
            if rank.snapshot.alive and _name(rank) in names and rank.snapshot.path not in self._launchers:
                self._launchers[rank.snapshot.path] = _launcher(rank)
        for name in names:
            self._number_trainings(name, [rank for rank in ranks if rank.snapshot.alive and _name(rank) == name])
        present = {(_name(rank), self._launcher(rank)) for rank in ranks}
        self._numbers = {key: number for key, number in self._numbers.items() if key in present}
        paths = {rank.snapshot.path for rank in ranks if _name(rank) in names}
        self._launchers = {path: launcher for path, launcher in self._launchers.items() if path in paths}
        return [replace(rank, training=self._numbers.get((_name(rank), self._launcher(rank)), 1)) for rank in ranks]

    def _launcher(self, rank: Rank) -> Process:
        return self._launchers.get(rank.snapshot.path, UNKNOWN)

    def _number_trainings(self, name: Name, ranks: Collection[Rank]) -> None:
        """Give each launcher of a training the first number that has none of its ranks."""
        by_launcher = _complete(ranks, self._launchers)
        taken: dict[int, set[Key]] = defaultdict(set)
        for (of, launcher), number in self._numbers.items():
            if of == name:
                taken[number] |= by_launcher.get(launcher, set())
        for launcher, keys in sorted(by_launcher.items(), key=lambda item: item[0].start):
            if (name, launcher) not in self._numbers:
                number = next(number for number in count(1) if taken[number].isdisjoint(keys))
                self._numbers[name, launcher] = number
                taken[number] |= keys


def _contested(ranks: Collection[Rank]) -> Iterator[Name]:
    """Yield the names with two living ranks of one number, which train with others."""
    living = Counter(rank.key for rank in ranks if rank.snapshot.alive and not is_alone(rank.snapshot.info))
    for (name, _, owner), number in living.items():
        if number > 1:
            yield name, owner


def _complete(ranks: Collection[Rank], launchers: Mapping[Path, Process]) -> Mapping[Process, set[Key]]:
    """Return the ranks of each launcher that has started several, each with another number."""
    keys: dict[Process, list[Key]] = defaultdict(list)
    for rank in ranks:
        if not is_alone(rank.snapshot.info):
            keys[launchers[rank.snapshot.path]].append(rank.key)
    return {one: set(of_it) for one, of_it in keys.items() if one != UNKNOWN and 1 < len(of_it) == len(set(of_it))}


def _name(rank: Rank) -> Name:
    return rank.key[0], rank.key[2]


def _launcher(rank: Rank) -> Process:
    with suppress(OSError):
        if parent := read_process_stat(rank.snapshot.lock_pid).parent if rank.snapshot.lock_pid else 0:
            return Process(parent, read_process_stat(parent).start)
    return UNKNOWN
