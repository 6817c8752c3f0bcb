"""Frameworks: watched if the job has imported them, never imported by the hook, and restored exactly."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from testing.own_record import snapshot
from testing.ways import WAYS

import rankscope
from rankscope.attach import Attachment
from rankscope.probes.frameworks import FRAMEWORKS, Framework

ROOT = Path(__file__).resolve().parents[3]


class Trainer:
    """The watched part of transformers' Trainer."""

    def __init__(self) -> None:
        self.weight = torch.nn.Parameter(torch.ones(2))
        self._optimizer = torch.optim.SGD([self.weight], lr=0.1)

    def train(self) -> None:
        for _ in range(3):
            self.weight.sum().backward()
            self._optimizer.step()

    def evaluate(self) -> float:
        self.train()
        return 0.5

    def _save_checkpoint(self) -> None:
        raise OSError("no space left on device")


METHODS = dict(vars(Trainer))


@pytest.fixture
def transformers(attached: Attachment, load: Callable[..., ModuleType]) -> Any:
    """Add a module of that name after the hook is installed."""
    return load("transformers.trainer", Trainer=Trainer)


def phases() -> dict[str, float]:
    return snapshot().phase_seconds


def test_an_evaluation_absorbs_what_it_contains(transformers: Any) -> None:
    trainer = transformers.Trainer()
    trainer.train()
    before = phases()
    assert trainer.evaluate() == 0.5
    after = phases()
    assert after["evaluation"] > 0
    assert after["backward"] == before["backward"]


def test_the_error_of_a_failed_checkpoint_is_raised(transformers: Any) -> None:
    trainer = transformers.Trainer()
    trainer.train()
    with pytest.raises(OSError, match="no space left"):
        trainer._save_checkpoint()
    assert phases()["checkpoint"] > 0


def test_a_framework_without_one_of_the_methods_is_watched(transformers: Any) -> None:
    trainer = transformers.Trainer()
    assert not hasattr(trainer, "predict")
    trainer.train()
    assert Trainer.evaluate is not METHODS["evaluate"]


@pytest.mark.usefixtures("hook_fails_loudly")
def test_no_framework_is_imported() -> None:
    packages = {package.partition(".")[0] for framework in FRAMEWORKS for package in framework.packages}
    before = set(sys.modules)
    rankscope.instrument()
    Trainer().train()
    assert {name for name in set(sys.modules) - before if name.partition(".")[0] in packages} == set()


@pytest.mark.parametrize("framework", FRAMEWORKS, ids=lambda framework: framework.packages[0])
@pytest.mark.parametrize(("file", "line"), [("testing/ways/frameworks.py", "from {}"), ("pyproject.toml", '"{}==')])
def test_every_watched_framework_has_a_training_script(framework: Framework, file: str, line: str) -> None:
    text = (ROOT / file).read_text(encoding="utf-8")
    assert any(line.format(package.partition(".")[0]) in text for package in framework.packages)


def test_every_training_script_of_a_framework_is_run() -> None:
    source = (ROOT / "testing/ways/frameworks.py").read_text(encoding="utf-8")
    ways = [f"frameworks.{name}" for name in re.findall(r"^def (\w+)\(run: Run\)", source, re.MULTILINE)]
    assert sorted(ways) == sorted(WAYS["frameworks"][1])
