"""What every test may use: an empty run directory in memory, and servers' free ports."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from testing import servers
from tests import tiers

# A shell without job control starts what it puts into the background with SIGINT ignored, and so would be the jobs that
# the tests start: Ctrl-C would not interrupt them.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What earlier tests left as garbage, process groups among it, has threads that a forked child does not have: collected
# there, its destructors wait for them for ever.
os.register_at_fork(before=gc.freeze, after_in_parent=gc.unfreeze)


def pytest_configure(config: pytest.Config) -> None:
    for name, meaning in tiers.TIERS.items():
        config.addinivalue_line("markers", f"{name}: {meaning}")
    if config.option.markexpr == "unit":
        config.pluginmanager.register(tiers.Watch())


@pytest.hookimpl(tryfirst=True)  # before `-m` selects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with its tier, and run files with slow tests first, so that none is left alone at the end."""
    order = list(tiers.TIERS)
    first: dict[Path, int] = {}
    for item in items:
        tier = tiers.tier(item)
        item.add_marker(tier)
        if tier == "promtool":  # two cores have as many of them at once as there are workers
            item.add_marker(pytest.mark.timeout(900))
        first[item.path] = min(order.index(tier), first.get(item.path, len(order)))
    items.sort(key=lambda item: first[item.path])


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run directory of the test's own, on tmpfs as in production, named in the environment."""
    directory = Path(tempfile.mkdtemp(prefix="rankscope-test-", dir="/dev/shm"))
    monkeypatch.setenv("RANKSCOPE_RUN_DIR", str(directory))
    yield directory
    shutil.rmtree(directory)


@pytest.fixture
def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    return servers.free_port()
