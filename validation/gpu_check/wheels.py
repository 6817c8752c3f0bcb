"""What the exporter imports, as wheels: fetched where there is a network, unpacked where there is none.

A virtual environment with `--system-site-packages` would be the usual way. But where the machine's Python is a virtual
environment itself it shows the packages of the Python below and not the torch of that environment, and pip may be
missing. A wheel without a `.data` folder is importable as soon as it is unpacked (the binary distribution format's
specification), and that asks for nothing.
"""

from __future__ import annotations

import atexit
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

VERSIONS = ("3.11", "3.12", "3.13")
FOLDER = Path(".gpu-wheels")
# As REQUIRED of rankscope_exporter.__main__, which cannot be imported yet; a test holds them together.
IMPORTS = {
    "pynvml": "nvidia-ml-py",
    "prometheus_client": "prometheus-client",
    "fastapi": "fastapi",
    "uvicorn": "uvicorn",
    "httptools": "httptools",
    "uvloop": "uvloop",
    "yaml": "PyYAML",
    "bcrypt": "bcrypt",
}


class WheelsError(Exception):
    """The dependencies are neither installed nor brought along."""


def download(folder: Path = FOLDER) -> None:
    """A folder of wheels for each Python version. Needs pip and a network; raises CalledProcessError."""
    for version in VERSIONS:
        where = ["--only-binary=:all:", "--platform=manylinux2014_x86_64", f"--python-version={version}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", *where]
        subprocess.run([*command, f"--dest={folder / version}", *IMPORTS.values()], check=True)


def provide(folder: Path = FOLDER) -> Path | None:
    """The folder to put on the path so that everything can be imported; None if that is so already.

    It is there until this process ends. Raises WheelsError.
    """
    if not (missing := [name for name in IMPORTS if importlib.util.find_spec(name) is None]):
        return None
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    wheels = sorted((folder / version).glob("*.whl"))
    if not wheels:
        raise WheelsError(
            f"{', '.join(missing)} missing, and {folder / version} has no wheels: run `make gpu-wheels` on a machine "
            f"with a network and bring {folder} along"
        )
    unpacked = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    atexit.register(shutil.rmtree, unpacked, ignore_errors=True)
    unpacked.chmod(0o755)  # for the exporter that runs as nobody
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(unpacked)
    return unpacked


if __name__ == "__main__":
    download()
