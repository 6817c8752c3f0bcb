"""Ctrl-C in a notebook or a shell: training continues, and its phases stay correct."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from rankscope.attach import Attachment

JOB = Path(__file__).parents[1] / "jobs" / "interrupted.py"


@pytest.mark.parametrize(("steps_before", "stride"), [("0", "23"), ("4", "7")])  # in startup, and later
def test_phases_and_steps_are_correct_after_ctrl_c_anywhere_in_the_hook(
    run_dir: Path, steps_before: str, stride: str
) -> None:
    environment = {**os.environ, "RANKSCOPE_RUN": "job"}
    command = [sys.executable, str(JOB), steps_before, stride]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads(done.stdout)
    assert result["errors"] == []
    assert result["points"] > 200


@pytest.mark.usefixtures("attached", "process_group")
@pytest.mark.parametrize("find_unused", [False, True])
@pytest.mark.filterwarnings("ignore:find_unused_parameters=True was specified")
def test_a_model_whose_backward_raised_is_freed_when_the_script_drops_it(find_unused: bool) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def fail(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    network[0].bias.register_hook(fail)
    model = DistributedDataParallel(network, find_unused_parameters=find_unused)
    gc.disable()  # the model must be freed without a collection
    try:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2)).sum().backward()
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_the_next_step_closes_the_open_phase_of_an_interrupted_optimizer(attached: Attachment) -> None:
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)

    def interrupted() -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        optimizer.step(interrupted)
    for _ in range(2):
        weights.sum().backward()
        optimizer.step()
    assert attached.timeline.steps.count == 2
    assert attached.timeline.open_phases[1] is None
