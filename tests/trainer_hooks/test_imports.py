"""Modules that an import of the hook or the exporter loads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

PRINT_NEW_MODULES = """
import json, sys
before = set(sys.modules)
import {module}
print(json.dumps(sorted({{name.partition('.')[0] for name in set(sys.modules) - before}})))
"""


def modules_loaded_by(module: str) -> set[str]:
    code = PRINT_NEW_MODULES.format(module=module)
    answer = subprocess.run([sys.executable, "-I", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    return set(json.loads(answer.stdout))


@pytest.mark.parametrize("module", ["rankscope", "rankscope.autoload", "rankscope.cli.explaining.command"])
def test_the_hook_and_its_commands_import_only_the_standard_library(module: str) -> None:
    assert modules_loaded_by(module) - {"rankscope"} <= set(sys.stdlib_module_names)


def test_the_exporter_does_not_import_torch() -> None:
    assert "torch" not in modules_loaded_by("rankscope_exporter.__main__")
