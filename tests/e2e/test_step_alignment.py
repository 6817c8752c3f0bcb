"""Real jobs of four ranks, aligned while they run: a straggler that rotates is told apart from a slow network."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rankscope_exporter.run_directory import RunDirectory
from rankscope_exporter.step_alignment import Alignment, StepAlignment

JOB = Path(__file__).parents[1] / "trainer_hooks" / "jobs" / "straggler.py"
STEPS = 100


def aligned(run_dir: Path, what: str) -> Sequence[Alignment]:
    """What the alignment has found when the job is over."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "RANKSCOPE_RUN": what}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    alignment, run_directory = StepAlignment(30.0), RunDirectory([run_dir])
    with subprocess.Popen([*launch, str(JOB), what, str(STEPS)], env=environment) as job:
        while job.poll() is None:
            alignment.take(run_directory.scan(with_steps=True).ranks)
            time.sleep(0.5)
    assert job.returncode == 0
    return [found for found in alignment.take(run_directory.scan(with_steps=True).ranks) if found.key[0] == what]


def test_a_rotating_straggler_and_a_slow_network_are_told_apart(run_dir: Path) -> None:
    rotating, network = aligned(run_dir, "rotating"), aligned(run_dir, "network")
    for alignments in (rotating, network):
        assert [alignment.key[1] for alignment in alignments] == ["0", "1", "2", "3"]
        assert {alignment.steps for alignment in alignments} == {STEPS - 1}
    floors = [alignments[0].floor / alignments[0].seconds for alignments in (rotating, network)]
    skews = [sum(a.skew for a in alignments) / sum(a.seconds for a in alignments) for alignments in (rotating, network)]
    assert floors[0] < 0.3 < 0.6 < floors[1], (floors, skews)
    assert skews[1] < 0.2 < 0.4 < skews[0], (floors, skews)
    blames = [sum(alignment.blame.values()) for alignment in rotating]
    assert max(blames) < 0.5 * sum(blames), blames
    assert sum(alignment.blame["data_wait"] for alignment in rotating) > 0.8 * sum(blames)
