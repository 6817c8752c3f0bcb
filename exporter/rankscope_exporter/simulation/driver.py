"""The simulated machine: GPUs, clock, and driver state."""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable
from pathlib import Path

from rankscope_exporter.simulation.changes import Changes
from rankscope_exporter.simulation.gpu import SimulatedGpu
from rankscope_exporter.simulation.holders import HolderDirectory
from rankscope_exporter.simulation.ranks import RankActivity, RankFollower, RankHistory
from rankscope_exporter.simulation.scenario import Scenario
from rankscope_exporter.worker import Worker


class SimulatedDriver:
    """A running scenario. It starts when this object is created."""

    def __init__(
        self,
        scenario: Scenario,
        *,
        activities: Callable[[], Iterable[RankActivity]] | None = None,
        processes_dir: Path | None = None,
        clock: Callable[[], float] | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        """Start the scenario. `clock` returns unix time in seconds; `processes_dir` overrides the scenario's."""
        self.sleep = sleep
        self._clock = clock or _steady_clock()
        self.start_unix = self._clock()
        self._loaded = scenario.driver
        follows = scenario.follow_ranks and activities is not None
        holders = HolderDirectory(processes_dir or scenario.processes_dir)
        histories = [RankHistory(one.ranks_busy) if follows else None for one in scenario.timelines]
        self.gpus = tuple(
            SimulatedGpu(
                index,
                scenario.models.get(index, scenario.model),
                timeline,
                self.start_unix,
                histories[index],
                holders.find,
                scenario.machine,
            )
            for index, timeline in enumerate(scenario.timelines)
        )
        by_uuid = {gpu.uuid: history for gpu, history in zip(self.gpus, histories, strict=True) if history}
        self.workers: list[Worker] = []
        """The threads that follow ranks and changes."""
        if follows and activities:
            self.workers.append(RankFollower(activities, by_uuid, self.now))
        if scenario.changes_dir:
            self.workers.append(Changes(scenario.changes_dir, scenario.timelines, self.now))

    def now(self) -> float:
        """Return the seconds since the scenario started."""
        return self._clock() - self.start_unix

    def load(self) -> int | None:
        """Return the number of the current driver load, None if unloaded. A connection ends with its load."""
        index = bisect_right(self._loaded, self.now(), key=lambda entry: entry[0]) - 1
        return index if self._loaded[index][1] else None


def _steady_clock() -> Callable[[], float]:
    """Return a unix clock that does not jump when the machine's clock is set, like a GPU's counters."""
    offset = time.time() - time.monotonic()
    return lambda: offset + time.monotonic()
