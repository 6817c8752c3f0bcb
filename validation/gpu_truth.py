"""Measure the error of each exporter's busy ratio.

    python -m validation.gpu_truth --save

Eight simulated GPUs are busy 5% of the time: four for 1 s every 20 s, four for 50 ms every second, each a quarter of a
second after the one before. Both exporters are scraped once a second. All scrape intervals and their phases are taken
from this recording, at each second with 5 minutes before it: Rankscope's counter as PromQL's rate(…[5m]),
nvitop-exporter's gauge as avg_over_time(…[5m]). The error is the difference to the GPU's true busy ratio in those
5 minutes, in percentage points.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from testing import report
from testing.simulated_node import Exporter, running

from rankscope_exporter.simulation.scenario import Scenario
from rankscope_exporter.simulation.timeline import State, Timeline

WINDOW = 300  # seconds
INTERVALS = (5, 15, 30, 60)  # seconds
PATTERNS = {"1 s every 20 s": (1.0, 20.0), "50 ms every 1 s": (0.05, 1.0)}
OFFSETS = (0.0, 0.25, 0.5, 0.75)  # seconds
START_UP = 60  # seconds for the exporters' start, before the recording

Sample = tuple[float, float]
Recording = dict[int, list[Sample]]  # by GPU; seconds since the start of the recording, and the value


def bursts(length: float, period: float, offset: float, end: float) -> Timeline:
    """Return a timeline with `length` busy seconds at the start of each period, the first at `offset`."""
    states = [(0.0, State())]
    for number in range(int(end / period) + 1):
        at = offset + number * period
        states += [(at, State(busy=1.0)), (at + length, State())]
    return Timeline(states)


def timelines(end: float) -> list[Timeline]:
    """Return one timeline for each GPU: each pattern with each offset."""
    return [bursts(*pattern, offset, end) for pattern in PATTERNS.values() for offset in OFFSETS]


def record(exporters: Sequence[Exporter], seconds: int) -> tuple[float, list[Recording]]:
    """Return the unix time of the start, and each exporter's recording."""
    recordings: list[Recording] = [{} for _ in exporters]
    began = time.time()
    for second in range(seconds + 1):
        time.sleep(max(0.0, began + second - time.time()))
        for exporter, recording in zip(exporters, recordings, strict=True):
            at = time.time() - began
            for gpu, value in exporter.busy_values().items():
                recording.setdefault(gpu, []).append((at, value))
    return began, recordings


def rate(samples: Sequence[Sample], start: float, end: float) -> float:
    """Return PromQL's rate of a counter over a window (Prometheus 2.42, promql/functions.go: extrapolatedRate)."""
    (first, low), (last, high) = samples[0], samples[-1]
    covered, increase = last - first, high - low
    average = covered / (len(samples) - 1)
    before, after = first - start, end - last
    if increase > 0:
        before = min(before, covered * low / increase)  # a counter does not start below zero
    limits = [gap if gap < 1.1 * average else average / 2 for gap in (before, after)]
    return increase * (covered + sum(limits)) / covered / (end - start)


def mean(samples: Sequence[Sample], _start: float, _end: float) -> float:
    """Return PromQL's avg_over_time of a gauge."""
    return statistics.fmean(value for _, value in samples)


def windows(samples: Sequence[Sample], interval: int) -> Iterator[tuple[float, float, list[Sample]]]:
    """Yield start, end and samples of every window, for every phase of the scrape interval."""
    for phase in range(interval):
        scraped = samples[phase::interval]
        for end in range(WINDOW, len(samples)):
            inside = [sample for sample in scraped if end - WINDOW <= sample[0] <= end]
            yield end - WINDOW, end, inside


def errors(
    recording: Recording, gpus: range, interval: int, ratio: Callable[..., float], truth: Callable[..., float]
) -> list[float]:
    """Return each window's error in percentage points."""
    return [
        100 * (ratio(samples, start, end) - truth(gpu, start, end))
        for gpu in gpus
        for start, end, samples in windows(recording[gpu], interval)
    ]


def measure(seconds: int) -> list[dict[str, Any]]:
    """Return a row for each pattern, interval and exporter."""
    planned = timelines(START_UP + seconds)
    begun = time.time()
    with running(lambda _: Scenario(tuple(planned), follow_ranks=False)) as (node, exporters):
        began, recordings = record(exporters, seconds)
    if began - begun > START_UP:
        raise TimeoutError(f"the exporters took more than {START_UP} s to start")

    def truth(gpu: int, start: float, end: float) -> float:
        shift = began - node.start_unix
        spent = planned[gpu].seconds(end + shift) - planned[gpu].seconds(start + shift)
        return spent.utilized / (end - start)

    rows = []
    for index, pattern in enumerate(PATTERNS):
        gpus = range(index * len(OFFSETS), (index + 1) * len(OFFSETS))
        for interval in INTERVALS:
            for exporter, recording, ratio in zip(exporters, recordings, (rate, mean), strict=True):
                found = errors(recording, gpus, interval, ratio, truth)
                rows.append(row(pattern, interval, exporter.name, found))
    return rows


def row(pattern: str, interval: int, exporter: str, found: Sequence[float]) -> dict[str, Any]:
    """Return a row of the table, with errors in percentage points."""
    sizes = sorted(abs(error) for error in found)
    return {
        "bursts": pattern,
        "interval_seconds": interval,
        "exporter": exporter,
        "windows": len(found),
        "median_error_points": round(statistics.median(sizes), 3),
        "largest_error_points": round(sizes[-1], 3),
        "share_within_1_point": round(sum(size <= 1 for size in sizes) / len(sizes), 4),
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    head = ("bursts", "scrape interval", "exporter", "median error", "largest error", "within 1 point")
    cells = [
        (
            row["bursts"],
            f"{row['interval_seconds']} s",
            row["exporter"],
            f"{row['median_error_points']:.2f}",
            f"{row['largest_error_points']:.2f}",
            f"{row['share_within_1_point']:.1%}",
        )
        for row in rows
    ]
    return report.table(head, cells)


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=int, default=WINDOW + 60, help=f"seconds to record, more than {WINDOW}")
    options = parser.parse_args()
    if options.seconds <= WINDOW:
        parser.error(f"--seconds: {options.seconds} is not more than {WINDOW}")
    rows = measure(options.seconds)
    title, bound, packages = "Error of the busy ratio", "1 point", ["nvitop-exporter", "prometheus-client", "uvicorn"]
    report.Report("gpu_truth", title, __doc__, bound, [table(rows)], rows, packages).publish(options.save)


if __name__ == "__main__":
    main()
