"""A Python that other users can start: this one, or the system's if this one is in a private home directory."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SYSTEM = "/usr/bin/python{}.{}".format(*sys.version_info)
CHECK = "import torch, rankscope, rankscope_exporter"


def as_user(uid: int, *command: str) -> list[str]:
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", *command]


def environment() -> dict[str, str]:
    """Return variables with which the system's Python finds this one's packages, and the working tree's."""
    found = [entry for entry in sys.path if "site-packages" in entry or entry.startswith(str(ROOT))]
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *found]), "PYTHONDONTWRITEBYTECODE": "1"}


def for_user(uid: int) -> str:
    """Return the path of a Python that the user can start. Raises RuntimeError if none has the packages."""
    complaints = []
    for python in (sys.executable, SYSTEM):
        # With a shell of the user: setpriv looks the program up with root's permissions.
        command = as_user(uid, "sh", "-c", f'exec "{python}" -c "{CHECK}"')
        variables: Mapping[str, str] = os.environ | environment()
        done = subprocess.run(command, env=variables, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return python
        complaints.append(done.stderr.strip().splitlines()[-1])
    raise RuntimeError("another user can start no Python that has torch and Rankscope: " + "; ".join(complaints))
