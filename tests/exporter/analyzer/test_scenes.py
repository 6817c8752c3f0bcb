"""Faults of all kinds, on both clocks: a run on one node and the same run on several have the same findings."""

from __future__ import annotations

import pytest
from testing.split_training import QUIET, SCENES, SplitTrial, SteppingTraining, opened

from rankscope_exporter.diagnosis.facts import DEVICE, HOST

LATER = 4.0
"""Seconds by which an analyzer may find a fault later in the run: a second is judged with the readings up to it."""


@pytest.mark.parametrize("clock", [HOST, DEVICE])
@pytest.mark.parametrize("name", SCENES)
def test_a_run_on_several_nodes_has_the_findings_of_one_node(name: str, clock: str) -> None:
    trial = SplitTrial(SteppingTraining(8, clock=clock))
    onset = trial.play(SCENES[name])
    alone, split = opened(trial.alone), opened(trial.split)
    assert split.keys() == alone.keys()
    assert bool(split) == (name not in QUIET)
    for key, finding in split.items():
        assert finding.severity == alone[key].severity
        assert finding.candidate.ratio == pytest.approx(alone[key].candidate.ratio, abs=0.03)
        assert finding.opened == pytest.approx(alone[key].opened, abs=LATER)
        assert finding.opened >= onset
