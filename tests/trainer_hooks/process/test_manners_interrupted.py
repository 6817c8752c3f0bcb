"""Ctrl-C in a notebook or a shell: training goes on, and its phases stay right."""

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


@pytest.mark.parametrize(("steps_before", "stride"), [("0", "23"), ("4", "7")])  # in start-up, and later
def test_after_ctrl_c_anywhere_in_the_hook_phases_and_steps_are_right(
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
def test_a_model_whose_backward_raised_goes_when_the_script_drops_it(find_unused: bool) -> None:
    network = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))

    def fail(_: torch.Tensor) -> None:
        raise KeyboardInterrupt

    network[0].bias.register_hook(fail)
    model = DistributedDataParallel(network, find_unused_parameters=find_unused)
    gc.disable()  # what has to be collected is not gone in time
    try:
        with pytest.raises(KeyboardInterrupt):
            model(torch.ones(1, 2)).sum().backward()
        reference = weakref.ref(model)
        del model
        assert reference() is None
    finally:
        gc.enable()


def test_what_an_interrupted_optimizer_left_open_is_closed_by_its_next_step(attached: Attachment) -> None:
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
