"""Whether the driver's counters of PCIe bytes wrap at 32 bits: watched while the load uploads a known number of bytes.

The exporter does not serve them before they have passed 4 GiB (gpu/collectors/pcie.py): here they are read as they
are.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from validation.gpu_check.effects import AFTER, BEFORE
from validation.gpu_check.report import Check, judge, number

from rankscope_exporter.gpu.nvml.errors import DriverError

PART = "PCIe counters under load"
EVERY = 0.1  # seconds; 32 bits hold 0.08 s of a fast link's bytes, and 0.3 s of a slow one's
BITS_32 = 2.0**32

Counts = Mapping[str, float | None]
Sample = tuple[float, float]
"""Unix time and bytes."""


class Watch:
    """Reads the counters again and again, in a thread, until they fail."""

    def __init__(self, read: Callable[[], Counts]) -> None:
        self.samples: dict[str, list[Sample]] = {}
        self._read = read
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)

    def _run(self) -> None:
        with suppress(DriverError):
            while not self._stop.wait(EVERY):
                for direction, count in self._read().items():
                    if count is not None:
                        self.samples.setdefault(direction, []).append((time.time(), count))


def judge_wrap(phases: Mapping[str, Mapping[str, Any]], samples: Mapping[str, Sequence[Sample]]) -> Iterator[Check]:
    """How far they grew, whether they ever fell, and how large they became."""
    if not samples:
        yield Check(PART, "PCIe fields", "absent on both sides", note="the driver has none")
    for direction, seen in samples.items():
        falls = sum(later < earlier for (_, earlier), (_, later) in itertools.pairwise(seen))
        most = max(count for _, count in seen)
        wraps = "it wraps" if falls else "it has more than 32 bits" if most >= BITS_32 else "it has not come to 4 GiB"
        yield Check(PART, f"{direction}: largest value, falls", "measured", f"{number(most)}, {falls}", note=wraps)
    for name in ("upload once", "upload"):
        if name in phases and "receive" in samples:
            yield _growth(name, phases[name], samples["receive"])


def _growth(name: str, done: Mapping[str, Any], seen: Sequence[Sample]) -> Check:
    start, end = done["began"] - BEFORE, done["ended"] + AFTER
    during = [count for at, count in seen if start <= at <= end]
    grown = [during[-1] - during[0]] if during else []
    return judge(PART, f"{name}: received", grown, done["bytes"], 0.2 * done["bytes"], "raw, unwrapped by nobody")
