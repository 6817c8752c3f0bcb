"""The install pages: run their `sh` blocks in a clean directory, and check the files that they quote."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import yaml
from testing.job.device import GLOO
from testing.servers import free_port

from rankscope.record.writer import SYSTEM_RUN_DIR

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs/install"
CLONED = {"pyproject.toml", "README.md", "LICENSE", "trainer_hooks", "exporter", "deploy", "grafana", "examples"}
PORTS = ("10417", "10418", "9090", "9093")
TIMEOUT = 200  # seconds; two shared cores install the package and start three servers and a job

PRINTED = {
    "one-box.md": ["mine: 2 ranks on 1 node", "RankscopeRankZeroLagging", "Rank 0"],
    "node.md": ["SUCCESS: prometheus.yml is valid", 'up{instance="localhost:'],
    "existing-prometheus.md": ["rules found", "SUCCESS: prometheus.yml is valid", 'up{instance="localhost:', "\n1\n"],
    "existing-alertmanager.md": ["SUCCESS", "gpu-team", "slow storage, known"],
    "upgrade.md": [],
}
"""The expected output of each page's commands, in this order. No command may fail."""
ALONE = {"one-box.md": [pytest.mark.alone, pytest.mark.xdist_group(GLOO)]}
"""The page whose job's alerts are checked, in the worker of the gauntlet over gloo: the demo's takes longer."""


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)


def script_of(page: str, directory: Path) -> str:
    """Return the page's commands with free ports, without sudo, and with /etc below the directory."""
    script = "".join(blocks(page, "sh")).replace("sudo ", "").replace("/etc/", f"{directory}/etc/")
    for port in PORTS:
        script = re.sub(rf"\b{port}\b", str(free_port()), script)
    return script


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Return a copy of the tree, like a clone."""
    checkout = tmp_path / "rankscope"
    unused = {path.name for path in ROOT.iterdir()} - CLONED
    shutil.copytree(ROOT, checkout, ignore=lambda _, names: unused.intersection(names) | {"__pycache__"})
    return checkout


def make_environment(directory: Path) -> None:
    """Create the virtual environment of one-box.md, with access to torch and the packages of this one."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(directory)], check=True)
    (site_packages,) = (directory / "lib").glob("python*/site-packages")
    (site_packages / "torch.pth").write_text(sysconfig.get_path("purelib"))
    # It needs its own pip: the pip of this environment would install there.
    for name, module in (("torchrun", "torch.distributed.run"), ("pip", "pip._internal.cli.main")):
        script = directory / "bin" / name
        script.write_text(f"#!{directory}/bin/python\nfrom {module} import main\nmain()\n")
        script.chmod(0o755)


def output_of(script: str, checkout: Path) -> str:
    """Return the script's output, and stop its remaining processes. The script must not fail."""
    offline = {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    environment = {**os.environ, **offline, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    log = checkout.parent / "output.log"
    with log.open("w") as output:
        shell = subprocess.Popen(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=checkout,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            status = shell.wait(TIMEOUT)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(shell.pid, signal.SIGTERM)
    assert status == 0, log.read_text()
    return log.read_text()


@pytest.mark.usefixtures("run_dir")
@pytest.mark.parametrize("page", [pytest.param(page, marks=ALONE.get(page, ())) for page in PRINTED])
def test_a_pages_commands_work_as_described(page: str, checkout: Path) -> None:
    if "venv/bin/activate" in script_of(page, checkout):
        make_environment(checkout.parent / "one-box/venv")
    cloned = set(checkout.rglob("*"))
    output = output_of(script_of(page, checkout), checkout)
    if page == "one-box.md":
        assert set(checkout.rglob("*")) == cloned
    position = 0
    for text in PRINTED[page]:
        position = output.find(text, position)
        assert position >= 0, f"{text!r} is missing, or in another order, in:\n{output}"


def test_every_page_with_commands_is_run() -> None:
    assert {page.name for page in PAGES.glob("*.md") if blocks(page.name, "sh")} == PRINTED.keys()


def test_the_pages_route_is_the_shipped_one() -> None:
    shipped = yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())["route"]
    (text,) = re.findall(r"^route:\n.*?(?=^receivers:)", blocks("existing-alertmanager.md", "sh")[0], re.M | re.S)
    (ours,) = yaml.safe_load(text)["route"]["routes"]
    assert ours.pop("matchers") == ['alertname=~"Rankscope.+"']
    assert {**ours, "receiver": shipped["receiver"]} == shipped


def test_inhibit_rules_match_only_our_alerts() -> None:
    for rule in yaml.safe_load((ROOT / "deploy/alertmanager/alertmanager.yml").read_text())["inhibit_rules"]:
        for matchers in (rule["source_matchers"], rule["target_matchers"]):
            assert re.match(r'alertname=~?"Rankscope', matchers[0]), matchers


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd here")
@pytest.mark.parametrize("name", ["rankscope-exporter.service", "rankscope-analyzer.service"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    program = tmp_path / "rankscope-exporter"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    unit = tmp_path / name
    text = (ROOT / "deploy/node" / name).read_text()
    unit.write_text(text.replace("ExecStart=rankscope-exporter", f"ExecStart={program}"))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(unit)], check=True, capture_output=True, text=True
    )
    assert name not in done.stderr


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="no systemd here")
def test_tmpfiles_creates_a_run_directory_for_all_users(tmp_path: Path) -> None:
    configuration = ROOT / "deploy/node/rankscope.conf"
    command = ["systemd-tmpfiles", "--create", f"--root={tmp_path}", "-"]
    subprocess.run(command, input=configuration.read_text(), text=True, check=True)
    made = (tmp_path / SYSTEM_RUN_DIR.relative_to("/")).stat()
    assert made.st_mode & 0o7777 == 0o1777
