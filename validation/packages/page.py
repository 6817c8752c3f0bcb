"""Run the commands of docs/install/node.md in a booted Debian 12, as a reader types them."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from testing.report import ROOT, Check
from validation.packages.systems import DEBIAN_12, BootedSystem, bootstrap

PAGE = ROOT / "docs/install/node.md"
BUILD_LOCK = "exporter/requirements-build.txt"
SECTIONS = (
    "Install the package",
    "Runs that span nodes",
    "TLS and a password",
    "The run directory",
    "Remove it",
    "A virtual environment instead of a package",
)
"""The order of the sections: each starts from the state after the one before."""
OFFLINE = 'sudo() {{ "$@"; }}; export PIP_NO_INDEX=1 PIP_FIND_LINKS={wheels} PIP_QUIET=1; cd {root}; '
ANSWER = 'APT::Get::Assume-Yes "true";'
BACKGROUND = re.compile(r" &$", re.M)


def commands(section: str) -> str:
    """Return a section's commands: `console` blocks, and `sh` blocks without a process in the background."""
    (text,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S)
    blocks = re.findall(r"^```(?:sh|console)\n(.*?)^```$", text, re.M | re.S)
    return "".join(block for block in blocks if not BACKGROUND.search(block))


def download_wheels(directory: Path) -> None:
    """Download the packages of a virtual environment on a node, for a machine without a network."""
    pip = [sys.executable, "-m", "pip", "download", "-qq", "--disable-pip-version-check", f"--dest={directory}"]
    locks = [f"--requirement={ROOT / name}" for name in ("deploy/packages/requirements.txt", BUILD_LOCK)]
    subprocess.run([*pip, "--only-binary=:all:", "--python-version=3.11", *locks], check=True)


def check(scratch: Path) -> list[Check]:
    """Return a check for each section."""
    bootstrap(DEBIAN_12)
    wheels = scratch / "wheels"
    download_wheels(wheels)
    with BootedSystem(DEBIAN_12, [ROOT, wheels], scratch / "page.log") as node:
        node.do(f"echo '{ANSWER}' > /etc/apt/apt.conf.d/answer")
        return list(_check(node, OFFLINE.format(wheels=wheels, root=ROOT)))


def _check(node: BootedSystem, before: str) -> Iterator[Check]:
    for section in SECTIONS:
        done = node.run(before + commands(section))
        active = node.run("systemctl is-active rankscope-exporter").stdout.strip()
        holds = done.returncode == 0 and active == ("inactive" if section == "Remove it" else "active")
        found = f"the service is {active}" if holds else f"{done.stdout}{done.stderr}"[-300:]
        yield Check(f"“{section}”", holds, found)
