"""What these attacks share: a small job in this process or in one of its own, and users who are not root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tests.attacks.users import MALLORY

# Imports come first: the interpreter that runs the tests may lie in a home directory that others may not enter.
AS_USER = """
import fcntl, os, resource, stat, subprocess, sys
from pathlib import Path
from testing.users import become
{imports}
become({user})
"""
HOOK = """
import importlib, torch
import rankscope.attach, rankscope.record.writer, torch.utils.data
for name in [*rankscope.probes.all_probes(), *rankscope.probes.late_probes()]:
    importlib.import_module(f"rankscope.probes.{name}")
"""
# Without an optimizer: making one imports torch's compiler, which takes longer than all the rest.
TRAIN = """
import rankscope, torch
from rankscope import attach
torch.set_num_threads(1)
weights = torch.nn.Parameter(torch.ones(2))

def step():
    weights.sum().backward()
    rankscope.step()

rankscope.instrument()
"""
# Several jobs at the price of one: ranks that are started by fork have records of their own.
FOR_EACH = """
def for_each(values, live):
    for value in values:
        if os.fork() == 0:
            live(value)
            os._exit(0)
        assert os.wait()[1] == 0, value
"""


def train(steps: int = 5) -> list[float]:
    """A few steps; the parameters after them."""
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(steps):
        (weights * weights).sum().backward()
        optimizer.step()
    return [float(weight) for weight in weights.detach()]


def process(user: int, code: str, *arguments: object, imports: str = "") -> list[str]:
    """The command of a process of that user's; a user 0 is who runs the tests."""
    before = AS_USER.format(imports=imports, user=user) if user else "import os, resource, sys\n"
    return [sys.executable, "-c", before + code, *map(str, arguments)]


def attack(code: str, *arguments: object) -> str:
    """What the second user's process has printed."""
    return subprocess.run(process(MALLORY, code, *arguments), check=True, capture_output=True, text=True).stdout


def run_job(
    code: str, run_dir: Path | bytes | str, user: int = 0, **environment: str | bytes
) -> subprocess.CompletedProcess[str]:
    """A job with TRAIN's `step` that has ended, by itself or not."""
    quiet = {"RANKSCOPE_RUN": "job", "RANKSCOPE_QUIET": "1", "RANKSCOPE_RUN_DIR": run_dir}
    command = process(user, TRAIN + code, imports=HOOK)
    return subprocess.run(
        command, env={**os.environ, **quiet, **environment}, check=False, capture_output=True, text=True, timeout=60
    )
