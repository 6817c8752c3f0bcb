"""Real jobs of four ranks, aligned while they run: a straggler that rotates is told apart from a slow network.

By the host's clock over gloo, and by the device's where the host waits for nobody.
"""

from __future__ import annotations

import subprocess
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from testing.torchrun import environment, torchrun

from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

TESTS = Path(__file__).parents[1]
STEPS = 100
REFERENCE_INTERVAL = 0.5  # seconds: some of these steps


@dataclass(frozen=True)
class Kind:
    """A job that can be rotating or have a slow network, by which clock it is aligned, and how many of its steps."""

    job: Path
    clock: str
    steps: Collection[int]
    slow_phase: str
    """In which the straggler of each step is slow."""


# Of the first step nobody knows the beginning.
GLOO = Kind(TESTS / "e2e/straggler.py", "host", (STEPS - 1,), "data_wait")
# The hook looks for a device when a step has ended, and after the last step nobody reads what was measured of it.
ASYNCHRONOUS = Kind(TESTS / "e2e/asynchronous_straggler.py", "device", range(STEPS - 4, STEPS), "forward")


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


def aligned(run_dir: Path, kind: Kind, what: str) -> Found:
    variables = environment(RANKSCOPE_RUN=what, PYTHONPATH=str(TESTS.parent))
    alignment, run_directory = StepAlignment(REFERENCE_INTERVAL), RunDirectory([run_dir])
    references: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def look() -> list[Alignment]:
        taken = alignment.take(run_directory.scan(with_steps=True).ranks)
        found = [one for one in taken if one.key[0] == what]
        for one in found:
            if one.reference:
                references[one.key[1]].add((one.reference.clock, one.reference.step.number))
        return found

    with subprocess.Popen(torchrun(4, kind.job, what, STEPS), env=variables) as job:
        while job.poll() is None:
            look()
            time.sleep(0.2)
    assert job.returncode == 0
    return Found(look(), references)


@pytest.mark.parametrize("kind", [GLOO, ASYNCHRONOUS], ids=["gloo", "asynchronous"])
def test_a_rotating_straggler_and_a_slow_network_are_told_apart(run_dir: Path, kind: Kind) -> None:
    rotating, network = aligned(run_dir, kind, "rotating"), aligned(run_dir, kind, "network")
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
    assert sum(alignment.blame[kind.slow_phase] for alignment in rotating.alignments) > 0.8 * sum(blames)
