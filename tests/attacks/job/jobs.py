"""Jobs and users for these attacks: a small job in this process or in a new one, and users other than root."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
from tests.attacks.users import MALLORY

# Imports come first: the tests' interpreter may be in a home directory that other users may not enter.
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
# Without an optimizer: making one imports torch's compiler, which takes most of the time.
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
# Several jobs for the cost of one: forked ranks have their own records.
FOR_EACH = """
def for_each(values, live):
    for value in values:
        if os.fork() == 0:
            live(value)
            os._exit(0)
        assert os.wait()[1] == 0, value
"""


def train(steps: int = 5) -> list[float]:
    """Make a few steps and return the parameters after them."""
    weights = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=0.1)
    for _ in range(steps):
        (weights * weights).sum().backward()
        optimizer.step()
    return [float(weight) for weight in weights.detach()]


def process(user: int, code: str, *arguments: object, imports: str = "") -> list[str]:
    """Return the command of a process of a user; user 0 is the user who runs the tests."""
    before = AS_USER.format(imports=imports, user=user) if user else "import os, resource, sys\n"
    return [sys.executable, "-c", before + code, *map(str, arguments)]


def attack(code: str, *arguments: object) -> str:
    """Run the code as the attacker and return its output."""
    return subprocess.run(process(MALLORY, code, *arguments), check=True, capture_output=True, text=True).stdout


def run_job(
    code: str, run_dir: Path | bytes | str, user: int = 0, **environment: str | bytes
) -> subprocess.CompletedProcess[str]:
    """Run a job that has the `step` of TRAIN."""
    quiet = {"RANKSCOPE_RUN": "job", "RANKSCOPE_QUIET": "1", "RANKSCOPE_RUN_DIR": run_dir}
    command = process(user, TRAIN + code, imports=HOOK)
    return subprocess.run(
        command, env={**os.environ, **quiet, **environment}, check=False, capture_output=True, text=True, timeout=60
    )
