"""Parts 3 and 4: what the exporter costs on this driver as it is by default, and what it lacks without privileges."""

from __future__ import annotations

import http.client
import os
import time
from collections import Counter
from collections.abc import Iterable, Iterator

from benchmarks.exporter_cost import PAUSE
from testing.processes import MEBIBYTE, cpu_seconds, resident_bytes
from testing.simulated_node import HEADERS
from validation.gpu_check.exporter import Exporter, Series, running
from validation.gpu_check.report import Check

COST = "cost of the exporter"
UNPRIVILEGED = "as nobody"
SCRAPES = 300


def cost(exporter: Exporter, seconds: float = 30.0) -> Iterator[Check]:
    """Sampling once a second, then scrapes."""
    spent, began = cpu_seconds(exporter.pid), time.monotonic()
    time.sleep(seconds)
    share = (cpu_seconds(exporter.pid) - spent) / (time.monotonic() - began)
    yield _measured("sampling, percent of a core", f"{100 * share:.2f}", f"over {seconds:.0f} s")
    durations = sorted(scrape_seconds(exporter.port))
    for name, index in (("p50", SCRAPES // 2), ("p99", int(SCRAPES * 0.99))):
        yield _measured(f"scrape {name}, ms", f"{1000 * durations[index]:.2f}", "on a kept connection, compressed")
    yield _measured("series", str(len(exporter.scrape().values)))
    yield _measured("resident memory, MiB", f"{resident_bytes(exporter.pid) / MEBIBYTE:.1f}")


def unprivileged(settle: float = 5.0) -> Iterator[Check]:
    """The series that an exporter of another user serves, beside those of one of this user."""
    if os.geteuid():
        yield Check(UNPRIVILEGED, "the exporter", "measured", note="this run is not root's: all of it is unprivileged")
        return
    with running() as ours:
        time.sleep(settle)
        root = ours.scrape().values.keys()
    with running(as_nobody=True) as ours:
        time.sleep(settle)
        nobody = ours.scrape().values.keys()
        complaints = ours.complaints()
    yield from differences(root, nobody)
    yield logged(UNPRIVILEGED, complaints)


def differences(root: Iterable[Series], nobody: Iterable[Series]) -> Iterator[Check]:
    """By metric, how many series each has; what both have alike makes one line."""
    counts = Counter(name for name, _ in root), Counter(name for name, _ in nobody)
    names = sorted(counts[0].keys() | counts[1].keys())
    unlike = [name for name in names if counts[0][name] != counts[1][name]]
    for name in unlike:
        yield Check(UNPRIVILEGED, name, "differs", f"{counts[1][name]} series", f"as root {counts[0][name]}")
    alike = sum(counts[0][name] for name in names if name not in unlike)
    yield Check(
        UNPRIVILEGED, "metrics with as many series as root's", "ok", f"{len(names) - len(unlike)}, {alike} series"
    )


def logged(part: str, complaints: list[str]) -> Check:
    """Warnings and errors."""
    text = " / ".join(complaints[:10])
    return Check(part, "warnings and errors logged", "differs" if complaints else "ok", str(len(complaints)), note=text)


def scrape_seconds(port: int) -> Iterator[float]:
    """As Prometheus asks, a little apart, without the time to read what was answered."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    for _ in range(SCRAPES):
        began = time.perf_counter()
        connection.request("GET", "/metrics", headers=HEADERS)
        connection.getresponse().read()
        yield time.perf_counter() - began
        time.sleep(PAUSE)
    connection.close()


def _measured(about: str, value: str, note: str = "") -> Check:
    return Check(COST, about, "measured", value, note=note)
