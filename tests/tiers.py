"""Assign each test to a tier by what its code uses, so that no list of markers is needed.

`slow` builds environments, or judges whole jobs or hours of simulated training. `promtool` runs Prometheus's rule
tester, `e2e` starts processes or servers or waits for real time, and `torch` imports PyTorch. `unit` needs none of
these: `make check` runs only those.
A test's code is its function, its fixtures, and every function and class of the test packages that they name. Product
code is not analyzed; `UnitTestGuard` checks it while a unit test runs.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

ROOT = Path(__file__).parents[1]
TEST_PACKAGES = {"benchmarks", "docs", "examples", "nvml_simulator", "testing", "tests", "validation"}
TIERS = {
    "slow": "builds environments, or judges whole jobs or hours of simulated training",
    "promtool": "runs Prometheus's rule tester",
    "e2e": "starts processes or servers, or waits for real time",
    "torch": "needs PyTorch",
    "unit": "needs nothing but the interpreter",
}
BY_DIRECTORY = {
    "tests/attacks": "e2e",
    "tests/deploy/test_helm.py": "e2e",
    "tests/deploy/test_pod_security.py": "e2e",
    "tests/docs/test_install.py": "slow",
    "tests/e2e": "e2e",
    "tests/exporter/analyzer/test_disturbances.py": "slow",
    "tests/exporter/analyzer/test_jobs_of_one_name.py": "slow",
    "tests/exporter/analyzer/test_merge_is_exact.py": "slow",
    "tests/exporter/analyzer/test_restarts.py": "slow",
    "tests/exporter/analyzer/test_scenes.py": "slow",
    "tests/exporter/analyzer/test_silent_nodes.py": "slow",
    "tests/exporter/capture/test_command.py": "e2e",
    "tests/exporter/capture/test_machine.py": "e2e",
    "tests/exporter/capture/test_service.py::test_the_complaint_of_the_process_is_logged": "e2e",
    "tests/exporter/capture/test_torch_dumps.py": "e2e",
    "tests/exporter/diagnosis/test_chance.py": "slow",
    "tests/exporter/diagnosis/test_late_sets.py": "slow",
    "tests/exporter/diagnosis/test_measured_steps.py": "slow",
    "tests/exporter/diagnosis/test_persistence.py": "slow",
    "tests/exporter/diagnosis/test_speed.py": "slow",
    "tests/exporter/diagnosis/test_standstills.py": "slow",
    "tests/exporter/diagnosis/test_succession.py": "slow",
    "tests/exporter/job_report/test_report.py": "e2e",
    "tests/exporter/node_check/test_command.py": "e2e",
    "tests/exporter/test_daemon.py": "e2e",
    "tests/exporter/web": "e2e",
    "tests/rules": "promtool",
    "tests/test_wheel.py": "slow",
    "tests/testing/test_process_group.py": "e2e",
    "tests/validation/gauntlet/test_live.py": "slow",
    "tests/validation/gauntlet/test_runbooks.py": "promtool",
    "tests/validation/test_month_local.py": "slow",
    "tests/validation/test_siege.py::test_the_attack_happens_and_leaves_nothing_behind": "e2e",
}
BY_MODULE = {
    "http": "e2e",
    "multiprocessing": "e2e",
    "socket": "e2e",
    "subprocess": "e2e",
    "torch": "torch",
    "urllib": "e2e",
    "uvicorn": "e2e",
}
BY_CALL = {("time", "sleep"): "e2e", ("os", "fork"): "e2e"}
BY_EVENT = {
    "os.fork": "starts a process",
    "os.posix_spawn": "starts a process",
    "subprocess.Popen": "starts a process",
    "socket.bind": "opens a port",
    "socket.connect": "connects to a server",
    "time.sleep": "sleeps",
}


def tier(item: pytest.Item) -> str:
    """Return the first of TIERS that the test's directory, fixtures or code needs."""
    place = f"{item.path.relative_to(ROOT)}::{item.name}"
    found = {name for directory, name in BY_DIRECTORY.items() if place.startswith(directory)}
    if isinstance(item, pytest.Function):
        fixtures = [definition.func for found in item._fixtureinfo.name2fixturedefs.values() for definition in found]
        for function in (item.function, *fixtures):
            found |= needs(inspect.unwrap(function))
    return next(name for name in TIERS if name in found or name == "unit")


@cache
def needs(function: Callable[..., object]) -> frozenset[str]:
    """Return the tiers that a function's code needs, including the test packages' functions that it names."""
    found: set[str] = set()
    seen: set[object] = set()
    waiting: list[object] = [function]
    while waiting:
        value = waiting.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, type):
            waiting += [getattr(method, "__func__", method) for method in vars(value).values()]
        elif isinstance(value, FunctionType):
            found |= set(_direct_needs(value))
            waiting += _named(value)
    return frozenset(found)


def _direct_needs(function: FunctionType) -> Iterator[str]:
    names = _names(function.__code__)
    for name in names:
        value = function.__globals__.get(name)
        module = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None) or ""
        imported = name if value is None else module
        if tier_of := BY_MODULE.get(str(imported).partition(".")[0]):
            yield tier_of
    for (module, call), tier_of in BY_CALL.items():
        if module in names and call in names:
            yield tier_of


def _named(function: FunctionType) -> Iterator[object]:
    """Yield the functions and classes of the test packages that a function names, itself or in a module."""
    names = _names(function.__code__)
    spaces = [function.__globals__]
    spaces += [vars(value) for value in map(function.__globals__.get, names) if isinstance(value, ModuleType)]
    for space in spaces:
        for value in map(space.get, names):
            value = inspect.unwrap(value) if callable(value) else value
            if isinstance(value, (FunctionType, type)) and value.__module__.partition(".")[0] in TEST_PACKAGES:
                yield value


def _names(code: CodeType) -> set[str]:
    nested = [constant for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*map(_names, nested))


class UnitTestGuard:
    """Fails a unit test that does what its tier excludes, also in product code."""

    def __init__(self) -> None:
        self._seen: set[str] | None = None
        sys.addaudithook(self._record)

    def _record(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._seen is not None and event in BY_EVENT and arguments != (0,):
            self._seen.add(BY_EVENT[event])

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self) -> Iterator[None]:
        self._seen = set()
        try:
            yield
        finally:
            seen, self._seen = self._seen, None
        assert not seen, f"a unit test {' and '.join(sorted(seen))}: its tier is chosen in tests/tiers.py"
