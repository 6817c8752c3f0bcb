"""`--simulate`: GPUs of a scenario instead of NVIDIA's driver, busy according to the ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass

from rankscope.record import phases
from rankscope.record.snapshot import RankSnapshot
from rankscope_exporter.ranks.run_directory import RunDirectory
from rankscope_exporter.simulation.driver import SimulatedDriver
from rankscope_exporter.simulation.library import installed
from rankscope_exporter.simulation.ranks import RankActivity
from rankscope_exporter.simulation.scenario import load_scenario

# A rank's phases in which a simulated GPU computes: while waiting for the device, it has work.
COMPUTING = (*phases.COMPUTING, "device_wait", "evaluation")
# A device that is dry to the end of each phase computes, too: it keeps up with the host.
MOST_DRY = 0.9

logger = logging.getLogger(__name__)


def simulated(argument: str, run_directory: RunDirectory) -> AbstractContextManager[object]:
    """Return a context with simulated GPUs. `argument` is their number or a scenario's path. Raises DocumentError."""
    driver = SimulatedDriver(load_scenario(argument), activities=Activities(run_directory))
    logger.warning("using %d simulated GPUs", len(driver.gpus))
    return installed(driver)


class Activities:
    """The activity of living ranks whose record names a GPU, on which no kernel runs while it is dry."""

    def __init__(self, run_directory: RunDirectory) -> None:
        self._run_directory = run_directory
        self._ranks: dict[tuple[str, int], _Rank] = {}

    def __call__(self) -> Iterable[RankActivity]:
        """Yield the activity of each rank."""
        known, self._ranks = self._ranks, {}
        for rank in self._run_directory.scan().ranks:
            snapshot = rank.snapshot
            if snapshot.alive and snapshot.info["uuid"]:
                key = snapshot.info["uuid"], int(snapshot.info["pid"])
                self._ranks[key] = one = known.get(key) or _Rank()
                one.add(snapshot)
                yield RankActivity(*key, one.busy, snapshot.phase_seconds["collective_wait"])


@dataclass
class _Rank:
    """A rank's computing time on its GPU so far, and what it follows from."""

    busy: float = 0.0
    computing: float = 0.0
    on_device: float = 0.0
    dry: float = 0.0
    dry_ratio: float = 0.0

    def add(self, snapshot: RankSnapshot) -> None:
        computing = sum(snapshot.phase_seconds[phase] for phase in COMPUTING)
        on_device = sum(snapshot.device_seconds.get(phase, 0.0) for phase in phases.COMPUTING)
        dry = sum(snapshot.device_dry_seconds.get(phase, 0.0) for phase in phases.COMPUTING)
        if on_device > self.on_device:
            self.dry_ratio = min((dry - self.dry) / (on_device - self.on_device), MOST_DRY)
            self.on_device, self.dry = on_device, dry
        self.busy += max(computing - self.computing, 0.0) * (1.0 - self.dry_ratio)
        self.computing = computing
