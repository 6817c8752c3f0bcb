"""`--simulate`: GPUs of a scenario instead of NVIDIA's driver, busy according to the ranks."""

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

# A rank's phases in which a simulated GPU computes: while waiting for the device, it has work.
COMPUTING = (*phases.COMPUTING, "device_wait", "evaluation")

logger = logging.getLogger(__name__)


def simulated(argument: str, run_directory: RunDirectory) -> AbstractContextManager[object]:
    """Return a context with simulated GPUs. `argument` is their number or a scenario's path. Raises ScenarioError."""
    driver = SimulatedDriver(load_scenario(argument), activities=lambda: _activities(run_directory))
    logger.warning("using %d simulated GPUs", len(driver.gpus))
    return installed(driver)


def _activities(run_directory: RunDirectory) -> Iterable[RankActivity]:
    """Yield the activity of living ranks whose record names a GPU."""
    for rank in run_directory.scan().ranks:
        snapshot = rank.snapshot
        if snapshot.alive and snapshot.info["uuid"]:
            seconds = snapshot.phase_seconds
            computing = sum(seconds[phase] for phase in COMPUTING)
            pid = int(snapshot.info["pid"])
            yield RankActivity(snapshot.info["uuid"], pid, computing, seconds["collective_wait"])
