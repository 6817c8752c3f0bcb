"""The readings and verdicts of one poll of the collector `findings`, for reports."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from rankscope_exporter.diagnosis.judged import Judged
from rankscope_exporter.diagnosis.readings import RankReading, Run
from rankscope_exporter.gpu.rank_gpus import RankGpu
from rankscope_exporter.ranks.rank import Scan
from rankscope_exporter.ranks.recent import Moment, Recent

RUN_WINDOW = 30.0
"""Runs that are not judged are shown over this many seconds, up to twice as many."""
GPU_WINDOW = 10.0
"""The same for GPUs."""
Readings = Mapping[Run, Sequence[RankReading]]
Gpus = Mapping[str, RankGpu]


class Look(NamedTuple):
    """One poll of the collector `findings`."""

    at: float
    """Seconds of CLOCK_MONOTONIC."""
    unix: float
    scan: Scan
    readings: Readings
    judged: Judged
    before: Readings
    """Earlier readings of the runs that are not judged."""
    gpus: Gpus
    """The GPUs by UUID."""
    gpus_before: Moment[Gpus]

    def not_judged(self) -> dict[Run, str]:
        """Return the living runs that are not judged, with the reason."""
        living = {run for run, ranks in self.readings.items() if any(one.ended is None for one in ranks)}
        return {run: reason for run, reason in self.judged.not_judged.items() if run in living}


class PollHistory:
    """The earlier readings that a poll is compared with."""

    def __init__(self) -> None:
        self._runs: dict[Run, Recent[Sequence[RankReading]]] = {}
        self._gpus = Recent[Gpus](GPU_WINDOW)

    def next(self, at: float, scan: Scan, readings: Readings, judged: Judged, gpus: Gpus) -> Look:
        """Return the `Look` of a new poll."""
        self._runs = {run: self._runs.get(run) or Recent(RUN_WINDOW) for run in judged.not_judged}
        for run, recent in self._runs.items():
            recent.add(at, readings[run])
        self._gpus.add(at, gpus)
        before = {run: recent.oldest.value for run, recent in self._runs.items()}
        return Look(at, time.time(), scan, readings, judged, before, gpus, self._gpus.oldest)
