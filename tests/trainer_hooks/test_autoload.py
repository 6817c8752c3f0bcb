"""The start without a code change never makes `import torch` raise, in any version of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOOK = Path(__file__).parents[2] / "trainer_hooks"
LOAD = "from rankscope.autoload import autoload; autoload(); print('loaded')"
PYTHONS = [f"python3.{minor}" for minor in range(8, 15)]


def load(python: str, *, switch: str, code: str = LOAD) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(HOOK), "RANKSCOPE": switch}
    return subprocess.run([python, "-c", code], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("name", PYTHONS)
@pytest.mark.parametrize("switch", ["1", "0"])
def test_every_python_on_this_machine_loads_it(name: str, switch: str) -> None:
    python = shutil.which(name)
    if python is None or load(python, switch=switch, code="").returncode:
        pytest.skip(f"{name} is not installed")
    assert load(python, switch=switch).stdout == "loaded\n"


@pytest.mark.parametrize("module", ["attach", "guard", "publication"])
def test_a_failed_import_is_a_warning(module: str) -> None:
    code = f"import sys; sys.modules['rankscope.{module}'] = None; {LOAD}"
    done = load(sys.executable, switch="1", code=code)
    assert done.stdout == "loaded\n"
    assert "not watching this process" in done.stderr
    assert load(sys.executable, switch="0", code=code).stderr == ""


def test_a_script_may_also_instrument_itself_before_it_imports_torch() -> None:
    code = "import rankscope; rankscope.instrument(); import torch; print('ready')"
    done = load(sys.executable, switch="1", code=code)
    assert (done.stdout, done.stderr) == ("ready\n", "")
