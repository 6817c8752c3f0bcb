"""A Python that other users can start: this one, or the system's where this one lies in a home directory of its own."""

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
    """The command as another user's."""
    return ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--clear-groups", "--no-new-privs", *command]


def environment() -> dict[str, str]:
    """For the system's Python: what this one finds its packages in, the working tree's among them."""
    found = [entry for entry in sys.path if "site-packages" in entry or entry.startswith(str(ROOT))]
    return {"PYTHONPATH": os.pathsep.join([str(ROOT), *found]), "PYTHONDONTWRITEBYTECODE": "1"}


def for_user(uid: int) -> str:
    """Its path. Raises RuntimeError with the complaint where that user can start none that has the packages."""
    complaints = []
    for python in (sys.executable, SYSTEM):
        # By a shell of the user's: what setpriv starts itself is still looked up with root's rights.
        command = as_user(uid, "sh", "-c", f'exec "{python}" -c "{CHECK}"')
        variables: Mapping[str, str] = os.environ | environment()
        done = subprocess.run(command, env=variables, cwd=ROOT, check=False, capture_output=True, text=True)
        if done.returncode == 0:
            return python
        complaints.append(done.stderr.strip().splitlines()[-1])
    raise RuntimeError("another user can start no Python that has torch and Rankscope: " + "; ".join(complaints))
