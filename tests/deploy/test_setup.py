"""The installations of `make` targets, and their first message."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a directory with the Makefile and without a .venv."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    return tmp_path


def commands(checkout: Path, target: str) -> list[str]:
    """Return the commands that a target would run."""
    made = ["make", "--dry-run", "--directory", str(checkout), "--no-print-directory", target]
    return subprocess.run(made, check=True, capture_output=True, text=True).stdout.splitlines()


def test_helm_is_installed_without_a_dependency_group(checkout: Path) -> None:
    assert commands(checkout, "helm") == ["deploy/setup.sh helm python3"]


def test_check_first_says_what_it_does_and_what_it_installs(checkout: Path) -> None:
    first, second, *_ = commands(checkout, "check")
    assert first.startswith("echo 'rankscope: check runs ")
    assert "installed them" in first
    assert second == "deploy/setup.sh venv python3 check"
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/.installed-check").touch()
    assert "installed them" not in commands(checkout, "check")[0]
