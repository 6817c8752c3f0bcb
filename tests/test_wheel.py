"""The wheel in a separate environment, as in a training image or on a node."""

from __future__ import annotations

import json
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
    """Return the directory of programs of a virtual environment that contains only the wheel."""
    venv = tmp_path_factory.mktemp("venv")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    pip = [sys.executable, "-m", "pip", f"--python={venv / 'bin/python'}", "--disable-pip-version-check"]
    install = [*pip, "install", "--quiet", "--no-index", str(wheel)]
    subprocess.run(install, check=True)
    return venv / "bin"


def run(*command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    return subprocess.run(
        list(map(str, command)), capture_output=True, text=True, check=False, env={**clean, **environment}
    )


def test_the_wheel_contains_only_the_two_packages(wheel: Path) -> None:
    names = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {name for name in names if not name.endswith(".dist-info")} == {"rankscope", "rankscope_exporter"}


def test_the_wheel_has_only_optional_requirements(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (metadata,) = (name for name in archive.namelist() if name.endswith("METADATA"))
    requirements = [line for line in archive.read(metadata).decode().splitlines() if line.startswith("Requires-Dist")]
    assert requirements
    assert all("extra ==" in requirement for requirement in requirements)


def test_the_hook_works_with_only_the_wheel(bin_dir: Path) -> None:
    result = run(bin_dir / "rankscope", "--version")
    assert result.stdout.startswith("rankscope 0.")
    assert run(bin_dir / "python", "-c", "import rankscope; rankscope.step()").returncode == 0


def test_the_exporter_reports_missing_packages_in_one_line(bin_dir: Path) -> None:
    result = run(bin_dir / "rankscope-exporter")
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "pip install 'rankscope[exporter]'" in result.stderr


def test_top_reports_missing_packages_in_one_line(bin_dir: Path) -> None:
    result = run(bin_dir / "rankscope", "top", "--once")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.count("\n") == 1
    assert "pip install 'rankscope[top] @ " in result.stderr


SLOW_RANK = """
import os, sys, time
from multiprocessing import get_context
from pathlib import Path
from rankscope.record import layout
from rankscope.record.writer import RankWriter
from rankscope.timeline.timeline import Timeline

STEP = 0.05

def train(rank, barrier):
    writer = RankWriter()
    timeline = Timeline(writer)
    info = dict.fromkeys(("local_rank", "node", "uuid", "backend", "torch_version", "rankscope_version"), "")
    info |= {"run": "r", "rank": str(rank), "world_size": "2", "group": "0-1", "pid": str(os.getpid())}
    writer.publish(Path(sys.argv[1]), f"r.{rank}", info)
    while True:
        for phase, wait in (
            (layout.DATA_WAIT, lambda: time.sleep(STEP * rank)),
            (layout.FORWARD, lambda: time.sleep(STEP)),
            (layout.COLLECTIVE_WAIT, barrier.wait),
        ):
            opened = timeline.enter(phase)
            wait()
            timeline.leave(opened)
        timeline.step()

fork = get_context("fork")
barrier = fork.Barrier(2)
ranks = [fork.Process(target=train, args=(rank, barrier), daemon=True) for rank in range(2)]
for rank in ranks:
    rank.start()
print("training", flush=True)
sys.stdin.read()
"""
PYDANTIC = ("pydantic", "annotated_types", "typing_extensions", "typing_inspection")
TOP_PACKAGES = ("nvidia_ml_py", "pynvml", "prometheus_client", "rich", "pygments", "markdown_it", "mdurl", *PYDANTIC)


@pytest.fixture(scope="module")
def top_dir(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of programs of a virtual environment with only the wheel and its extra `top`."""
    venv = tmp_path_factory.mktemp("top")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(venv)], check=True)
    site = Path(sysconfig.get_path("purelib", vars={"base": str(venv)}))
    zipfile.ZipFile(wheel).extractall(site)
    for package in TOP_PACKAGES:
        for found in Path(sysconfig.get_path("purelib")).glob(f"{package}*"):
            (site / found.name).symlink_to(found)
    return venv / "bin"


def test_top_names_the_slow_rank_with_only_its_own_packages(top_dir: Path, run_dir: Path) -> None:
    job = [str(top_dir / "python"), "-c", SLOW_RANK, str(run_dir)]
    with subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as training:
        assert training.stdout is not None
        training.stdout.readline()
        top = (top_dir / "python", "-m", "rankscope.cli.launch", "top", "--run-dir", run_dir)
        text, report = run(*top, "--once"), run(*top, "--json")
        training.communicate("")
    assert (text.returncode, text.stderr, report.stderr) == (0, "", "")
    assert "Rank 1 slows down run r by " in text.stdout
    assert "its data is late" in text.stdout
    assert "\x1b" not in text.stdout
    ((finding,),) = ([*run["findings"]] for run in json.loads(report.stdout)["runs"])
    assert (finding["kind"], finding["cause"], finding["rank"]) == ("straggler", "data_wait", 1)


def test_the_installed_hook_and_exporter_work_with_their_requirements(bin_dir: Path, run_dir: Path) -> None:
    site = Path(sysconfig.get_path("purelib", vars={"base": str(bin_dir.parent)}))
    # Add the development environment's packages, but not its link to the checkout.
    (site / "development.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = run(bin_dir / "python", "-c", "import rankscope, rankscope_exporter; print(rankscope.__file__)")
    assert str(site) in where.stdout
    trained = run(bin_dir / "python", "-c", TRAIN, RANKSCOPE="1", RANKSCOPE_RUN_DIR=str(run_dir))
    assert trained.returncode == 0, trained.stderr
    assert len(list(run_dir.glob("*.rank"))) == 1
    help_text = run(bin_dir / "rankscope-exporter", "--help")
    assert help_text.returncode == 0
    assert "--web.listen-address" in help_text.stdout
