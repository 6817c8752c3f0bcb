"""Real jobs of four ranks, aligned while they run: a straggler that rotates is told apart from a slow network.

By the host's clock over gloo, and by the device's where the host does not wait for other ranks.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import TrainingJob

from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

STEPS = 100
DELAY = 50  # milliseconds
REFERENCE_INTERVAL = 0.5  # seconds: some of these steps


@dataclass(frozen=True)
class Kind:
    """A device, how long it computes in a step, by which clock its steps are aligned, and how many of them."""

    device: str
    computing: float
    """Milliseconds."""
    clock: str
    steps: Collection[int]


KINDS = (
    # The beginning of the first step is not known.
    Kind(GLOO, 0, "host", (STEPS - 1,)),
    # The hook looks for a device when a step has ended, and after the last step nothing reads what was measured of it.
    Kind(ASYNCHRONOUS, 10, "device", range(STEPS - 4, STEPS)),
)


@dataclass
class Found:
    """What the alignment has found when a job is over, and which reference steps its ranks have shown meanwhile."""

    alignments: Sequence[Alignment]
    references: dict[str, set[tuple[str, int]]]

    @property
    def floor(self) -> float:
        """As a share of the step."""
        return self.alignments[0].floor / self.alignments[0].seconds

    @property
    def skew(self) -> float:
        return sum(a.skew for a in self.alignments) / sum(a.seconds for a in self.alignments)


def aligned(run_dir: Path, directory: Path, kind: Kind, what: str) -> Found:
    """Train with a delay of this name: `rotating` over the ranks, or of each `transfer`."""
    job = TrainingJob(directory / what, what, run_dir, kind.device)
    alignment, run_directory = StepAlignment(REFERENCE_INTERVAL), RunDirectory([run_dir])
    references: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def look() -> list[Alignment]:
        taken = alignment.take(run_directory.scan(with_steps=True).ranks)
        found = [one for one in taken if one.key[0] == what]
        for one in found:
            if one.reference:
                references[one.key[1]].add((one.reference.clock, one.reference.step.number))
        return found

    healthy = {"forward": kind.computing, "backward": 0, "checkpoint_every": 0, "loader_workers": 0, "steps": STEPS}
    job.start(**healthy, **{what: DELAY}, reraises=True, measures_every_step=True)
    try:
        while job.is_running():
            look()
            time.sleep(0.2)
    finally:
        job.terminate()
    assert job.has_succeeded(), job.last_output()
    return Found(look(), references)


@pytest.mark.parametrize("kind", KINDS, ids=[GLOO, ASYNCHRONOUS])
def test_a_rotating_straggler_and_a_slow_network_are_told_apart(run_dir: Path, tmp_path: Path, kind: Kind) -> None:
    rotating, network = (aligned(run_dir, tmp_path, kind, what) for what in ("rotating", "transfer"))
    for found in (rotating, network):
        assert [alignment.key[1] for alignment in found.alignments] == ["0", "1", "2", "3"]
        (steps,) = {alignment.steps for alignment in found.alignments}
        assert steps in kind.steps
        shown = set.intersection(*found.references.values())
        assert {clock for clock, _ in shown} == {kind.clock}, found.references
    assert rotating.floor < 0.3 < 0.6 < network.floor, (rotating, network)
    assert network.skew < 0.2 < 0.4 < rotating.skew, (rotating, network)
    blames = [sum(alignment.blame.values()) for alignment in rotating.alignments]
    assert max(blames) < 0.5 * sum(blames), blames
    assert sum(alignment.blame["forward"] for alignment in rotating.alignments) > 0.8 * sum(blames)
