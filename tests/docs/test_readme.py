"""The README's loops do what the README says, and its numbers of faults are those of the gauntlet."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from testing.records import record_in
from validation.gauntlet.case import GPUS_ALONE, HOST_AND_DEVICE
from validation.gauntlet.cases import all_cases

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"

SLEPT = 0.05  # seconds

# The functions that the README's loops call.
SCRIPT = f"""
import time
import torch

SLEPT = {SLEPT}

model = torch.nn.Linear(3, 1)

def get_batch(split):
    time.sleep(SLEPT)
    return torch.ones(4, 3), torch.ones(4, 1)

def augment(x):
    time.sleep(SLEPT)
    return x

def batches():
    for _ in range(5):
        yield get_batch("train")

def update(x, y):
    (model(x) - y).square().mean().backward()
"""


def test_a_loop_without_a_data_loader_names_its_time(run_dir: Path) -> None:
    instrument, *loops = re.findall(r"^```python\n(.*?)^```$", README.read_text(), re.MULTILINE | re.DOTALL)
    # The time of the first loops is start-up, until their first step.
    script = "".join([instrument, SCRIPT, *loops, *loops])
    subprocess.run([sys.executable, "-c", script], check=True)
    rank = record_in(run_dir)
    assert rank["steps"] == 2 * 5
    assert rank["samples"] == 2 * 5 * 4
    assert rank["tokens"] == 2 * 5 * 4 * 3
    assert rank.phase_seconds["augment"] >= SLEPT
    assert rank.phase_seconds["data_wait"] >= 6 * SLEPT  # get_batch() in a phase, and five times through timed()


def faults_of(report: str) -> set[str]:
    """Return the faults that a report of the gauntlet has."""
    text = (ROOT / "docs/measurements" / report).read_text()
    return set(re.findall(r"^\| `([fg]\d+_\w+)` \|", text, re.MULTILINE))


def test_the_numbers_of_faults_are_those_of_the_cases_and_of_the_reports() -> None:
    devices = [case.devices for case in all_cases().values() if not case.is_decoy]
    alone, only_there = devices.count(GPUS_ALONE), devices.count(HOST_AND_DEVICE)
    gloo, asynchronous = faults_of("gauntlet.md"), faults_of("gauntlet_asynchronous.md")
    text = " ".join(README.read_text().split())
    assert only_there == 2
    assert f"{len(gloo)} of {len(devices)} faults run over gloo" in text
    assert len(gloo) == len(devices) - only_there
    assert f"{len(asynchronous)} run on a simulated asynchronous device" in text
    assert f"{len(asynchronous) - only_there} of those about ranks, and two that only such a device can have" in text
    assert len(asynchronous) == len(gloo) - alone + only_there
    assert f"| | gloo: {len(gloo)} faults | asynchronous device: {len(asynchronous)} faults |" in text
