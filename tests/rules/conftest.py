"""The scripts of deploy/prometheus, which is no package, and the paths that the tests of rules and routing share."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROMETHEUS = ROOT / "deploy/prometheus"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, PROMETHEUS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def render() -> ModuleType:
    return load("render")


@pytest.fixture(scope="session")
def fast() -> ModuleType:
    return load("fast")
