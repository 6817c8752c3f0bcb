"""Measure the cost of each exporter on one machine with eight busy simulated GPUs and eight training ranks.

    python -m benchmarks.exporter_cost --scrapes 100000 --save

It measures the CPU use of sampling once a second, as a ratio of a core; latency and CPU time of scrapes like those of
Prometheus; and resident memory. For Rankscope's exporter it also measures the growth of memory over many scrapes, and
whether 64 scrapers at once disturb sampling. A GPU that is always busy shows this: its counter grows by the time
between two readings, and in total by the elapsed time. The cost of the diagnosis is the difference to Rankscope's
exporter without findings.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import threading
import time
from collections.abc import Sequence
from typing import Any

from testing import report
from testing.processes import MEBIBYTE, cpu_seconds, resident_bytes
from testing.simulated_node import HEADERS, Exporter, ours, running
from testing.statistics import percentile

from rankscope_exporter.simulation.scenario import Scenario
from rankscope_exporter.simulation.timeline import SimulatedProcess, State, Timeline

GPUS = 8
WARM_UP = 200  # scrapes
TIMED = 500  # scrapes
PAUSE = 0.05  # seconds between them; the exporter makes a page each 0.02 s at most


def all_busy(pids: Sequence[int]) -> Scenario:
    """Return a scenario in which each GPU computes all the time for the rank with its number."""
    states = [State(busy=1.0, processes=(SimulatedProcess(pid, 2**34),)) for pid in pids]
    return Scenario(tuple(Timeline([(0.0, state)]) for state in states), follow_ranks=False)


def idle_cost(exporters: Sequence[Exporter], seconds: float) -> list[float]:
    """Return the ratio of a core that each exporter uses without scrapes."""
    before = [cpu_seconds(exporter.pid) for exporter in exporters]
    began = time.monotonic()
    time.sleep(seconds)
    elapsed = time.monotonic() - began
    return [(cpu_seconds(e.pid) - spent) / elapsed for e, spent in zip(exporters, before, strict=True)]


def scrape_cost(exporter: Exporter) -> dict[str, Any]:
    """Return the figures of single scrapes, with pauses: the CPU's caches are cold, as in production."""
    timed(exporter, WARM_UP, 0)
    series = sum(not line.startswith(b"#") for line in exporter.scrape().splitlines())
    before = cpu_seconds(exporter.pid)
    durations = timed(exporter, TIMED, PAUSE)
    return {
        "series": series,
        "scrape_p50_ms": round(1000 * percentile(durations, 0.5), 2),
        "scrape_p99_ms": round(1000 * percentile(durations, 0.99), 2),
        "scrape_least_ms": round(1000 * min(durations), 2),
        "scrape_cpu_ms": round(1000 * (cpu_seconds(exporter.pid) - before) / TIMED, 2),
        "resident_mib": mebibytes(exporter),
    }


