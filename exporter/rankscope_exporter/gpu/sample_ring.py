"""The driver's ring of utilization samples: finds new samples and the time that each covers.

Sample timestamps have their own clock. NVML documents unix time, some drivers use time since boot, and either clock can
be set. So only differences between timestamps are used, and only those that can be one sampling period.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean

from rankscope_exporter.gpu.nvml.device import UtilizationSample

# Seconds. NVIDIA documents a sampling period "between 1 second and 1/6 second depending on the product" (nvidia-smi
# --help-query-gpu, utilization.gpu).
SHORTEST_PERIOD = 1 / 6
LONGEST_PERIOD = 1.0
JITTER = 1.5  # sampling periods; a longer distance between samples is a gap

REMEMBERED = 16  # stamps: enough in a row to identify the same place in the ring, even after the clock is set back


@dataclass(frozen=True)
class CoveredSample:
    """A new sample: the seconds that it covers, and the share of them in which the engine was busy."""

    share: float
    seconds: float


class SampleRing:
    """Reader of one ring. Remembers the newest stamps to find the samples added since."""

    def __init__(self) -> None:
        self._stamps: list[int] = []  # newest first
        self._uncharged: list[float] = []  # shares of samples with the same stamp as their predecessor
        self.period = SHORTEST_PERIOD
        """The driver's sampling period in seconds, estimated from the stamps."""

    def read(self, newest_first: Iterable[UtilizationSample]) -> list[CoveredSample]:
        """Return the samples added since the last read, oldest first."""
        gained = self._gained(newest_first)
        before = self._stamps[0] if self._stamps else 0
        stamps = [*(sample.timestamp_us for sample in gained), *self._stamps]
        self._stamps = stamps[:REMEMBERED]
        self.period = sampling_period(stamps) or self.period
        return self._cover(gained[::-1], before)

    def _gained(self, newest_first: Iterable[UtilizationSample]) -> list[UtilizationSample]:
        samples: list[UtilizationSample] = []
        stamps: list[int] = []
        for sample in newest_first:
            samples.append(sample)
            stamps.append(sample.timestamp_us)
            if _ends_with(stamps, self._stamps):
                return samples[: -len(self._stamps)]
        # The ring is shorter than the remembered stamps: it dropped the oldest.
        for size in range(len(self._stamps) - 1, 0, -1):
            if _ends_with(stamps, self._stamps[:size]):
                return samples[:-size]
        return self._not_remembered(samples, stamps)

    def _not_remembered(self, samples: list[UtilizationSample], stamps: list[int]) -> list[UtilizationSample]:
        """Return the new samples of a ring that also dropped or added samples among the remembered ones."""
        if not self._stamps or self._stamps[0] not in stamps:
            return samples
        newest = stamps.index(self._stamps[0])
        late = zip(samples[newest:], stamps[newest : newest + REMEMBERED], strict=False)
        return samples[:newest] + [sample for sample, stamp in late if stamp not in self._stamps]

    def _cover(self, gained: Iterable[UtilizationSample], before: int) -> list[CoveredSample]:
        covered = []
        for sample in gained:
            share, step = min(sample.percent, 100) / 100, (sample.timestamp_us - before) / 1e6
            before = sample.timestamp_us
            self._uncharged = [*self._uncharged, share][-REMEMBERED:]
            if not step:  # a duplicate sample or a stopped clock: the next stamp determines the duration
                covered.append(CoveredSample(share, 0.0))
                continue
            is_regular = 0 < step <= JITTER * self.period * len(self._uncharged)
            covered.append(CoveredSample(fmean(self._uncharged), step if is_regular else self.period))
            self._uncharged.clear()
        return covered


def sampling_period(newest_first: Sequence[int]) -> float | None:
    """Return the seconds between two samples without a gap; None if the stamps do not determine it.

    This is the lower quartile of the differences: gaps lengthen some, and setting the clock shortens only a few.
    """
    steps = ((later - earlier) / 1e6 for later, earlier in pairwise(newest_first))
    possible = sorted(step for step in steps if 0 < step <= JITTER * LONGEST_PERIOD)
    return possible[len(possible) // 4] if possible else None


def _ends_with(stamps: Sequence[int], end: Sequence[int]) -> bool:
    return bool(end) and stamps[-1:] == end[-1:] and stamps[-len(end) :] == end
