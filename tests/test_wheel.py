"""The wheel, installed where nothing else of ours is: what a training image and a node would get."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

TRAIN = """
import torch
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(1, 2)).sum().backward()
optimizer.step()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(directory), str(ROOT)]
    subprocess.run(command, check=True)
    (wheel,) = directory.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def bin_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a virtual environment with the wheel and nothing else."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True)
    install = [str(venv / "bin/pip"), "install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)]
    subprocess.run(install, check=True)
    return venv / "bin"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env={**clean, **environment}
    )


def test_the_wheel_holds_both_packages_and_nothing_else(wheel: Path) -> None:
    tops = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"rankscope", "rankscope_exporter"}


def test_the_wheel_requires_nothing_unless_asked(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    needs = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert needs
    assert all("extra ==" in need for need in needs)


def test_the_hook_works_from_the_wheel_alone(bin_dir: Path) -> None:
    answer = run(bin_dir / "rankscope", "--version")
    assert answer.stdout.startswith("rankscope 0.")
    assert run(bin_dir / "python", "-c", "import rankscope; rankscope.step()").returncode == 0


def test_the_exporter_says_in_one_line_what_it_lacks(bin_dir: Path) -> None:
    answer = run(bin_dir / "rankscope-exporter")
    assert answer.returncode == 2
    assert answer.stderr.count("\n") == 1
    assert "pip install 'rankscope[exporter]'" in answer.stderr


def test_the_installed_hook_and_exporter_work_with_what_they_need(bin_dir: Path, run_dir: Path) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(bin_dir.parent)}))
    # The development environment's packages behind the wheel's own, without its link to the checkout.
    (site / "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(bin_dir / "python", "-c", "import rankscope, rankscope_exporter; print(rankscope.__file__)")
    assert str(site) in where.stdout
    trained = run(bin_dir / "python", "-c", TRAIN, RANKSCOPE="1", RANKSCOPE_RUN_DIR=str(run_dir))
    assert trained.returncode == 0, trained.stderr
    assert len(list(run_dir.glob("*.rank"))) == 1
    help_text = run(bin_dir / "rankscope-exporter", "--help")
    assert help_text.returncode == 0
    assert "--web.listen-address" in help_text.stdout
