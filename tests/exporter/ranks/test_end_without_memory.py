"""A real rank that ends for lack of memory, from its exception to the sentence that the exporter shows."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.trainer_hooks.scripts import job
from tests.trainer_hooks.test_exhaustion import FAKE_CUDA, FULL_IN_BACKWARD

from rankscope_exporter.diagnosis.words import evidence, sentence
from rankscope_exporter.ranks.collectors.alignment import AlignedSteps
from rankscope_exporter.ranks.collectors.network import Network
from rankscope_exporter.ranks.collectors.rank_processes import RankProcesses
from rankscope_exporter.ranks.diagnosis_service import DiagnosisService
from rankscope_exporter.ranks.run_directory import RunDirectory


@pytest.mark.parametrize("has_cuda", [True, False])
def test_the_exporter_says_that_a_rank_ran_out_of_memory_and_where(run_dir: Path, has_cuda: bool) -> None:
    directory = RunDirectory([run_dir])
    service = DiagnosisService(AlignedSteps(), RankProcesses(), Network(Path("/nonexistent")), lambda _at: {})
    with job(FULL_IN_BACKWARD, setup=FAKE_CUDA if has_cuda else "") as process:
        service.update(directory.scan())
        process.communicate("")
    (verdict,) = service.update(directory.scan()).look.judged.verdicts
    (candidate,) = [one.candidate for one in (*verdict.findings, *verdict.pending)]
    said = sentence(verdict.run, candidate)
    assert said.startswith("Rank 0 (")
    assert said.endswith(" of run job ran out of GPU memory in backward")
    numbers = "74 GiB allocated at the peak; 79 GiB available in all; 20 GiB requested."
    assert evidence(candidate) == (numbers if has_cuda else "Steps: 1.")
