"""The driver's ring of utilization samples: which samples are new, and how much time each of them covers.

The stamps of samples are a clock of their own. NVML documents unix time; some drivers use the time since boot, and any
of these clocks can be set. Only differences of stamps count here, and only those that can be one sampling period.
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
JITTER = 1.5  # sampling periods; between samples that are further apart there is a gap

REMEMBERED = 16  # stamps: so many in a row are found again only where they were, also after the clock was set back


@dataclass(frozen=True)
class Covered:
    """A new sample: the seconds that it covers, and the share of them in which the engine ran."""

    share: float
    seconds: float


class SampleRing:
    """Remembers the end of one ring, and so finds what the ring has gained since."""

    def __init__(self) -> None:
        self._stamps: list[int] = []  # the last ones, the newest first
        self._uncharged: list[float] = []  # shares of samples that have the stamp of the sample before them
        self.period = SHORTEST_PERIOD
        """The driver's sampling period in seconds, as far as the stamps show it."""

    def read(self, newest_first: Iterable[UtilizationSample]) -> list[Covered]:
        """Return the samples that the ring has gained since it was last read, the oldest first."""
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
        # The ring holds less than what is remembered: the rest was dropped.
        for size in range(len(self._stamps) - 1, 0, -1):
            if _ends_with(stamps, self._stamps[:size]):
                return samples[:-size]
        return samples

    def _cover(self, gained: Iterable[UtilizationSample], before: int) -> list[Covered]:
        covered = []
        for sample in gained:
            share, step = min(sample.percent, 100) / 100, (sample.timestamp_us - before) / 1e6
            before = sample.timestamp_us
            self._uncharged = [*self._uncharged, share][-REMEMBERED:]
            if not step:  # a sample that is there twice, or a clock that stood still: the next stamp says how long
                covered.append(Covered(share, 0.0))
                continue
            is_regular = 0 < step <= JITTER * self.period * len(self._uncharged)
            covered.append(Covered(fmean(self._uncharged), step if is_regular else self.period))
            self._uncharged.clear()
        return covered


def sampling_period(newest_first: Sequence[int]) -> float | None:
    """Return the seconds between two samples without a gap; None if the stamps do not show it.

    That is the lower quartile of the differences: gaps make others longer, and a clock that is set makes few shorter.
    """
    steps = ((later - earlier) / 1e6 for later, earlier in pairwise(newest_first))
    possible = sorted(step for step in steps if 0 < step <= JITTER * LONGEST_PERIOD)
    return possible[len(possible) // 4] if possible else None


def _ends_with(stamps: Sequence[int], end: Sequence[int]) -> bool:
    return bool(end) and stamps[-1:] == end[-1:] and stamps[-len(end) :] == end
