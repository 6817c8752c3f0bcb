"""Step alignment of real jobs with four ranks distinguishes a rotating straggler from a slow network.

Measured on the host with gloo, and on the device if the host does not wait for other ranks.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from testing.job import launch
from testing.job.device import ASYNCHRONOUS, GLOO
from testing.job.launch import TrainingJob
from testing.torchrun import forked

from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.ranks.step_alignment import Alignment, StepAlignment

STEPS = 60
DELAY = 80  # milliseconds, far more than what four ranks on two busy cores vary


@dataclass(frozen=True)
class Kind:
    """A device with its computing time in a step, and the possible numbers of its aligned steps."""

    device: str
    computing: float
    """Milliseconds."""
    steps: Collection[int]


KINDS = (
    # The start of the first step is unknown.
    Kind(GLOO, 0, (STEPS - 1,)),
    # The hook detects a device at the end of a step, and nothing reads the measurement of the last step.
    Kind(ASYNCHRONOUS, 10, range(STEPS - 4, STEPS)),
)


class ForkedJob(TrainingJob):
    """The same job, whose ranks share one import of torch."""

    def command(self) -> list[str]:
        return forked(self.ranks, Path(launch.__file__).with_name("__main__.py"), self._directory, self.device)


@dataclass
class Result:
    """The alignment at the end of a job."""

    alignments: Sequence[Alignment]

    @property
    def floor(self) -> float:
        """Transfer floor as a ratio of the step."""
        return self.alignments[0].floor / self.alignments[0].seconds

    @property
    def skew(self) -> float:
        """Skew as a ratio of the step."""
        return sum(a.skew for a in self.alignments) / sum(a.seconds for a in self.alignments)


def train_and_align(run_dir: Path, directory: Path, kind: Kind, delay: str) -> Result:
    """Train with a delay that is `rotating` over the ranks, or in each `transfer`."""
    job = ForkedJob(directory / delay, delay, run_dir, kind.device)
    alignment, run_directory = StepAlignment(), RunDirectory([run_dir])

    def align() -> list[Alignment]:
        alignments = alignment.take(run_directory.scan(with_steps=True).ranks)
        return [one for one in alignments if one.key[0] == delay]

    healthy = {"forward": kind.computing, "backward": 0, "checkpoint_every": 0, "loader_workers": 0, "steps": STEPS}
    job.start(**healthy, **{delay: DELAY}, reraises=True, measures_every_step=True)
    try:
        while job.is_running():
            align()
            time.sleep(0.2)
    finally:
        job.terminate()
    assert job.has_succeeded(), job.last_output()
    return Result(align())


@pytest.mark.parametrize("kind", KINDS, ids=[GLOO, ASYNCHRONOUS])
def test_a_rotating_straggler_is_distinguished_from_a_slow_network(run_dir: Path, tmp_path: Path, kind: Kind) -> None:
    rotating, network = (train_and_align(run_dir, tmp_path, kind, delay) for delay in ("rotating", "transfer"))
    for result in (rotating, network):
        assert [alignment.key[1] for alignment in result.alignments] == ["0", "1", "2", "3"]
        (steps,) = {alignment.steps for alignment in result.alignments}
        assert steps in kind.steps
    assert rotating.floor < 0.3 < 0.6 < network.floor, (rotating, network)
    assert network.skew < 0.2 < 0.4 < rotating.skew, (rotating, network)
    blames = [sum(alignment.blame.values()) for alignment in rotating.alignments]
    assert max(blames) < 0.5 * sum(blames), blames
    assert sum(alignment.blame["forward"] for alignment in rotating.alignments) > 0.8 * sum(blames)
