"""The runs of a gauntlet, their order and their targets, drawn from a seed: reproducible, and unknown in advance."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import RANKS
from validation.gauntlet.arena import GPUS
from validation.gauntlet.case import LOUD, Case, Target
from validation.gauntlet.cases import all_cases

# Both should be named, or one without contradicting the other.
PAIRS = (
    ("f03_slow_loader", "f07_memory_held"),
    ("f09_rank_zero_works", "f14_congested_network"),
    ("f08_synchronous_checkpoints", "f10_throttling"),
    ("f23_checkpoint_overdue", "f22_synchronized_metrics"),
    ("f02_slow_reads", "f24_scale_collapse"),
)
LONGEST_WAIT = 4.0  # seconds before the onset


@dataclass(frozen=True)
class Run:
    """One line of the schedule."""

    names: tuple[str, ...]
    seed: int
    dose: float
    wait: float
    """Seconds before the onset."""
    targets: tuple[Target, ...]
    device: str = GLOO
    nodes: int = 1

    @property
    def id(self) -> str:
        """The run's name in the ledger."""
        device = "" if self.device == GLOO else f"@{self.device}"
        device += f"@{self.nodes}-nodes" if self.nodes > 1 else ""
        return f"{'+'.join(self.names)}{device}/{self.dose:g}/{self.seed}"

    @property
    def cases(self) -> list[tuple[Case, Target]]:
        """Each case with its target."""
        return [(all_cases()[name], target) for name, target in zip(self.names, self.targets, strict=True)]

    @property
    def kind(self) -> str:
        """The kind by which the summary counts: fault, decoy or pair."""
        if len(self.names) > 1:
            return "pair"
        return "decoy" if self.cases[0][0].is_decoy else "fault"

    def line(self) -> dict[str, Any]:
        """Return the part of the ledger's line that is known before the run."""
        return {
            "id": self.id,
            "case": "+".join(self.names),
            "title": " and ".join(case.title for case, _ in self.cases),
            "simulated": "; ".join(case.simulated for case, _ in self.cases if case.simulated),
            "kind": self.kind,
            "device": self.device,
            "seed": self.seed,
            "dose": self.dose,
            "targets": [{"rank": target.rank, "spare_gpu": target.spare_gpu} for target in self.targets],
        }


def draw(names: Sequence[str], seed: int, dose: float = LOUD, device: str = GLOO, nodes: int = 1) -> Run:
    """Return the run for these arguments, always the same. Two faults hit different ranks."""
    chance = random.Random(f"{names}/{seed}")
    ranks = chance.sample(range(RANKS), len(names))
    gpus = chance.sample(range(RANKS, GPUS), len(names))
    targets = tuple(Target(rank, gpu, dose) for rank, gpu in zip(ranks, gpus, strict=True))
    return Run(tuple(names), seed, dose, chance.uniform(0, LONGEST_WAIT), targets, device, nodes)


def schedule(
    seeds: Iterable[int],
    doses: Sequence[float] = (LOUD,),
    pairs: bool = True,
    device: str = GLOO,
    nodes: int = 1,
) -> Iterator[Run]:
    """Yield all runs at the first dose, and faults with doses at the others, shuffled for each seed.

    On several nodes, only cases about ranks.
    """
    for seed in seeds:
        runs = list(chain.from_iterable(_runs(seed, dose, dose == doses[0], pairs, device, nodes) for dose in doses))
        random.Random(seed).shuffle(runs)
        yield from runs


def _runs(seed: int, dose: float, is_first_dose: bool, pairs: bool, device: str, nodes: int) -> Iterator[Run]:
    needed = {device} if nodes == 1 else {device, ASYNCHRONOUS}
    available = {name: case for name, case in all_cases().items() if needed <= {*case.devices}}
    for name, case in available.items():
        if is_first_dose or (case.has_doses and not case.is_decoy):
            yield draw([name], seed, dose, device, nodes)
    if is_first_dose and pairs:
        yield from (draw(pair, seed, dose, device, nodes) for pair in PAIRS if available.keys() >= {*pair})
