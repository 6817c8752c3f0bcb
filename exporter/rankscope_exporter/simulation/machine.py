"""What `--simulate` asks for: the GPUs of a scenario instead of NVIDIA's driver, busy as the ranks are."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager

from rankscope.record import phases
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.ranks import RankActivity
from rankscope_exporter.simulation.scenario import load_scenario

# Phases of a rank in which a simulated GPU computes for it: a host waits for a device that has something to do.
COMPUTING = (*phases.COMPUTING, "device_wait", "evaluation")

logger = logging.getLogger(__name__)


def simulated(what: str, run_directory: RunDirectory) -> AbstractContextManager[object]:
    """Installs them while it lasts. `what` is a number of GPUs or a scenario's path. Raises ScenarioError at once."""
    driver = SimulatedDriver(load_scenario(what), activities=lambda: _activities(run_directory))
    logger.warning("the GPUs are simulated: %d of them", len(driver.gpus))
    return installed(driver)


def _activities(run_directory: RunDirectory) -> Iterable[RankActivity]:
    """The living ranks whose record names a GPU."""
    for rank in run_directory.scan().ranks:
        snapshot = rank.snapshot
        if snapshot.alive and snapshot.info["uuid"]:
            seconds = snapshot.phase_seconds
            computing = sum(seconds[phase] for phase in COMPUTING)
            pid = int(snapshot.info["pid"])
            yield RankActivity(snapshot.info["uuid"], pid, computing, seconds["collective_wait"])
