"""The hook's part of gpu-check on the asynchronous device: its checks hold there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from testing.asynchronous_device import BACKEND, asynchronous_device, launch
from testing.servers import free_port
from validation.gpu_check import hook

ROOT = Path(__file__).parents[2]


def train(way: str) -> None:
    """Print the outcome of each check; this device does not wait for `item`."""
    torch.set_num_threads(1)
    with asynchronous_device(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "_sleep", lambda _cycles: launch(5))
        patch.setattr(torch.Tensor, "item", lambda _tensor: torch.cuda.synchronize())
        patch.setattr(hook, "TOLERANCE", 0.5)  # this device's collectives take time, too
        dist.init_process_group(BACKEND)
        for check in [*hook.clocks(way, "cpu"), hook.identical(way, "cpu")]:
            print(f"{check.outcome}\t{check.about}\t{check.ours}, {check.reference}")
        dist.destroy_process_group()


@pytest.mark.parametrize("way", ["fsdp2", "by_hand"])
def test_the_device_clock_agrees_with_the_delays_and_parameters_are_identical(way: str, tmp_path: Path) -> None:
    rank = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "1", "RANK": "0"}
    environment = {**os.environ, **rank, "LOCAL_RANK": "0", "RANKSCOPE_RUN_DIR": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, __file__, way]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    for about in ("device: steps", "device: collective_wait", "parameters with the hook"):
        assert f"ok\t{about}" in ran.stdout


if __name__ == "__main__":
    train(sys.argv[1])
