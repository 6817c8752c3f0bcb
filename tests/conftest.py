"""Fixtures and hooks for all tests: a run directory in memory, an old boot, a free port, and the tests' tiers."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
from testing import servers
from tests import tiers

# A shell without job control starts background processes with SIGINT ignored. The tests' jobs would inherit that, and
# Ctrl-C would not interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# An example may take long on a busy machine, and may use the files of those before.
hypothesis.settings.register_profile(
    "rankscope", deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
hypothesis.settings.load_profile("rankscope")

# Garbage of earlier tests, such as process groups, has threads that a forked child lacks. If the child collected it,
# destructors would wait for these threads forever.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in tiers.TIERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.option.markexpr == "unit":
        config.pluginmanager.register(tiers.UnitTestGuard())


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files without unit tests if only those are wanted."""
    place = str(collection_path.relative_to(tiers.ROOT))
    return (config.option.markexpr == "unit" and place.startswith(tuple(tiers.BY_DIRECTORY))) or None


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and run files with slow tests first, so that no worker waits for one at the end."""
    order = list(tiers.TIERS)
    first: dict[Path, int] = {}
    for item in items:
        tier = tiers.tier(item)
        item.add_marker(tier)
        if tier == "promtool":  # each worker may run one at the same time, on two cores
            item.add_marker(pytest.mark.timeout(900))
        first[item.path] = min(order.index(tier), first.get(item.path, len(order)))
    items.sort(key=lambda item: first[item.path])


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Yield an empty run directory, on tmpfs as in production, and set it in the environment."""
    directory = Path(tempfile.mkdtemp(prefix="rankscope-test-", dir="/dev/shm"))
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def old_boot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shift this process's monotonic clock, as if the machine had been started a day earlier than it was."""
    real = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real() + 86400.0)


@pytest.fixture
def free_port() -> int:
    """Return a free port of the loopback interface."""
    return servers.free_port()
