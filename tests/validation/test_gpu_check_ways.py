"""gpu-check's ways of training on the asynchronous device: what a GPU will be asked, the hook can tell there."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from testing.simulated_node import free_port
from validation.gpu_check import hook
from validation.gpu_check.exporter import environment

JOB = Path(__file__).parent / "asynchronous_job.py"
STEPS = 4


def told(way: str, directory: Path) -> dict[str, Any]:
    """What the job's check of both clocks tells of one rank."""
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    variables = {**environment(), **rank, "LOCAL_RANK": "0", "RANKSCOPE_RUN_DIR": str(directory)}
    command = [sys.executable, str(JOB), way, str(STEPS)]
    ran = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    line: dict[str, Any] = json.loads(ran.stdout)
    return line


@pytest.mark.parametrize(
    ("way", "issued"),
    [
        ("fsdp2", {"all_gather": 14, "reduce_scatter": 7}),
        ("hsdp", {"all_gather": 14, "reduce_scatter": 7, "all_reduce": 7}),
        ("by_hand", {"all_reduce": 14}),
        ("async_op", {"all_reduce": 14}),
    ],
)
def test_a_communication_that_takes_long_is_the_devices_wait_in_every_way(
    way: str, issued: dict[str, int], tmp_path: Path
) -> None:
    line = told(way, tmp_path)
    outcomes = {check.about.partition(": ")[2]: check.outcome for check in hook.judged(way, [line])}
    assert line["issued"] == {op: STEPS * times for op, times in issued.items()}
    assert [outcomes[op] for op in issued] == ["ok"] * len(issued)
    assert outcomes["device waits"] == "ok"
    assert len(line["steps"]) == STEPS
    assert line["device"]["collective_wait"] > max(
        line["device"][phase] for phase in ("other", "data_wait", "optimizer")
    )
    assert line["host"]["collective_wait"] < line["device"]["collective_wait"]