def memory(exporter: Exporter, scrapes: int) -> list[dict[str, float]]:
    """Return the resident memory after each tenth of the scrapes."""
    points = []
    for tenth in range(1, 11):
        timed(exporter, scrapes // 10, 0)
        points.append({"scrapes": tenth * (scrapes // 10), "resident_mib": mebibytes(exporter)})
    return points


def mebibytes(exporter: Exporter) -> float:
    return round(resident_bytes(exporter.pid) / MEBIBYTE, 1)


def timed(exporter: Exporter, scrapes: int, pause: float) -> list[float]:
    durations = []
    for _ in range(scrapes):
        began = time.perf_counter()
        exporter.scrape(HEADERS)
        durations.append(time.perf_counter() - began)
        time.sleep(pause)
    return durations


def scrape_in_parallel(exporter: Exporter, scrapers: int, seconds: float) -> dict[str, Any]:
    """Scrape with all scrapers at once, without a pause. Return the figures, with those of sampling meanwhile."""
    stop = threading.Event()
    counts = [0] * scrapers

    def scrape_on(index: int) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", exporter.port, timeout=60)
        while not stop.is_set():
            connection.request("GET", exporter.path, headers=HEADERS)
            connection.getresponse().read()
            counts[index] += 1
        connection.close()

    threads = [threading.Thread(target=scrape_on, args=(index,)) for index in range(scrapers)]
    for thread in threads:
        thread.start()
    sampling = watch_sampling(exporter, seconds)
    stop.set()
    for thread in threads:
        thread.join()
    return {"scrapers": scrapers, "scrapes_per_second": round(sum(counts) / seconds), **sampling}


def watch_sampling(exporter: Exporter, seconds: float) -> dict[str, float]:
    """Return the longest time without a reading, and the ratio of busy time that was counted, by the first GPU."""
    seen: list[tuple[float, float]] = []
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        value = exporter.busy_values()[0]
        if not seen or value != seen[-1][1]:
            seen.append((time.monotonic(), value))
        time.sleep(0.05)
    del seen[0]  # the age of this reading is unknown
    values = [value for _, value in seen]
    passed, counted = seen[-1][0] - seen[0][0], values[-1] - values[0]
    longest = max(later - earlier for earlier, later in itertools.pairwise(values))
    return {"longest_step_seconds": round(longest, 2), "counted_share": round(counted / passed, 3)}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Return all figures, an entry for each exporter."""
    without = ours("without findings", "--no-collector.findings")
    with running(all_busy, ranks=GPUS, more=[without]) as (_, exporters):
        time.sleep(3)  # for start-up
        shares = idle_cost(exporters, options.seconds)
        figures = {}
        for exporter, share in zip(exporters, shares, strict=True):
            figures[exporter.name] = {"cpu_percent": round(100 * share, 2), **scrape_cost(exporter)}
        first = exporters[0]
        sampling = {
            "alone": watch_sampling(first, options.crowd_seconds),
            "with 64 scrapers": scrape_in_parallel(first, 64, options.crowd_seconds),
        }
        growth = memory(first, options.scrapes)
    return {"exporters": figures, "sampling": sampling, "memory": growth}


def table(exporters: dict[str, dict[str, Any]]) -> str:
    """Return the figures of each exporter as Markdown."""
    shown = {
        "sampling once a second (% of a core)": "cpu_percent",
        "series": "series",
        "scrape P50 (ms)": "scrape_p50_ms",
        "scrape P99 (ms)": "scrape_p99_ms",
        "shortest scrape (ms)": "scrape_least_ms",
        "CPU time of a scrape (ms)": "scrape_cpu_ms",
        "resident memory (MiB)": "resident_mib",
    }
    rows = [(text, *(figures[key] for figures in exporters.values())) for text, key in shown.items()]
    return report.table(("", *exporters), rows)


def remarks(figures: dict[str, Any]) -> str:
    """Return the figures that only Rankscope's exporter has."""
    lines = [
        f"- Sampling {name}: at most {sampling['longest_step_seconds']} s between two readings; "
        f"{sampling['counted_share']:.1%} of the busy time counted."
        for name, sampling in figures["sampling"].items()
    ]
    rate = figures["sampling"]["with 64 scrapers"]["scrapes_per_second"]
    lines.append(f"- 64 scrapers at once: {rate} scrapes a second.")
    first, last = figures["memory"][0], figures["memory"][-1]
    growth = f"{first['resident_mib']} MiB after {first['scrapes']}, {last['resident_mib']} MiB after {last['scrapes']}"
    return "\n".join([*lines, f"- Resident memory over further scrapes without a pause: {growth}."])


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("--seconds", type=float, default=60, help="for the measurement of CPU time without scrapes")
    parser.add_argument("--scrapes", type=int, default=5000, help="for the measurement of the exporter's memory")
    parser.add_argument("--crowd-seconds", type=float, default=15, help="for the measurement with 64 scrapers")
    options = parser.parse_args()
    figures = measure(options)
    body = [table(figures["exporters"]), remarks(figures)]
    packages = ["nvitop-exporter", "prometheus-client", "uvicorn"]
    report.Report("exporter_cost", "Cost of the exporter", __doc__, "none", body, figures, packages).publish(
        options.save
    )


if __name__ == "__main__":
    main()
